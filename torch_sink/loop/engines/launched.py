"""Steps launched one by one from Python, eager or compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from torch_sink.loop.core.batches import batch_shapes
from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.core.history import Reasons, SinkRecord, first_line
from torch_sink.loop.engines.jit import JitConfig, compile_function, with_code_of_its_own
from torch_sink.loop.step.schedule import Schedule
from torch_sink.loop.step.step import TrainingStep


class Engine:
    """Runs the steps of a sink and hands back its record. Eager and compiled steps differ in the loss function only.

    Attributes:
        mode: "eager" or "compile".
        watchable: whether the first step may run under the sync detector.
    """

    def __init__(self, mode: str, step: TrainingStep, schedule: Schedule, ranks: Ranks, *, watchable: bool) -> None:
        self.mode, self.training_step, self.schedule = mode, step, schedule
        self.log, self.ranks, self.watchable = step.log, ranks, watchable

    @property
    def host_syncs(self) -> int:
        """Waits so far beyond those at the sinks' ends."""
        return self.training_step.update.host_checks

    def running(self) -> AbstractContextManager[Any]:
        """Context of a whole run."""
        return nullcontext()

    def attach(self, loader: Any, *, callbacks: bool) -> None:
        """Take note of the loader of the coming run, and whether callbacks may change anything between its sinks."""

    def reserve(self, steps: int) -> None:
        """Make room for sinks of up to `steps` steps."""
        if steps > self.log.capacity:
            self.log.reserve(steps)

    def begin(self, steps: int, iteration: int) -> None:
        """Open a sink of at most `steps` steps; `iteration` steps were executed before."""
        self.training_step.update.follow_optimizer()
        self.log.start()
        self.schedule.start()

    def step(self, batch: Any, tensors: list[Tensor], *, first: bool, last: bool) -> None:
        """Launch one step; see `TrainingStep.run`. `tensors` are those of the batch."""
        self.schedule.before_step()
        self.training_step.run(batch, first=first, last=last)
        if last:
            self.schedule.after_update()

    def end(self, steps: int, iteration: int) -> SinkRecord:
        """Close the sink after `steps` executed steps: the one wait for the device."""
        losses, overflows, *metrics = self.log.read(steps, self.ranks)
        named = dict(zip(self.log.metric_names, metrics, strict=True))
        return SinkRecord(losses, overflows.bool(), self.schedule.rates(steps), named)

    def close(self) -> None:
        """Release what the device holds."""


class UsualShape:
    """The one shape of batches that is compiled or captured: the first, unless another soon proves to be the usual one.

    A run may begin with an odd shape, as one that is resumed before the last batch of an epoch does. So a shape that
    comes twice in a row, before the first has come again, takes its place.
    """

    def __init__(self) -> None:
        self._usual: Any = None
        self._latest: Any = None
        self._settled = False

    def knows(self, shape: Any) -> bool:
        """Whether batches of this shape were the usual ones before."""
        return bool(shape == self._usual)

    def accepts(self, shape: Any) -> bool:
        """Whether a batch has the usual shape; to be asked for every batch."""
        if self._usual is None:
            self._usual = shape
        elif shape == self._usual:
            self._settled = True
        elif not self._settled and shape == self._latest:
            self._usual, self._settled = shape, True
        self._latest = shape
        return bool(shape == self._usual)


class CompiledLoss:
    """Compiles a loss function for the usual shape of batches; other shapes run the eager function.

    Recompiling for a short last batch costs tens of seconds and saves milliseconds. The model's buffers are put back
    if compiling fails half-way.
    """

    def __init__(self, eager: Callable[[Any], Any], model: nn.Module, config: JitConfig, reasons: Reasons) -> None:
        self._eager, self._model, self._config, self._reasons = eager, model, config, reasons
        self._compiled = compile_function(with_code_of_its_own(lambda batch: eager(batch)), config)
        self._shape = UsualShape()
        self._called = self._failed = False

    def __call__(self, batch: Any) -> Any:
        if self._failed:
            return self._eager(batch)
        if not self._config.dynamic and not self._shape.accepts(batch_shapes(batch)):
            self._reasons.count("batches of another shape than the usual one ran uncompiled")
            return self._eager(batch)
        return self._compiled(batch) if self._called else self._first(batch)

    def _first(self, batch: Any) -> Any:
        self._called = True
        random = torch.get_rng_state()
        buffers = [buffer.detach().clone() for buffer in self._model.buffers()]
        try:
            return self._compiled(batch)
        except Exception as error:
            is_compilers = type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))
            if self._config.fullgraph or not is_compilers:
                raise
            self._failed = True
            self._reasons.note(f"compiling failed, so steps run in eager code: {first_line(error)}")
        torch.set_rng_state(random)
        with torch.no_grad():
            for buffer, value in zip(self._model.buffers(), buffers, strict=True):
                buffer.copy_(value)
        return self._eager(batch)
