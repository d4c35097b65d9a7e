"""One training step, the same code in every mode and without host syncs, and the engine of eager steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.core.history import SinkResults, StepLog
from torch_sink.loop.step.optimizers import Schedule
from torch_sink.loop.step.update import OptimizerUpdate


@dataclass(eq=False)
class TrainingStep:
    """Forward pass, backward pass and, after every `accumulate`-th batch, the update; losses go to the log."""

    # `loss_function(batch, leaves)` -> (loss, named values); `leaves` may be None.
    loss_function: Callable[[Any, list[Any] | None], tuple[Any, dict[str, Tensor]]]
    update: OptimizerUpdate
    log: StepLog
    accumulate: int
    # `gradient_sync(reduce)` -> context for both passes, in which gradients are reduced over the ranks or not.
    gradient_sync: Callable[[bool], AbstractContextManager[Any]]
    backward_context: Callable[[], AbstractContextManager[Any]]  # a context for the backward pass
    # Keep gradients in the same memory and set them to zero after each update, as captured accumulation needs;
    # otherwise each accumulation allocates new ones.
    static_gradients: bool
    _started: bool = field(default=False, init=False)

    def run(self, batch: Any, leaves: list[Any] | None, *, first: bool, last: bool) -> None:
        """Train on one batch, the `first` or `last` one of an accumulation or neither; the last one has the update.

        `leaves` are those of the batch, where they are known.
        """
        if first and not (self.static_gradients and self._started):
            self.update.zero_gradients()
        self._started = True
        self._accumulate(batch, leaves, self.log, reduce=last)
        if last:
            self.update.apply()
            if self.static_gradients:
                self.update.zero_gradients(in_place=True)
            if self.update.scaler is not None:
                self.log.write_overflow(self.update.found_inf)
        self.log.advance()

    def rehearse(self, model: nn.Module, batch: Any) -> None:
        """Run forward and backward pass without an effect on log, gradients and buffers."""
        parameters = [*model.parameters()]
        gradients = [parameter.grad for parameter in parameters]
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        for parameter in parameters:
            parameter.grad = None
        try:
            self._accumulate(batch, None, None, reduce=True)
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    def _accumulate(self, batch: Any, leaves: list[Any] | None, log: StepLog | None, *, reduce: bool) -> None:
        with self.gradient_sync(reduce):
            loss, metrics = self.loss_function(batch, leaves)
            if not isinstance(loss, Tensor):
                kind = type(loss).__name__
                raise TypeError(f"the loss is a {kind}; loss_fn and forward return a tensor of one element")
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
            if log is not None:
                log.write_step(loss, metrics)
            if self.accumulate != 1:
                loss = loss / self.accumulate
            if self.update.scaler is not None:
                loss = self.update.scaler.scale(loss)
            with self.backward_context():
                loss.backward()


class Engine:
    """Runs the steps of a sink and returns their results. Eager and compiled steps differ in the loss function only.

    If `watchable`, the first step runs under `watch_host_syncs`.
    """

    def __init__(self, mode: str, step: TrainingStep, schedule: Schedule, ranks: Ranks, *, watchable: bool) -> None:
        self.mode, self.training_step, self.schedule = mode, step, schedule
        self.log, self.ranks, self.watches_next_step = step.log, ranks, watchable

    @property
    def host_syncs(self) -> int:
        """Number of host syncs so far, without those at the ends of sinks."""
        return self.training_step.update.host_checks

    def running(self) -> AbstractContextManager[Any]:
        """A context for a whole run."""
        return nullcontext()

    def attach(self, loader: Any, *, callbacks: bool) -> None:
        """Set the loader of the coming run, and whether callbacks may change the training between its sinks."""

    def reserve(self, steps: int) -> None:
        """Make room for sinks of up to `steps` steps."""
        if steps > self.log.capacity:
            self.log.reserve(steps)

    def begin(self, steps: int, iteration: int) -> None:
        """Open a sink of at most `steps` steps; `iteration` steps were executed before."""
        self.training_step.update.follow_optimizer()
        self.log.start()
        self.schedule.start()

    def step(self, batch: Any, leaves: list[Any], *, first: bool, last: bool) -> None:
        """Launch one step; see `TrainingStep.run`. `leaves` are those of the batch."""
        self.schedule.before_step()
        self.training_step.run(batch, leaves, first=first, last=last)
        if last:
            self.schedule.advance()

    def end(self, steps: int, iteration: int) -> SinkResults:
        """Close the sink after `steps` executed steps, with its only wait for the device."""
        rates = self.schedule.rates(steps)  # while the device is busy
        losses, overflows, *metrics = self.log.read(steps, self.ranks)
        named = dict(zip(self.log.metric_names or (), metrics, strict=True))
        return SinkResults(losses, overflows.bool(), rates, named)

    def close(self) -> None:
        """Release what the device holds."""


def check_device(tensors: list[Tensor], model_devices: frozenset[torch.device]) -> None:
    """Raise unless a batch's tensors are on a device of the model; scalars may be on the CPU."""
    for tensor in tensors:
        if tensor.device not in model_devices and (tensor.dim() > 0 or tensor.device.type != "cpu"):
            devices = ", ".join(sorted(str(device) for device in model_devices))
            raise ValueError(
                f"the model is on {devices}, the batch on {tensor.device}; move the model with model.to(...), "
                "or make the batches there with SinkLoader(loader, device=...)"
            )
