"""What a ring allocates: one buffer per tensor of a batch and slot, decided from the first batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torch_sink.common.containers import is_lazy, is_plain
from torch_sink.errors import SinkError
from torch_sink.sink.queue.slots import ImageFormat


class LeafPlan(NamedTuple):
    """One tensor of a batch."""

    shape: torch.Size  # of the first batch; later ones may have fewer rows
    dtype: torch.dtype  # in the slot
    memory_format: torch.memory_format  # in the slot
    source_dtype: torch.dtype  # in which it comes from the host
    is_lazy: bool  # made on the device, so nothing is staged

    @property
    def slot_bytes(self) -> int:
        """Bytes of the buffer in one slot."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def source_bytes(self) -> int:
        """Bytes that are staged for one slot."""
        return 0 if self.is_lazy else self.shape.numel() * self.source_dtype.itemsize

    @property
    def is_converted(self) -> bool:
        """Whether dtype or layout change on the device, after the copy."""
        changes = self.dtype != self.source_dtype or self.memory_format is not torch.contiguous_format
        return changes and not self.is_lazy

    def rows(self, leaf: torch.Tensor) -> int | None:
        """How many rows of the buffer `leaf` fills; None if it does not fit in."""
        if leaf.ndim != len(self.shape) or leaf.dtype != self.source_dtype or is_lazy(leaf) != self.is_lazy:
            return None
        if leaf.ndim == 0:
            return 0
        fits = leaf.shape[1:] == self.shape[1:] and leaf.shape[0] <= self.shape[0]
        return leaf.shape[0] if fits else None


def _plan_leaf(leaf: Any, form: ImageFormat) -> LeafPlan | None:
    """None for what stays on the host or cannot have a fixed buffer."""
    if is_lazy(leaf):
        return LeafPlan(leaf.shape, form.dtype or leaf.dtype, form.layout_of(leaf), leaf.dtype, True)
    if not is_plain(leaf):
        return None
    return LeafPlan(leaf.shape, form.dtype_of(leaf), form.layout_of(leaf), leaf.dtype, False)


class RingPlan:
    """The memory of a ring of up to `slots` slots within `max_bytes` of device memory.

    Raises:
        SinkError: not even one slot fits.
    """

    def __init__(self, leaves: Sequence[Any], form: ImageFormat, slots: int, max_bytes: int | None) -> None:
        self.leaves = [_plan_leaf(leaf, form) for leaf in leaves]  # None for those without a buffer
        planned = [leaf for leaf in self.leaves if leaf is not None]
        self.slot_bytes = sum(leaf.slot_bytes for leaf in planned)
        # Of the buffers from which tensors are converted, one set for all slots.
        arrival_bytes = sum(leaf.source_bytes for leaf in planned if leaf.is_converted)
        self.slots = slots
        if max_bytes is not None and slots * self.slot_bytes + arrival_bytes > max_bytes:
            self.slots = (max_bytes - arrival_bytes) // max(1, self.slot_bytes)
        if self.slots < 1:
            raise SinkError(
                f"max_bytes={max_bytes:,} does not hold one batch of {self.slot_bytes + arrival_bytes:,} bytes: "
                "raise max_bytes, use a smaller batch, or a smaller dtype"
            )
        self.device_bytes = self.slots * self.slot_bytes + arrival_bytes
        self.pinned_bytes = self.slots * sum(leaf.source_bytes for leaf in planned)

    def __str__(self) -> str:
        return (
            f"slots={self.slots} of {self.slot_bytes:,} bytes = {self.device_bytes:,} bytes on the device, "
            f"{self.pinned_bytes:,} bytes of pinned memory"
        )
