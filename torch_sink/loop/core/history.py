"""How far a run has come, what its steps left behind, and why it runs as it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class SinkRecord(NamedTuple):
    """What the steps between two host returns left behind, on the host.

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
        host_syncs: times the host waited for the device: sink ends, overflow checks of the warm-up, graph captures,
            evaluations.
        evaluations: step count and results (name -> value) of every evaluation.
        stopped_by: why the run ended early: a signal's name, "GracefulExit", "another rank", "request_stop", or None.
    """

    steps: int = 0
    seconds: float = 0.0
    samples: int = 0
    host_syncs: int = 0
    evaluations: list[tuple[int, dict[str, Any]]] = field(default_factory=list, repr=False)
    stopped_by: str | None = None
    _sinks: list[SinkRecord] = field(default_factory=list, repr=False)
    _groups: int = field(default=1, repr=False)

    @property
    def losses(self) -> Tensor:
        """Loss of every iteration, not divided by `accumulate`: float32 [iterations]."""
        return torch.cat([torch.empty(0, device="cpu"), *(sink.losses for sink in self._sinks)])

    @property
    def overflows(self) -> Tensor:
        """True at each iteration whose update was skipped because a gradient was not finite: bool [iterations]."""
        none = torch.empty(0, dtype=torch.bool, device="cpu")
        return torch.cat([none, *(sink.overflows for sink in self._sinks)])

    @property
    def learning_rates(self) -> Tensor:
        """Learning rate in force at every iteration: float64 [iterations, groups]; NaN before a group was added."""
        parts = [sink.learning_rates for sink in self._sinks]
        parts = parts or [torch.empty(0, self._groups, dtype=torch.float64, device="cpu")]
        groups = max(part.shape[1] for part in parts)
        return torch.cat([functional.pad(part, (0, groups - part.shape[1]), value=float("nan")) for part in parts])

    @property
    def metrics(self) -> dict[str, Tensor]:
        """What `forward` returned beside the loss, per iteration: name -> float32 [iterations]."""
        names = self._sinks[-1].metrics if self._sinks else {}
        missing = float("nan")
        return {
            name: torch.cat([sink.metrics.get(name, torch.full_like(sink.losses, missing)) for sink in self._sinks])
            for name in names
        }

    @property
    def samples_per_second(self) -> float:
        """Samples trained on per second of wall time, everything included."""
        return self.samples / self.seconds if self.seconds else 0.0

    def add(self, sink: SinkRecord) -> None:
        """Append a sink."""
        self._sinks.append(sink)
        self.steps += len(sink.losses)


@dataclass
class Progress:
    """Since the start of a run: completed epochs, steps of the epoch under way, steps in all. They survive a resume."""

    epochs: int = 0
    epoch_steps: int = 0
    steps: int = 0


class Reasons:
    """Remarks for `StepLoop.explain` in the order of their first appearance, with counts where they repeat."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def note(self, text: str) -> None:
        """Add a remark once."""
        self._counts.setdefault(text, 0)

    def count(self, text: str) -> None:
        """Add one to a remark's count."""
        self._counts[text] = self._counts.get(text, 0) + 1

    def lines(self) -> list[str]:
        """One line a remark."""
        return [f"{text} ({count} times)" if count else text for text, count in self._counts.items()]


def first_line(error: BaseException) -> str:
    """Type of an error and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
