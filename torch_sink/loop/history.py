"""What a run leaves behind: every step's loss, learning rate and overflow."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class SinkRecord:
    """The steps between two host returns, on the host.

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


@dataclass
class RunHistory:
    """Record of one `StepLoop.run`, extended at every sink's end.

    Attributes:
        steps: iterations executed in this run.
        seconds: wall time of the run so far.
        samples: sum of the batch sizes.
        host_syncs: times the host waited for the device: sink ends, overflow checks of the warm-up, graph captures.
        stopped_by: why the run ended early: a signal's name, "request_stop", or None.
    """

    steps: int = 0
    seconds: float = 0.0
    samples: int = 0
    host_syncs: int = 0
    stopped_by: str | None = None
    _sinks: list[SinkRecord] = field(default_factory=list, repr=False)
    _groups: int = field(default=1, repr=False)

    @property
    def losses(self) -> Tensor:
        """Loss of every iteration, not divided by `accumulate`: float32 [iterations]."""
        return self._joined("losses", torch.empty(0))

    @property
    def overflows(self) -> Tensor:
        """True at each iteration whose update was skipped because a gradient was not finite: bool [iterations]."""
        return self._joined("overflows", torch.empty(0, dtype=torch.bool))

    @property
    def learning_rates(self) -> Tensor:
        """Learning rate in force at every iteration: float64 [iterations, parameter groups]."""
        return self._joined("learning_rates", torch.empty(0, self._groups, dtype=torch.float64))

    @property
    def metrics(self) -> dict[str, Tensor]:
        """What `forward` returned beside the loss, per iteration: name -> float32 [iterations]."""
        names = self._sinks[-1].metrics if self._sinks else {}
        missing = float("nan")
        return {
            name: torch.cat([s.metrics.get(name, torch.full_like(s.losses, missing)) for s in self._sinks])
            for name in names
        }

    @property
    def samples_per_second(self) -> float:
        """Samples trained on per second of wall time, everything included."""
        return self.samples / self.seconds if self.seconds else 0.0

    def add(self, record: SinkRecord) -> None:
        """Append a sink."""
        self._sinks.append(record)
        self.steps += len(record.losses)

    def _joined(self, name: str, empty: Tensor) -> Tensor:
        parts = [getattr(record, name) for record in self._sinks]
        return torch.cat(parts) if parts else empty
