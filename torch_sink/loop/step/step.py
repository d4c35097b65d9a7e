"""One training step, the same code in every mode and without host syncs, and the engine of eager steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torch_sink.loop.core.history import SinkResults, StepCounts, StepLog
from torch_sink.loop.step.optimizers import RateTable
from torch_sink.loop.step.state import TrainState
from torch_sink.loop.step.update import OptimizerUpdate
from torch_sink.thread_waits import host_sync_allowed


class LossFunction(Protocol):
    """Computes the loss of a batch; `engines/jit.py` has the compiled one.

    Attributes:
        ran_compiled: whether the latest call ran compiled code.
        was_odd: whether its batch had another shape than what is compiled.
    """

    ran_compiled: bool
    was_odd: bool

    def begin(self) -> None:
        """An epoch or an evaluation begins, whose batches may have another shape."""

    def follow(self) -> None:
        """The model may have changed."""

    def __call__(self, batch: Any, leaves: list[Any] | None) -> Any:
        """Loss and named values; `leaves` are those of the batch, where they are known."""


class EagerLoss:
    """Computes the loss of a batch in eager code: a `LossFunction`."""

    ran_compiled = was_odd = False

    def __init__(self, loss: Callable[[Any], Any]) -> None:
        self._loss = loss

    def begin(self) -> None: ...

    def follow(self) -> None: ...

    def __call__(self, batch: Any, leaves: list[Any] | None) -> Any:
        return self._loss(batch)


@dataclass(eq=False)
class TrainingStep:
    """Forward pass, backward pass and, after every `accumulate`-th batch, the update; losses go to the log."""

    loss_function: LossFunction
    update: OptimizerUpdate
    log: StepLog
    accumulate: int
    # `gradient_sync(reduce)` -> context for both passes, in which gradients are reduced over the ranks or not.
    gradient_sync: Callable[[bool], AbstractContextManager[Any]]
    backward_context: Callable[[], AbstractContextManager[Any]]  # a context for the backward pass
    # Keep gradients in the same memory and set them to zero after each update, as captured accumulation needs;
    # otherwise each accumulation allocates new ones.
    static_gradients: bool
    # Reduce gradients over the ranks after every batch, where nobody knows which one is the last of an epoch.
    reduces_always: bool = False
    _started: bool = field(default=False, init=False)

    def run(self, batch: Any, leaves: list[Any] | None, *, first: bool, last: bool) -> None:
        """Train on one batch, the `first` or `last` one of an accumulation or neither; the last one has the update.

        `leaves` are those of the batch, where they are known.
        """
        if first and not (self.static_gradients and self._started):
            self.update.zero_gradients()
        self._started = True
        self._accumulate(batch, leaves, self.log, reduce=last or self.reduces_always)
        if last:
            self.update.apply(zeroes=self.static_gradients)
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

    Learning rates are read from a table on the device if the host cannot know them in time. If `watchable`, the first
    step runs under `watch_host_syncs`.

    Attributes:
        counts: how the steps of the run under way, or of the latest one, ran.
    """

    def __init__(self, mode: str, state: TrainState, step: TrainingStep, *, watchable: bool) -> None:
        self.mode, self.state, self.training_step = mode, state, step
        self.schedule, self.ranks, self.log = state.schedule, state.ranks, step.log
        self.watches_next_step = watchable
        self.counts = StepCounts()
        knows_rates = not self.schedule.counts_applied or self.log.device.type == "cpu"
        self._rates = None if knows_rates else RateTable(self.schedule, self.log)

    @property
    def host_syncs(self) -> int:
        """Number of host syncs so far, without those at the ends of sinks."""
        return self.training_step.update.host_checks

    def running(self) -> AbstractContextManager[Any]:
        """A context for a whole run."""
        return nullcontext()

    @property
    def _reads_table(self) -> bool:
        return self._rates is not None

    def attach(self, loader: Any, *, reduces_always: bool) -> None:
        """Set the loader of the coming run; for `reduces_always` see `TrainingStep`."""
        self.training_step.reduces_always = reduces_always
        self.counts = StepCounts()

    def begin_epoch(self) -> None:
        """An epoch begins, whose batches may have another shape than those before."""
        self.training_step.loss_function.begin()

    def reserve(self, steps: int) -> None:
        """Make room for sinks of up to `steps` steps."""
        if steps > self.log.capacity:
            self.log.reserve(steps)
        if self._rates is not None and not self._rates.fits(self.schedule, self.log):
            self._rates = RateTable(self.schedule, self.log)

    def follow(self) -> None:
        """Take over what model and optimizer hold now: a callback, a dataset or code between two runs changes it."""
        self.state.follow()
        self.training_step.update.follow()
        self.training_step.loss_function.follow()

    def begin(self, updates: Sequence[bool]) -> None:
        """Open a sink of at most so many steps; `updates` tells for each whether an update follows."""
        self.follow()
        self.reserve(len(updates))
        self.log.start()
        self.schedule.start(updates)
        if self._reads_table:
            self._write_rates(len(updates))

    def step(self, batch: Any, leaves: list[Any], *, first: bool, last: bool) -> None:
        """Launch one step; see `TrainingStep.run`. `leaves` are those of the batch."""
        if reads_table := self._rates is not None and self._reads_table:
            self._run_with_table(batch, leaves, first=first, last=last)
        else:
            self.schedule.before_step()
            self.training_step.run(batch, leaves, first=first, last=last)
        counts, loss = self.counts, self.training_step.loss_function
        if loss.ran_compiled or loss.was_odd:
            counts.add_launched(compiled=loss.ran_compiled, odd=loss.was_odd)
        else:
            counts.eager += 1  # the usual case, without a call
        if last and not reads_table:
            skipped = False
            if self.schedule.counts_applied:  # on the CPU, where nothing waits
                with host_sync_allowed():
                    skipped = bool(self.training_step.update.found_inf)
            self.schedule.advance(skipped=skipped)

    def end(self, steps: int) -> SinkResults:
        """Close the sink after `steps` executed steps, with its only wait for the device."""
        rates = None if self._reads_table and self.schedule.counts_applied else self.schedule.rates(steps)
        # The rates are listed while the device is busy.
        losses, overflows, *metrics = self.log.read(steps, self.ranks)
        overflows = overflows.bool()
        if rates is None:
            rates = self.schedule.settle(overflows)
        named = dict(zip(self.log.metric_names or (), metrics, strict=True))
        return SinkResults(losses, overflows, rates, named, as_flags(self.schedule.updates[:steps]))

    def update_now(self) -> bool:
        """Update between two sinks, with the gradients of an accumulation that no further batch continues.

        Returns whether the update was skipped for overflow.
        """
        self.follow()
        with self._between_replays():
            self.training_step.update.apply(zeroes=self.training_step.static_gradients)
        skipped = self.training_step.update.was_skipped()
        self.schedule.advance(skipped=skipped)
        return skipped

    def _between_replays(self) -> AbstractContextManager[Any]:
        """A context for work that runs uncaptured."""
        return nullcontext()

    def _write_rates(self, steps: int) -> None:
        rates: Any = self._rates
        rates.start()
        rates.write(self.schedule.plan(steps))

    def _run_with_table(self, batch: Any, leaves: list[Any] | None, *, first: bool, last: bool) -> None:
        rates: Any = self._rates
        with rates.bound():
            if last:
                rates.load_row()
            self.training_step.run(batch, leaves, first=first, last=last)
            if last:
                rates.count(self.training_step.update.found_inf)

    def close(self) -> None:
        """Release what the device holds."""


def as_flags(values: Sequence[bool]) -> Tensor:
    """bool [number of values], on the host."""
    if not values:
        return torch.empty(0, dtype=torch.bool, device="cpu")
    return torch.frombuffer(bytearray(values), dtype=torch.bool)  # a third of the time of torch.tensor()


def check_device(tensors: list[Tensor], model_devices: frozenset[torch.device]) -> None:
    """Raise unless a batch's tensors are on a device of the model; scalars may be on the CPU."""
    for tensor in tensors:
        if tensor.device not in model_devices and (tensor.dim() > 0 or tensor.device.type != "cpu"):
            devices = ", ".join(sorted(str(device) for device in model_devices))
            raise ValueError(
                f"the model is on {devices}, the batch on {tensor.device}; move the model with model.to(...), "
                "or make the batches there with SinkLoader(loader, device=...)"
            )
