"""One training step, written so that every mode runs the same code and none waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from torch_sink.loop.step.precision import Precision
from torch_sink.loop.step.step_log import StepLog
from torch_sink.loop.step.update import OptimizerUpdate

Forward = Callable[[nn.Module, Any], Any]


def supervised_forward(loss_fn: Callable[..., Any], precision: Precision) -> Forward:
    """The default forward: `loss_fn(model(x), y)` for batches of two."""

    def forward(model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, (tuple, list, dict)) else ""
            raise TypeError(
                f"the batch is a {type(batch).__name__}{size}; a tuple or list (x, y) trains by loss_fn(model(x), y), "
                "for anything else pass forward=lambda model, batch: loss"
            )
        inputs, targets = batch
        outputs = model(inputs)
        return loss_fn(precision.outputs(outputs) if precision.casts else outputs, targets)

    return forward


class LossFunction:
    """Forward pass and loss of a batch under a precision: what "compile" compiles."""

    def __init__(self, model: nn.Module, forward: Forward, precision: Precision) -> None:
        self._model, self._forward, self._precision = model, forward, precision

    def __call__(self, batch: Any) -> tuple[Any, dict[str, Tensor]]:
        """Returns the loss, still attached to its graph, and the metrics by name."""
        if self._precision.casts:
            with self._precision.context():
                result = self._forward(self._model, batch)
        else:
            result = self._forward(self._model, batch)
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(metrics, dict):
            raise TypeError(f"forward returned (loss, {type(metrics).__name__}); return loss, or (loss, dict)")
        if self._precision.casts and isinstance(loss, Tensor):
            loss = self._precision.loss(loss)
        return loss, metrics


def check_loss(loss: Any) -> None:
    """Raise unless `loss` is a tensor of one element that gradients can start from.

    Raises:
        TypeError: not a tensor.
        ValueError: not a scalar, or without a gradient.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss is a {type(loss).__name__}; loss_fn and forward return a tensor of one element")
    if loss.numel() != 1:
        raise ValueError(
            f"the loss has shape {list(loss.shape)}; a scalar is needed: reduce it, for instance with .mean(), "
            "or use reduction='mean' in the loss function"
        )
    if not loss.requires_grad:
        raise ValueError(
            "the loss does not depend on any parameter that requires a gradient; check forward= and model, "
            "and that the run is not inside torch.no_grad()"
        )


class TrainingStep:
    """Forward, backward and, after every `accumulate`-th batch, the update; losses go to the device log.

    Args:
        loss_function: batch -> (loss, metrics).
        update: applies the gradients.
        log: where losses and overflows go.
        accumulate: batches per update; each loss is divided by it.
        gradient_sync: called with whether gradients are reduced over the ranks; gives the context of forward and
            backward pass.
        backward_context: makes the context of a backward pass alone.
        static_gradients: keep gradients in one place and set them to zero after each update, as captured accumulation
            needs; else they are made anew for each.
    """

    def __init__(
        self,
        loss_function: LossFunction,
        update: OptimizerUpdate,
        log: StepLog,
        *,
        accumulate: int,
        gradient_sync: Callable[[bool], Any] | None = None,
        backward_context: Callable[[], Any] | None = None,
        static_gradients: bool = False,
    ) -> None:
        self.loss_function, self.update, self.log = loss_function, update, log
        self.accumulate_steps, self.static_gradients = accumulate, static_gradients
        self._gradient_sync, self._backward_context = gradient_sync, backward_context
        self._started = False

    def run(self, batch: Any, *, first: bool, last: bool) -> None:
        """Train on one batch.

        Args:
            batch: on the device.
            first: whether it opens an accumulation: old gradients are dropped.
            last: whether it closes one: the optimizer steps.
        """
        if first and not (self.static_gradients and self._started):
            self.update.zero_gradients()
        self._started = True
        self.accumulate(batch, last=last)
        if last:
            self.update.apply()
            if self.static_gradients:
                self.update.zero_gradients(in_place=True)
        if self.update.scaler is not None:
            self.log.write_overflow(self.update.found_inf if last else None)
        self.log.advance()

    def accumulate(self, batch: Any, *, last: bool) -> None:
        """Forward and backward; writes the loss to the log."""
        if self._gradient_sync is None:
            self._accumulate(batch)
            return
        with self._gradient_sync(last):
            self._accumulate(batch)

    def rehearse(self, batch: Any) -> None:
        """Forward and backward without a word to the log; gradients are left behind."""
        with nullcontext() if self._gradient_sync is None else self._gradient_sync(True):
            loss, _ = self.loss_function(batch)
            check_loss(loss)
            self._backward(loss)

    def _accumulate(self, batch: Any) -> None:
        loss, metrics = self.loss_function(batch)
        check_loss(loss)
        self.log.write_step(loss, metrics)
        scaled = loss if self.accumulate_steps == 1 else loss / self.accumulate_steps
        self._backward(scaled)

    def _backward(self, loss: Tensor) -> None:
        scaler = self.update.scaler
        scaled = loss if scaler is None else scaler.scale(loss)
        if self._backward_context is None:
            scaled.backward()
            return
        with self._backward_context():
            scaled.backward()


def batch_tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order, from nested lists, tuples, dicts and dataclasses."""
    if type(batch) in (tuple, list):
        tensors = [member for member in batch if type(member) is Tensor]
        if len(tensors) == len(batch):
            return tensors
    return [leaf for leaf in batch_leaves(batch) if isinstance(leaf, Tensor)]


def batch_leaves(batch: Any) -> list[Any]:
    """Everything in a batch that is no container, in order."""
    return torch.utils._pytree.tree_leaves(_members(batch))


def _members(batch: Any) -> Any:
    if hasattr(batch, "__dataclass_fields__") and not isinstance(batch, type):
        return [_members(getattr(batch, name)) for name in batch.__dataclass_fields__]
    return batch


def check_device(tensors: list[Tensor], model_devices: frozenset[torch.device]) -> None:
    """Raise unless a batch's tensors lie where the model is.

    Raises:
        ValueError: names both devices.
    """
    for tensor in tensors:
        if tensor.device not in model_devices and (tensor.dim() > 0 or tensor.device.type != "cpu"):
            devices = ", ".join(sorted(str(device) for device in model_devices))
            raise ValueError(
                f"the model is on {devices}, the batch on {tensor.device}; move the model with model.to(...), "
                "or make the batches there with SinkLoader(loader, device=...)"
            )
