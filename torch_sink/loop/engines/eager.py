"""Runs the steps of a sink and hands back its record. Eager and compiled steps differ only in the loss function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.core.history import SinkRecord, SinkValues
from torch_sink.loop.step.schedule import Schedule
from torch_sink.loop.step.step import TrainingStep
from torch_sink.loop.step.step_log import StepLog


class Engine:
    """Launches step after step from Python.

    Attributes:
        mode: "eager" or "compile".
        host_syncs: waits beyond those at a sink's end.
        watchable: whether the first step may run under the sync detector.
        ranks: the processes, or None for one.
    """

    def __init__(
        self,
        mode: str,
        step: TrainingStep,
        schedule: Schedule,
        *,
        watchable: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.mode, self.training_step, self.schedule = mode, step, schedule
        self.watchable, self.ranks = watchable, ranks

    @property
    def host_syncs(self) -> int:
        """Waits so far beyond those at the sinks' ends."""
        return self.training_step.update.host_checks

    @property
    def log(self) -> StepLog:
        """The log that the steps write."""
        return self.training_step.log

    def running(self) -> AbstractContextManager[Any]:
        """Context of a whole run."""
        return nullcontext()

    def attach(self, loader: Any, *, callbacks: bool) -> None:
        """Take note of the loader of the coming run, and whether callbacks may change anything between its sinks."""

    def reserve(self, steps: int) -> None:
        """Make room for sinks of up to `steps` steps."""

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
        rows, rates = self.log.read(steps, self.ranks), self.schedule.rates(steps)
        return SinkRecord(steps, partial(_sink_values, self.log.metric_names, rows, rates))

    def close(self) -> None:
        """Release what the device holds."""


def _sink_values(names: list[str], rows: Callable[[], list[Tensor]], rates: Callable[[], Tensor]) -> SinkValues:
    losses, overflows, *metrics = rows()
    return SinkValues(losses, overflows.bool(), rates(), dict(zip(names, metrics, strict=True)))
