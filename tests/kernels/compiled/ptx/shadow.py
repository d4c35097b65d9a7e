"""Who touched each byte of a memory last, and whether a barrier lies between two that touch it.

A stamp is an int64 that names a thread and its time: warp (from 1 on, through all CTAs), lane, barriers of the CTA that
the warp has passed, barriers that it has passed at all. Two accesses are ordered where one thread makes both, where a
barrier of their CTA lies between them, or where any barrier of their warp does. Threads of different CTAs are never
ordered within a launch.

A store that changes nothing is none: several threads may store the same value.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import Array

ONE_SYNC = 1
ONE_BARRIER = 1 << 18 | ONE_SYNC
LANE_SHIFT, WARP_SHIFT = 36, 42
EVERY_LANE = 32 << LANE_SHIFT  # of an access that all lanes of a warp make alike
_SYNCS, _BARRIERS = (1 << 18) - 1, (1 << LANE_SHIFT) - (1 << 18)
_SEVERAL = 63 << LANE_SHIFT  # threads of a CTA
_SEVERAL_CTAS = (1 << 63) - 1


class Shadow:
    """The stamps of one memory.

    Args:
        size: in bytes.
        warps: of a CTA.
    """

    def __init__(self, size: int, warps: int) -> None:
        self._warps = warps
        self._writer = np.zeros(size, np.int64)
        self._reader = np.zeros(size, np.int64)
        self._is_atomic = np.zeros(size, bool)

    def read(self, cells: Array, stamps: Array) -> str:
        """Notes that bytes are read. Returns what is wrong with it, "" for nothing."""
        raced = self._unordered(self._writer[cells], stamps)
        before = self._reader[cells]
        joined = np.where(self._unordered(before, stamps), self._both(before, stamps), stamps)
        self._reader[cells] = joined
        others = self._reader[cells] != joined  # another thread of this very access reads the same byte
        if others.any():
            self._reader[cells[others]] = self._both(self._reader[cells[others]], joined[others])
        return "read after write without barrier" if raced.any() else ""

    def write(self, cells: Array, stamps: Array) -> str:
        """Notes that bytes are changed; the result is that of `read`."""
        if self._unordered(self._writer[cells], stamps).any():
            return "write after write without barrier"
        if self._unordered(self._reader[cells], stamps).any():
            return "write after read without barrier"
        self._writer[cells] = stamps
        self._is_atomic[cells] = False
        return ""

    def change_atomically(self, cells: Array, stamps: Array) -> str:
        """Notes that bytes are changed by an atomic operation, which others of its kind need not be ordered with."""
        before = self._writer[cells]
        unordered = self._unordered(before, stamps)
        if (unordered & ~self._is_atomic[cells]).any():
            return "atomic operation after write without barrier"
        if self._unordered(self._reader[cells], stamps).any():
            return "atomic operation after read without barrier"
        self._writer[cells] = np.where(unordered, self._both(before, stamps), stamps)
        self._is_atomic[cells] = True
        return ""

    def _unordered(self, before: Array, now: Array) -> Array:
        differs = before ^ now
        before_warp, now_warp = before >> WARP_SHIFT, now >> WARP_SHIFT
        same_warp = (before_warp == now_warp) & (before & _SEVERAL != _SEVERAL)
        no_barrier = (differs & _BARRIERS == 0) & ~(same_warp & (differs & _SYNCS != 0))
        return (before > 0) & (differs >> LANE_SHIFT != 0) & (no_barrier | ~self._same_cta(before_warp, now_warp))

    def _same_cta(self, warp: Array, other: Array) -> Array:
        return (warp - 1) // self._warps == (other - 1) // self._warps

    def _both(self, before: Array, now: Array) -> Array:
        """Stands for two threads that touch the same byte."""
        same_cta = self._same_cta(before >> WARP_SHIFT, now >> WARP_SHIFT)
        return np.where(same_cta, now | _SEVERAL, _SEVERAL_CTAS)
