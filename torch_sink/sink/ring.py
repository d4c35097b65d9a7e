"""A ring of preallocated device slots, filled on one copy stream, read in place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torch_sink.common.arguments import check_count
from torch_sink.common.containers import flatten, is_lazy, is_plain
from torch_sink.common.pool import Pool
from torch_sink.common.ranks import warn_of_rank
from torch_sink.damage.report import DecodeReport
from torch_sink.sink.device import DeviceOps, LeafPlan, RingPlan, SlotProtocol
from torch_sink.sink.slots import ImageFormat, Slots, execute_lazy

log = logging.getLogger("torch_sink")


class Place(NamedTuple):
    """Memory of one leaf of a batch in one slot."""

    plan: LeafPlan
    buffer: torch.Tensor  # on the device
    landing: torch.Tensor  # on the device, before dtype and layout change; the buffer itself where they stay
    staging: list[torch.Tensor]  # page-locked host memory; [] until a batch first has to be copied there

    def of(self, leaf: torch.Tensor) -> Place | None:
        """The first rows of this place, as many as `leaf` has; None if `leaf` does not fit in."""
        shape = self.buffer.shape
        if (leaf.ndim, leaf.dtype, is_lazy(leaf)) != (len(shape), self.plan.source_dtype, self.plan.is_lazy):
            return None
        if leaf.shape == shape:
            return self
        if leaf.shape[1:] != shape[1:] or leaf.shape[0] > shape[0]:
            return None
        rows = slice(leaf.shape[0])
        buffer = self.buffer[rows]
        return Place(self.plan, buffer, buffer if self.landing is self.buffer else self.landing[rows], self.staging)


@dataclass
class Slot:
    """The memory of one slot: a place for each leaf of a batch."""

    places: list[Place | None]  # None for leaves that stay on the host or have no fixed memory
    kept: list[Any] = field(default_factory=list)  # memory outside the ring that this batch needs
    is_static: bool = False  # the batch lies completely in its places, at full size

    def place_of(self, position: int, leaf: Any) -> Place | None:
        """The place for a leaf; None if the leaf needs memory outside the ring."""
        place = self.places[position] if position < len(self.places) else None
        return None if place is None else place.of(leaf)


class DeviceRing(Slots):
    """Slots on a device: allocated at the first batch, never again.

    A batch with fewer rows (the last one of a pass) uses the first rows of a slot's buffers. A batch of another shape
    or structure gets memory of its own, from the copy stream's cache: the slot holds it until the copy stream waits
    for the consumer's last use, so it is never reused too early and no `record_stream` is needed.

    With `reads_pinned`, page-locked tensors of the loader are read in place, which takes a loader that does not write
    to them again; else they are copied to the staging memory like others.
    """

    def __init__(self, count: int, form: ImageFormat, ops: DeviceOps, max_bytes: int | None = None) -> None:
        super().__init__(count, form)
        self.ops = ops
        self.max_bytes = max_bytes
        self.pool: Pool | None = None
        self.slabs: dict[tuple[int, int], bool] = {}  # address and bytes: whether they are page-locked
        self._changes_seen = 0  # of the pool
        self.plan: RingPlan | None = None
        self.making_bytes = 0  # the most that making a batch took beside its slot: files, decoded pixels, stages
        self.slots: list[Slot] = []
        self.protocol: SlotProtocol | None = None
        self.allocations = 0
        self.may_plan_anew = False

    def share(self, make_pool: Callable[[], Pool | None]) -> None:
        """Workers write to memory that is page-locked once, and the host copies nothing.

        A slab is free again when the batch in it is not `kept` any more: after the wait for `staged`.
        """
        self.pool = make_pool()

    def _lock_slabs(self, pool: Pool) -> None:
        """Page-locks the slabs in which batches have come, and unlocks what has given its place to others."""
        if pool.changes == self._changes_seen:
            return
        self._changes_seen, now = pool.changes, pool.slabs()
        for slab in [*self.slabs.keys() - set(now)]:
            self._unlock(slab)
        for address, size in now:
            if (address, size) not in self.slabs:
                is_locked, were_all = self.ops.page_lock(address, size), all(self.slabs.values())
                self.slabs[address, size] = is_locked
                if not is_locked and were_all:
                    warn_of_rank("%s bytes of shared memory cannot be page-locked: batches are copied", f"{size:,}")

    def _unlock(self, slab: tuple[int, int]) -> None:
        if self.slabs.pop(slab):
            self.ops.page_unlock(slab[0])

    def fill(self, slot: int, batch: Any) -> tuple[Any, list[Any], DecodeReport | None]:
        """Issues the copies and kernels that bring `batch` into `slot`; the host waits only for staging memory."""
        flat = flatten(batch)
        if self.may_plan_anew:
            self._leave_unless_fitting(flat.leaves)
        protocol = self._allocate(flat.leaves) if self.protocol is None else self.protocol
        if self.pool is not None:
            self._lock_slabs(self.pool)
        memory = self.slots[slot]
        source_stream = self.ops.current_stream()
        is_made_there = any(map(self._is_on_device, flat.leaves))
        if is_made_there:
            self.ops.follow(source_stream)
        protocol.begin_staging(slot)
        with self.ops.on_copy_stream(), torch.no_grad():
            protocol.begin_filling(slot)
            memory.kept.clear()  # after the wait: the copy stream may reuse this memory from here on
            if self.pool is not None:
                memory.kept.append(batch)  # it may lie in a slab, from which copies run beside the host
            try:
                copied = self._copy_ordinary(memory, flat.leaves)
                of_lazy = (getattr(leaf, "__torch_sink_memory__", (0, 0)) for leaf in copied if is_lazy(leaf))
                making = dict(sorted(of_lazy))  # of one program the most: views that were made need nothing
                self.making_bytes = max(self.making_bytes, sum(making.values()))
                places = {id(leaf): memory.place_of(at, leaf) for at, leaf in enumerate(copied) if is_lazy(leaf)}
                targets = {key: place.buffer for key, place in places.items() if place is not None}
                filled, loss = execute_lazy(flat._replace(leaves=copied), self.form, targets)
            finally:
                protocol.end_staging(slot, reads_host=any(map(self._reads_host, flat.leaves)))
                if is_made_there:
                    protocol.give_back(slot, source_stream)
            memory.is_static = True
            settled = [self._settle(memory, position, leaf) for position, leaf in enumerate(filled.leaves)]
            protocol.end_filling(slot)
        return filled._replace(leaves=settled).batch(), settled, loss

    def open(self, slot: int) -> None:
        if self.protocol is not None:
            self.protocol.begin_use(slot)

    def free(self, slot: int) -> None:
        if self.protocol is not None:
            self.protocol.end_use(slot)

    def static_index(self, slot: int) -> int | None:
        return slot if self.slots[slot].is_static else None

    def static_batches(self, batch: Any) -> dict[int, Any]:
        flat = flatten(batch)

        def in_slot(slot: Slot) -> Any:
            pairs = zip(flat.leaves, [*slot.places, *[None] * len(flat.leaves)], strict=False)
            there = [place.buffer if place and isinstance(leaf, torch.Tensor) else leaf for leaf, place in pairs]
            return flat._replace(leaves=there).batch()

        return {number: in_slot(slot) for number, slot in enumerate(self.slots)}

    def describe(self) -> str:
        if self.plan is not None:
            making = f", and {self.making_bytes:,} bytes while a batch is made" if self.making_bytes else ""
            return f"{self.plan}{making}"
        bound = "" if self.max_bytes is None else f" within {self.max_bytes:,} bytes"
        return f"up to slots={self.count}{bound}, planned at the first batch"

    def bytes_planned(self) -> int | None:
        return 0 if self.plan is None else self.plan.device_bytes + self.making_bytes

    def start_over(self) -> None:
        self.may_plan_anew = True

    def _leave_unless_fitting(self, batch: list[Any]) -> None:
        self.may_plan_anew = False
        places = self.slots[0].places if self.slots else []
        fits = len(batch) == len(places) and all(
            place.of(leaf) is not None if place is not None else not (is_lazy(leaf) or is_plain(leaf))
            for place, leaf in zip(places, batch, strict=False)
        )
        if not fits and self.slots:
            self.ops.finish()
            self.slots, self.protocol, self.plan = [], None, None

    def close(self) -> None:
        if self.slots:
            self.ops.finish()
        self.slots = []
        for slab in list(self.slabs):
            self._unlock(slab)

    def _allocate(self, first: list[Any]) -> SlotProtocol:
        plan = RingPlan(first, self.form, self.count, self.max_bytes)
        log.info("SinkLoader ring on %s: %s", self.ops.device, plan)
        with self.ops.on_copy_stream():
            landings = [
                self._new(leaf.shape, leaf.source_dtype) if leaf is not None and leaf.is_converted else None
                for leaf in plan.leaves
            ]
            rows = [list(zip(plan.leaves, landings, strict=True))] * plan.slots
            self.slots = [Slot([leaf and self._place(leaf, landing) for leaf, landing in row]) for row in rows]
            self.ops.follow(self.ops.default_stream())  # the cache hands out blocks that its kernels may still read
        self.count, self.plan = plan.slots, plan
        self.protocol = SlotProtocol(plan.slots, self.ops)
        return self.protocol

    def _new(self, shape: torch.Size, dtype: torch.dtype, layout: Any = torch.contiguous_format) -> torch.Tensor:
        self.allocations += 1
        return self.ops.empty(shape, dtype, layout)

    def _place(self, plan: LeafPlan, landing: torch.Tensor | None) -> Place:
        buffer = self._new(plan.shape, plan.dtype, plan.memory_format)
        return Place(plan, buffer, buffer if landing is None else landing, [])

    def _copy_ordinary(self, memory: Slot, leaves: list[Any]) -> list[Any]:
        """The leaves in the slot or elsewhere on the device; lazy ones, numbers and strings as they are."""
        return [self._copy_leaf(memory, position, leaf) for position, leaf in enumerate(leaves)]

    def _copy_leaf(self, memory: Slot, position: int, leaf: Any) -> Any:
        if is_plain(leaf):
            return self._copy(memory, position, leaf)
        if is_lazy(leaf) or not moves_itself(leaf):
            return leaf
        # A sparse or nested tensor, a subclass, an object with `to`: it knows best how it is moved.
        moved = leaf.to(self.ops.device)  # host sync: the producer's thread, because the memory is not page-locked
        memory.kept.append(moved := self.form.convert(moved))
        return moved

    def _copy(self, memory: Slot, position: int, leaf: torch.Tensor) -> torch.Tensor:
        place = memory.place_of(position, leaf)
        if place is None:
            self.allocations += 1
            odd = torch.empty(leaf.shape, dtype=leaf.dtype, device=self.ops.device)
            self.ops.copy(odd, self._sendable(leaf, place, memory))
            return self.form.convert(odd)
        self.ops.copy(place.landing, self._sendable(leaf, place, memory))
        if place.landing is not place.buffer:
            self.ops.copy(place.buffer, place.landing)  # dtype and layout change here, on the device
        return place.buffer

    def _sendable(self, leaf: torch.Tensor, place: Place | None, memory: Slot) -> torch.Tensor:
        """`leaf` as page-locked or device memory in contiguous layout."""
        if self._is_on_device(leaf):
            memory.kept.append(leaf)
            return leaf.contiguous()
        if self.reads_pinned and leaf.device.type == "cpu" and leaf.is_contiguous() and leaf.is_pinned():
            memory.kept.append(leaf)
            return leaf
        if place is None:
            return self.ops.empty_pinned(leaf.shape, leaf.dtype).copy_(leaf)
        if not place.staging:
            self.allocations += 1
            place.staging.append(self.ops.empty_pinned(place.plan.shape, place.plan.source_dtype))
        staging = place.staging[0]
        return (staging if leaf.shape == staging.shape else staging[: leaf.shape[0]]).copy_(leaf)

    def _reads_host(self, leaf: Any) -> bool:
        """Whether a leaf's memory is on the host, as that of images that are made from their files is."""
        return is_lazy(leaf) or (moves_itself(leaf) and not self._is_on_device(leaf))

    def _is_on_device(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.device == self.ops.device and leaf.device.type != "cpu"

    def _settle(self, memory: Slot, position: int, leaf: Any) -> Any:
        """Moves a tensor that was made outside the slot into it where it fits, or else keeps it alive."""
        if not isinstance(leaf, torch.Tensor):
            memory.is_static &= not moves_itself(leaf)
            return leaf
        place = memory.places[position] if position < len(memory.places) else None
        buffer = None if place is None else place.buffer
        has_address = leaf.layout is torch.strided and not leaf.is_nested
        if buffer is not None and has_address and leaf.data_ptr() == buffer.data_ptr():
            memory.is_static &= leaf.shape == buffer.shape
            return leaf
        memory.kept.append(leaf)
        if buffer is not None and is_plain(leaf) and (leaf.shape, leaf.dtype) == (buffer.shape, buffer.dtype):
            self.ops.copy(buffer, leaf)
            return buffer
        memory.is_static = False
        return leaf


def moves_itself(leaf: Any) -> bool:
    """Whether `leaf` offers the method by which tensors, and by convention other parts of a batch, change device."""
    return callable(getattr(leaf, "to", None))


def make_slots(form: ImageFormat, slots: int | None, max_bytes: int | None) -> Slots:
    """Slots for the device of `form`."""
    check_count("slots", slots, minimum=1, meaning="the default")
    check_count("max_bytes", max_bytes, minimum=1, meaning="no bound")
    count = 3 if slots is None else slots
    if form.device.type == "cpu":
        return Slots(count, form)
    return DeviceRing(count, form, DeviceOps(form.device), max_bytes)
