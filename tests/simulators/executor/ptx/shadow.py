"""Who touched each byte of a memory last, and whether a barrier lies between two that touch it.

A stamp is an int64 that names a thread and its time: warp (from 1 on, through all CTAs), lane, barriers of the CTA that
the warp has passed, barriers that it has passed at all. Two accesses are ordered where one thread makes both, where a
barrier of their CTA lies between them, or where any barrier of their warp does. Threads of different CTAs are never
ordered within a launch.

A store that changes nothing is none: several threads may store the same value. Where CTAs have done so, each may read
what it stored itself; that another one which stored nothing reads it goes unnoticed.
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
        self._agreed = np.zeros(size, bool)  # CTAs have stored the same value
        # Most memory is only read: who did so is put down when somebody writes.
        self._is_written = False
        self._reads: list[tuple[Array, Array]] = []

    def read(self, cells: Array, stamps: Array) -> str:
        """Notes that bytes are read. Returns what is wrong with it, "" for nothing."""
        if not self._is_written:
            self._reads.append((cells, stamps))
            return ""
        writer, before = self._writer[cells], self._reader[cells]
        raced = self._unordered(writer, stamps)
        raced &= ~self._agreed[cells] | self._same_cta(writer, stamps)
        joined = np.where(self._unordered(before, stamps), self._both(before, stamps), stamps)
        self._reader[cells] = joined
        others = self._reader[cells] != joined  # another thread of this very access reads the same byte
        if others.any():
            self._reader[cells[others]] = self._both(self._reader[cells[others]], joined[others])
        return "read after write without barrier" if raced.any() else ""

    def write(self, cells: Array, stamps: Array) -> str:
        """Notes that bytes are changed; the result is that of `read`."""
        self._put_down_reads()
        if self._unordered(self._writer[cells], stamps).any():
            return "write after write without barrier"
        if self._unordered(self._reader[cells], stamps).any():
            return "write after read without barrier"
        self._writer[cells] = stamps
        self._is_atomic[cells] = self._agreed[cells] = False
        others = self._writer[cells] != stamps  # of several threads of this very access the last one stands there
        self.confirm(cells[others], stamps[others])
        return ""

    def confirm(self, cells: Array, stamps: Array) -> None:
        """Notes that bytes are stored that had these values before."""
        writer = self._writer[cells]
        elsewhere = (writer > 0) & ~self._same_cta(writer, stamps)
        self._writer[cells[elsewhere]] = stamps[elsewhere]
        self._agreed[cells[elsewhere]] = True

    def change_atomically(self, cells: Array, stamps: Array) -> str:
        """Notes that bytes are changed by an atomic operation, which others of its kind need not be ordered with."""
        self._put_down_reads()
        before = self._writer[cells]
        unordered = self._unordered(before, stamps)
        if (unordered & ~self._is_atomic[cells]).any():
            return "atomic operation after write without barrier"
        if self._unordered(self._reader[cells], stamps).any():
            return "atomic operation after read without barrier"
        self._writer[cells] = np.where(unordered, self._both(before, stamps), stamps)
        self._is_atomic[cells] = True
        return ""

    def _put_down_reads(self) -> None:
        self._is_written = True
        for cells, stamps in self._reads:
            self.read(cells, stamps)
        self._reads.clear()

    def _unordered(self, before: Array, now: Array) -> Array:
        differs = before ^ now
        same_warp = (differs >> WARP_SHIFT == 0) & (before & _SEVERAL != _SEVERAL)
        no_barrier = (differs & _BARRIERS == 0) & ~(same_warp & (differs & _SYNCS != 0))
        return (before > 0) & (differs >> LANE_SHIFT != 0) & (no_barrier | ~self._same_cta(before, now))

    def _same_cta(self, before: Array, now: Array) -> Array:
        return ((before >> WARP_SHIFT) - 1) // self._warps == ((now >> WARP_SHIFT) - 1) // self._warps

    def _both(self, before: Array, now: Array) -> Array:
        """Stands for two threads that touch the same byte."""
        return np.where(self._same_cta(before, now), now | _SEVERAL, _SEVERAL_CTAS)
