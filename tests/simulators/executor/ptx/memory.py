"""The memory of a launch: the tensors that it was given, and what the warps of a CTA share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from .arithmetic import LANES, Array
from .shadow import LANE_SHIFT, Shadow


def spread(value: Array, shape: tuple[int, ...]) -> Array:
    """A register of all warps and lanes; NumPy needs a while to see that it is one."""
    return value if value.shape == shape else np.broadcast_to(value, shape)


class Access(NamedTuple):
    """What the active lanes of some warps touch with one instruction.

    Attributes:
        rows: of each, its warp among those that run.
        lanes: 0 ... 31; 32 where all lanes of a warp do the same, which is listed once.
        addresses: int64.
        shape: of the registers, [warps, 32 or 1].
    """

    rows: Array
    lanes: Array
    addresses: Array
    shape: tuple[int, ...]

    @classmethod
    def of(cls, addresses: Array, guard: Array | None, warps: int) -> Access:
        """The lanes whose guard is set; all of them without."""
        shape = (warps, max(addresses.shape[1], 1 if guard is None else guard.shape[1]))
        addresses = spread(addresses, shape)
        rows, lanes = np.nonzero(np.ones(shape, bool) if guard is None else spread(guard, shape))
        found = addresses[rows, lanes].astype(np.int64)
        return cls(rows, lanes if shape[1] == LANES else lanes + LANES, found, shape)

    def of_lanes(self, value: Array) -> Array:
        """What each of them holds in a register."""
        return spread(value, self.shape)[self.rows, self.lanes % LANES]

    def stamps(self, warps: Array) -> Array:
        """Of the shadow, from those of the warps."""
        return warps[self.rows] | (self.lanes.astype(np.int64) << LANE_SHIFT)

    def part(self, chosen: Array) -> Access:
        """Some of them."""
        return Access(self.rows[chosen], self.lanes[chosen], self.addresses[chosen], self.shape)


class Region:
    """A piece of memory that is touched as a whole or not at all.

    Args:
        base: its address.
        data: uint8 [bytes], what lies there.
        warps: of a CTA; None where nobody looks for races.
    """

    def __init__(self, base: int, data: Array, warps: int | None) -> None:
        self.base, self.end, self._data = base, base + len(data), data
        self.shadow = None if warps is None else Shadow(len(data), warps)
        self.known: Array | None = None  # which bytes were written; None where all were before the launch

    def elements(self, size: int) -> tuple[Array, int]:
        """(what lies there as unsigned integers of so many bytes, the address of the first)."""
        skipped = -self.base % size
        count = max(len(self._data) - skipped, 0) // size
        return self._data[skipped : skipped + count * size].view(f"u{size}"), self.base + skipped


class Space(Protocol):
    """An address space."""

    def regions(self, access: Access, size: int) -> Iterator[tuple[Region, Array, Access]]:
        """(region, which of them lie there, these with addresses of the region). Raises `OutOfBounds`."""


class OutOfBounds(Exception):
    """An address that nothing was given for."""


class GlobalMemory:
    """The tensors of a launch.

    Args:
        tensors: on the CPU; those that overlap are one region.
        warps: of a CTA; None where nobody looks for races.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], warps: int | None) -> None:
        extents: list[tuple[int, int, torch.Tensor]] = []
        for tensor in sorted((tensor for tensor in tensors if tensor.numel()), key=torch.Tensor.data_ptr):
            begin, end = extent(tensor)
            if extents and begin < extents[-1][1]:
                first, before, owner = extents.pop()
                begin, end, tensor = first, max(before, end), owner
            extents.append((begin, end, tensor))
        self._regions = [Region(begin, _bytes(tensor, begin, end), warps) for begin, end, tensor in extents]
        self._begins = np.array([region.base for region in self._regions], np.int64)
        self._ends = np.array([region.end for region in self._regions], np.int64)

    def regions(self, access: Access, size: int) -> Iterator[tuple[Region, Array, Access]]:
        """As `Space`."""
        number = np.searchsorted(self._begins, access.addresses, "right") - 1
        outside = (number < 0) | (access.addresses + size > np.append(self._ends, 0)[number])
        if outside.any():
            raise OutOfBounds(self._describe(access.addresses[outside]))
        for one in [number[0]] if (number == number[0]).all() else np.unique(number):
            here = number == one
            yield self._regions[one], here, access if here.all() else access.part(here)

    def _describe(self, addresses: Array) -> str:
        first = int(addresses[0])
        if not self._regions:
            return "nothing was given"
        near = min(self._regions, key=lambda region: max(region.base - first, first - region.end))
        return f"{len(addresses)} lanes, the first at byte {first - near.base} of a tensor of {near.end - near.base}"


class SharedMemory:
    """What the warps of each CTA share, full of garbage at first.

    Args:
        ctas: how many run together.
        size: bytes of each.
        warps: of a CTA; None where nobody looks for races, or for bytes that are read before they are written.
        random: draws the garbage.
    """

    def __init__(self, ctas: int, size: int, warps: int | None, random: np.random.Generator) -> None:
        self.size, self._step = size, -(-size // 16) * 16
        self._region = Region(0, random.integers(0, 256, ctas * self._step, np.uint8), warps)
        self._region.known = None if warps is None else np.zeros(ctas * self._step, bool)

    def of(self, ctas: Array) -> Space:
        """As the warps see it that run; the CTA of each is given."""
        return _SharedOfWarps(self, ctas)

    def place(self, access: Access, ctas: Array, size: int) -> tuple[Region, Access]:
        """The region of all CTAs, and addresses in it."""
        outside = (access.addresses < 0) | (access.addresses + size > self.size)
        if outside.any():
            raise OutOfBounds(f"byte {int(access.addresses[outside][0])} of {self.size} of shared memory")
        return self._region, access._replace(addresses=access.addresses + ctas[access.rows] * self._step)


class _SharedOfWarps(NamedTuple):
    memory: SharedMemory
    ctas: Array

    def regions(self, access: Access, size: int) -> Iterator[tuple[Region, Array, Access]]:
        region, placed = self.memory.place(access, self.ctas, size)
        yield region, np.ones(len(access.addresses), bool), placed


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """(address of the first byte of a tensor, address after the last)."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _bytes(tensor: torch.Tensor, begin: int, end: int) -> Array:
    storage = tensor.untyped_storage()
    data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return data[begin - storage.data_ptr() : end - storage.data_ptr()]


def cells_of(addresses: Array, region: Region, size: int) -> Array:
    """Every byte of accesses, for the shadow."""
    return ((addresses - region.base)[:, None] + np.arange(size)).reshape(-1)
