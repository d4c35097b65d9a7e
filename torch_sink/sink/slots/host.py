"""Slots on the CPU: a slot refers to the source's own tensors, nothing is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_sink.common.containers import is_flat
from torch_sink.common.slabs import Slabs
from torch_sink.damage.report import NO_LOSS, Loss
from torch_sink.sink.producers.stage import ImageFormat, stage_on_host


class HostSlots:
    """Bounds how many batches are ready ahead; holds no memory of its own.

    Args:
        count: number of slots.
        form: how image batches are produced.
    """

    def __init__(self, count: int, form: ImageFormat) -> None:
        self.count = count
        self.form = form
        self._keeps_tensors = form.keeps_tensors

    def share(self, make_slabs: Callable[[int], Slabs | None]) -> None:
        """Nothing: the consumer gets the source's own tensors, and may keep them as long as it likes."""

    def fill(self, slot: int, batch: Any) -> tuple[Any, Loss]:
        """Executes lazy leaves and converts image batches where that was asked for."""
        if self._keeps_tensors and is_flat(batch):
            return batch, NO_LOSS
        return stage_on_host(batch, self.form)

    def open(self, slot: int, batch: Any) -> Any:
        """The batch itself."""
        return batch

    def free(self, slot: int) -> None:
        """Nothing to do: the consumer's reference goes with the item."""

    def static_index(self, slot: int) -> int | None:
        """None: the batch is the source's own memory."""
        return None

    def static_batches(self, batch: Any) -> dict[int, Any]:
        """None."""
        return {}

    def describe(self) -> str:
        """For `repr`."""
        return f"slots={self.count} of references to the loader's own tensors"

    def bytes_planned(self) -> int | None:
        """None: nothing is preallocated."""
        return None

    def close(self) -> None:
        """Nothing to give back."""
