"""One training step, written so that every mode runs the same code and none waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.step.precision import Precision
from torch_sink.loop.step.update import OptimizerUpdate

Forward = Callable[[nn.Module, Any], Any]
_LOSS_ROW, _OVERFLOW_ROW, _METRIC_ROW = 0, 1, 2


class LossFunction:
    """Forward pass and loss of a batch under a precision: what "compile" compiles.

    `loss_fn(model(x), y)` for batches of two, unless there is a `forward(model, batch)`.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, forward: Forward | None, precision: Precision
    ) -> None:
        self._model, self._loss_fn, self._forward, self._precision = model, loss_fn, forward, precision

    def __call__(self, batch: Any) -> tuple[Any, dict[str, Tensor]]:
        """Returns the loss, still attached to its graph, and the metrics by name."""
        forward = self._forward or self._supervised
        if self._precision.casts:
            with self._precision.context():
                result = forward(self._model, batch)
        else:
            result = forward(self._model, batch)
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(metrics, dict):
            raise TypeError(f"forward returned (loss, {type(metrics).__name__}); return loss, or (loss, dict)")
        if self._precision.casts and isinstance(loss, Tensor):
            loss = self._precision.outputs(loss)
        return loss, metrics

    def _supervised(self, model: nn.Module, batch: Any) -> Any:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, (tuple, list, dict)) else ""
            raise TypeError(
                f"the batch is a {type(batch).__name__}{size}; a tuple or list (x, y) trains by loss_fn(model(x), y), "
                "for anything else pass forward=lambda model, batch: loss"
            )
        (inputs, targets), loss_fn = batch, self._loss_fn
        assert loss_fn is not None, "StepLoop has checked it"
        outputs = model(inputs)
        if not self._precision.casts:
            return loss_fn(outputs, targets)
        with self._precision.loss_context():
            return loss_fn(self._precision.outputs(outputs), targets)


def check_loss(loss: Any) -> None:
    """Raise unless `loss` is a tensor of one element that gradients can start from."""
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
            "and that the run is not inside torch.no_grad() or torch.inference_mode()"
        )


