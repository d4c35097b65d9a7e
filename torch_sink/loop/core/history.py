"""What a run leaves behind: every step's loss, learning rate and overflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torch_sink.thread_waits import host_sync_allowed

_LONGEST_UNJOINED = 1000


class SinkValues(NamedTuple):
    """What the steps of a sink left behind.

    Attributes:
        losses: float32 [steps].
        overflows: bool [steps]; true where the update was skipped.
        learning_rates: float64 [steps, parameter groups].
        metrics: name -> float32 [steps].
    """

    losses: Tensor
    overflows: Tensor
    learning_rates: Tensor
    metrics: dict[str, Tensor]


class SinkRecord:
    """The steps between two host returns.

    On the CPU the values are joined when somebody looks at them, which in a loop of tiny steps would be felt.

    Args:
        steps: how many.
        join: gives the values, without a wait for the device.
    """

    def __init__(self, steps: int, join: Callable[[], SinkValues]) -> None:
        self.steps, self._join = steps, join

    @cached_property
    def values(self) -> SinkValues:
        """The values on the host."""
        with host_sync_allowed():
            values = self._join()
        del self._join  # it holds a tensor for each step
        return values


@dataclass
class RunHistory:
    """Record of one `StepLoop.run`, extended at every sink's end.

    Attributes:
        steps: iterations executed in this run.
        seconds: wall time of the run so far.
        samples: sum of the batch sizes.
        host_syncs: times the host waited for the device: sink ends, overflow checks of the warm-up, graph captures,
            evaluations.
        evaluations: step count and results (name -> value) of every evaluation.
        stopped_by: why the run ended early: a signal's name, "request_stop", or None.
    """

    steps: int = 0
    seconds: float = 0.0
    samples: int = 0
    host_syncs: int = 0
    evaluations: list[tuple[int, dict[str, Any]]] = field(default_factory=list, repr=False)
    stopped_by: str | None = None
    _sinks: list[SinkRecord] = field(default_factory=list, repr=False)
    _unjoined: list[SinkRecord] = field(default_factory=list, repr=False)
    _unjoined_steps: int = field(default=0, repr=False)
    _groups: int = field(default=1, repr=False)

    @property
    def losses(self) -> Tensor:
        """Loss of every iteration, not divided by `accumulate`: float32 [iterations]."""
        return self._joined("losses", torch.empty(0, device="cpu"))

    @property
    def overflows(self) -> Tensor:
        """True at each iteration whose update was skipped because a gradient was not finite: bool [iterations]."""
        return self._joined("overflows", torch.empty(0, dtype=torch.bool, device="cpu"))

    @property
    def learning_rates(self) -> Tensor:
        """Learning rate in force at every iteration: float64 [iterations, groups]; NaN before a group was added."""
        parts = [record.values.learning_rates for record in self._sinks]
        groups = max((part.shape[1] for part in parts), default=self._groups)
        missing = float("nan")
        padded = [functional.pad(part, (0, groups - part.shape[1]), value=missing) for part in parts]
        return torch.cat(padded) if parts else torch.empty(0, groups, dtype=torch.float64, device="cpu")

    @property
    def metrics(self) -> dict[str, Tensor]:
        """What `forward` returned beside the loss, per iteration: name -> float32 [iterations]."""
        sinks = [record.values for record in self._sinks]
        names = sinks[-1].metrics if sinks else {}
        missing = float("nan")
        return {
            name: torch.cat([s.metrics.get(name, torch.full_like(s.losses, missing)) for s in sinks]) for name in names
        }

    @property
    def samples_per_second(self) -> float:
        """Samples trained on per second of wall time, everything included."""
        return self.samples / self.seconds if self.seconds else 0.0

    def add(self, record: SinkRecord) -> None:
        """Append a sink."""
        self._sinks.append(record)
        self.steps += record.steps
        self._unjoined.append(record)
        self._unjoined_steps += record.steps
        if self._unjoined_steps >= _LONGEST_UNJOINED:  # so that a long run stays small
            for one in self._unjoined:
                one.values  # noqa: B018 - joins them
            self._unjoined, self._unjoined_steps = [], 0

    def _joined(self, name: str, empty: Tensor) -> Tensor:
        parts = [getattr(record.values, name) for record in self._sinks]
        return torch.cat(parts) if parts else empty
