"""What a ring allocates: one buffer per tensor of a batch and slot, decided from the first batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_sink.common.containers import is_lazy, is_plain
from torch_sink.errors import SinkError
from torch_sink.sink.producers.stage import ImageFormat


@dataclass(frozen=True)
class LeafPlan:
    """One tensor of a batch.

    Attributes:
        shape: of the first batch; later ones may have fewer rows.
        dtype: dtype in the slot.
        memory_format: layout in the slot.
        source_dtype: dtype in which it comes from the host.
        is_lazy: made on the device, so nothing is staged.
    """

    shape: torch.Size
    dtype: torch.dtype
    memory_format: torch.memory_format
    source_dtype: torch.dtype
    is_lazy: bool

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


def plan_leaf(leaf: Any, form: ImageFormat) -> LeafPlan | None:
    """The plan for one leaf; None for what stays on the host or cannot have a fixed buffer."""
    if is_lazy(leaf):
        return LeafPlan(leaf.shape, form.dtype or leaf.dtype, form.layout_of(leaf), leaf.dtype, True)
    if not is_plain(leaf):
        return None
    return LeafPlan(leaf.shape, form.dtype_of(leaf), form.layout_of(leaf), leaf.dtype, False)


@dataclass(frozen=True)
class RingPlan:
    """The memory of a ring.

    Attributes:
        leaves: one entry per leaf of a batch; None for leaves without a buffer.
        slots: number of slots.
    """

    leaves: tuple[LeafPlan | None, ...]
    slots: int

    @property
    def slot_bytes(self) -> int:
        """Device bytes of one slot."""
        return sum(leaf.slot_bytes for leaf in self.leaves if leaf is not None)

    @property
    def arrival_bytes(self) -> int:
        """Device bytes of the buffers from which tensors are converted, one set for all slots."""
        return sum(leaf.source_bytes for leaf in self.leaves if leaf is not None and leaf.is_converted)

    @property
    def device_bytes(self) -> int:
        """Device bytes of the whole ring."""
        return self.slots * self.slot_bytes + self.arrival_bytes

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host bytes of the whole ring."""
        return self.slots * sum(leaf.source_bytes for leaf in self.leaves if leaf is not None)

    def __str__(self) -> str:
        return (
            f"slots={self.slots} of {self.slot_bytes:,} bytes = {self.device_bytes:,} bytes on the device, "
            f"{self.pinned_bytes:,} bytes of pinned memory"
        )


def make_plan(leaves: Sequence[Any], form: ImageFormat, slots: int, max_bytes: int | None) -> RingPlan:
    """Plans a ring of up to `slots` slots within `max_bytes` of device memory.

    Raises:
        SinkError: not even one slot fits.
    """
    plan = RingPlan(tuple(plan_leaf(leaf, form) for leaf in leaves), slots)
    if max_bytes is None or plan.device_bytes <= max_bytes:
        return plan
    fitting = (max_bytes - plan.arrival_bytes) // max(1, plan.slot_bytes)
    if fitting < 1:
        raise SinkError(
            f"max_bytes={max_bytes:,} does not hold one batch of {plan.slot_bytes + plan.arrival_bytes:,} bytes: "
            "raise max_bytes, use a smaller batch, or a smaller dtype"
        )
    return RingPlan(plan.leaves, int(fitting))
