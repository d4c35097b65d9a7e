"""How far a run has come: what a checkpoint needs to complete it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """Counts since the start of a run; they survive a resume.

    Attributes:
        epochs: completed epochs.
        epoch_steps: steps executed of the epoch that is under way.
        steps: steps executed in all.
    """

    epochs: int = 0
    epoch_steps: int = 0
    steps: int = 0

    def add(self, steps: int) -> None:
        """Count executed steps."""
        self.epoch_steps += steps
        self.steps += steps

    def end_epoch(self) -> None:
        """Count a completed epoch."""
        self.epochs += 1
        self.epoch_steps = 0

    def state_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


def epoch_length(loader: Any) -> int | None:
    """Steps in an epoch of a loader, or None if nobody knows."""
    try:
        return len(loader)
    except TypeError:
        return None