class StepLog:
    """What a sink's steps leave on the device for the host to read once: float32 [rows, capacity], a column a step.

    The column is named by a tensor, `cursor`, which moves without the host; after `freeze()` no address changes, so
    that a captured graph can write through them.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.device = device
        self.metric_names: list[str] = []
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.reserve(capacity)

    def reserve(self, capacity: int) -> None:
        """Make room for a sink of `capacity` steps, at other addresses."""
        self.capacity, self._frozen = capacity, False
        rows = _METRIC_ROW + len(self.metric_names)
        self._cells = torch.zeros(rows, capacity, dtype=torch.float32, device=self.device)

    def freeze(self) -> None:
        """Forbid new metrics."""
        self._frozen = True

    def start(self) -> None:
        """Begin a sink."""
        self.cursor.zero_()
        self._cells[_OVERFLOW_ROW].zero_()

    def write_step(self, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        """Write loss and metrics of the current step; one element each, any floating point dtype."""
        self._write(_LOSS_ROW, loss)
        if list(metrics) != self.metric_names:
            self._name_metrics(list(metrics))
        for row, (name, value) in enumerate(metrics.items(), _METRIC_ROW):
            if not isinstance(value, Tensor) or value.numel() != 1:
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"metric {name!r} is {shape}; forward= returns tensors of one element as metrics")
            self._write(row, value)

    def write_overflow(self, found_inf: Tensor) -> None:
        """Write whether the update of the current step was skipped: float32 [], 0 or 1."""
        self._write(_OVERFLOW_ROW, found_inf)

    def advance(self) -> None:
        """Move on to the next step."""
        self.cursor.add_(1)

    def read(self, steps: int, ranks: Ranks) -> list[Tensor]:
        """Bring losses, overflows (0 or 1) and each metric of the first `steps` steps to the host: float32 [steps].

        They are averaged over the ranks; overflows are equal on all of them already.
        """
        table = self._cells[:, :steps].clone()
        if ranks.many:
            ranks.sum(table.div_(ranks.size))
        if table.device.type != "cuda":
            return list(table.to("cpu"))
        host = torch.empty(table.shape, dtype=table.dtype, device="cpu", pin_memory=True)
        host.copy_(table, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(table.device))  # not that of the current device
        copied.synchronize()  # host sync
        return list(host.clone())

    def _write(self, row: int, value: Tensor) -> None:
        self._cells[row].index_copy_(0, self.cursor, value.detach().reshape(1).to(self._cells))

    def _name_metrics(self, names: list[str]) -> None:
        if self._frozen or self.metric_names:
            raise ValueError(
                f"forward returned the metrics {names} after {self.metric_names}; return the same each step"
            )
        self.metric_names, written = names, self._cells
        self.reserve(self.capacity)
        self._cells[: len(written)] = written


class TrainingStep:
    """Forward, backward and, after every `accumulate`-th batch, the update; losses go to the device log.

    `gradient_sync` takes whether gradients are reduced over the ranks, and gives the context of forward and backward
    pass; `backward_context` that of the backward pass alone. With `static_gradients`, gradients stay in one place and
    are set to zero after each update, as captured accumulation needs; else they are made anew for each.
    """

    def __init__(
        self,
        loss_function: Callable[[Any], tuple[Any, dict[str, Tensor]]],
        update: OptimizerUpdate,
        log: StepLog,
        *,
        accumulate: int,
        gradient_sync: Callable[[bool], Any] | None,
        backward_context: Callable[[], Any] | None,
        static_gradients: bool,
    ) -> None:
        self.loss_function, self.update, self.log = loss_function, update, log
        self.accumulate, self.static_gradients = accumulate, static_gradients
        self._gradient_sync, self._backward_context = gradient_sync, backward_context
        self._started = False

    def run(self, batch: Any, *, first: bool, last: bool) -> None:
        """Train on one batch, which opens an accumulation (first) and closes one (last): the optimizer steps."""
        if first and not (self.static_gradients and self._started):
            self.update.zero_gradients()
        self._started = True
        self._accumulate(batch, self.log, reduce=last)
        if last:
            self.update.apply()
            if self.static_gradients:
                self.update.zero_gradients(in_place=True)
            if self.update.scaler is not None:
                self.log.write_overflow(self.update.found_inf)
        self.log.advance()

    def rehearse(self, model: nn.Module, batch: Any) -> None:
        """Forward and backward of which nothing is left: no word in the log, gradients and buffers as before."""
        parameters = [*model.parameters()]
        gradients = [parameter.grad for parameter in parameters]
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        for parameter in parameters:
            parameter.grad = None
        try:
            self._accumulate(batch, None, reduce=True)
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    def _accumulate(self, batch: Any, log: StepLog | None, *, reduce: bool) -> None:
        with nullcontext() if self._gradient_sync is None else self._gradient_sync(reduce):
            loss, metrics = self.loss_function(batch)
            check_loss(loss)
            if log is not None:
                log.write_step(loss, metrics)
            if self.accumulate != 1:
                loss = loss / self.accumulate
            if self.update.scaler is not None:
                loss = self.update.scaler.scale(loss)
            with nullcontext() if self._backward_context is None else self._backward_context():
                loss.backward()


def check_device(tensors: list[Tensor], model_devices: frozenset[torch.device]) -> None:
    """Raise unless a batch's tensors lie where the model is."""
    for tensor in tensors:
        if tensor.device not in model_devices and (tensor.dim() > 0 or tensor.device.type != "cpu"):
            devices = ", ".join(sorted(str(device) for device in model_devices))
            raise ValueError(
                f"the model is on {devices}, the batch on {tensor.device}; move the model with model.to(...), "
                "or make the batches there with SinkLoader(loader, device=...)"
            )
