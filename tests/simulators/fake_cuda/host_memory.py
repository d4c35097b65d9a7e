"""The caching allocator of page-locked memory, and how allocators count."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import Any

from torch import Tensor


class Statistics:
    """Current and highest values by name, such as "allocated_bytes"."""

    def __init__(self) -> None:
        self.current: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def add(self, name: str, amount: int) -> None:
        """Note a change."""
        self.current[name] += amount
        self.peak[name] = max(self.peak[name], self.current[name])

    def reset_peak(self) -> None:
        """Forget what was higher than now."""
        self.peak = Counter(self.current)


class HostAllocator:
    """Page-locked memory: pieces of a power of two bytes, which are kept for the next one who asks.

    Attributes:
        captures_underway: pools of captures, which a failed one leaves here in some releases.
    """

    def __init__(self) -> None:
        self.captures_underway: list[Any] = []
        self._addresses: Counter[int] = Counter()
        self._free: Counter[int] = Counter()  # pieces by size
        self._lock = threading.RLock()
        self.statistics = Statistics()

    def __contains__(self, address: int) -> bool:
        return address in self._addresses

    def add(self, tensor: Tensor) -> None:
        """Page-lock the memory of a new tensor."""
        storage = tensor.untyped_storage()
        size = 1 << max(storage.nbytes() - 1, 0).bit_length()
        with self._lock:
            self._addresses[storage.data_ptr()] = size
            if self._free[size]:
                self._free[size] -= 1
            else:
                self.statistics.add("allocated_bytes", size)
            self.statistics.add("active_bytes", size)
        weakref.finalize(storage, self._give_back, storage.data_ptr(), size).atexit = False

    def _give_back(self, address: int, size: int) -> None:
        with self._lock:
            del self._addresses[address]
            self._free[size] += 1
            self.statistics.add("active_bytes", -size)

    def begin_allocate_to_pool(self, handle: Any) -> None:
        """A capture begins."""
        if handle in self.captures_underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.captures_underway.append(handle)

    def end_allocate_to_pool(self, handle: Any) -> None:
        """It has ended."""
        self.captures_underway.remove(handle)

    def empty_cache(self) -> None:
        """Unlock what nobody uses."""
        with self._lock:
            self.statistics.add("allocated_bytes", -sum(size * count for size, count in self._free.items()))
            self._free.clear()

    def stats(self) -> dict[str, int]:
        """`torch.cuda.host_memory_stats`: what has a meaning here."""
        names = ("allocated_bytes", "active_bytes")
        current = {f"{name}.current": self.statistics.current[name] for name in names}
        return current | {f"{name}.peak": self.statistics.peak[name] for name in names}
