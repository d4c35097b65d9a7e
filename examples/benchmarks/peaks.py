"""The peak of a run's memory on the device, and of the host's memory that is page-locked for it."""

from __future__ import annotations

import gc
from typing import Any

import torch

import torch_sink

Bytes = dict[str, int]


class Peaks:
    """What is held beyond that which is held now; everything that can be given back is, at first.

    So contenders that share a process are told apart: what an earlier one still holds does not change any more.
    """

    def __init__(self) -> None:
        _give_back()
        self._before = _held("current")

    def begin(self) -> None:
        """What was needed at most until here does not count."""
        _give_back()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_peak_host_memory_stats()

    def result(self, batches: Any) -> Bytes:
        """Bytes at the peak: `allocated`, `reserved` by PyTorch's allocator, `page_locked`, slabs included.

        Args:
            batches: what is trained from; a SinkLoader page-locks slabs, which PyTorch's allocator does not count.
        """
        peaks = {name: value - self._before[name] for name, value in _held("peak").items()}
        return {**peaks, "page_locked": peaks["page_locked"] + registered_bytes(batches)}


def _give_back() -> None:
    gc.collect()
    torch.cuda.synchronize()  # host sync
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()


def _held(when: str) -> Bytes:
    device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    return {
        "allocated": device[f"allocated_bytes.all.{when}"],
        "reserved": device[f"reserved_bytes.all.{when}"],
        "page_locked": host[f"allocated_bytes.{when}"],
    }


def registered_bytes(batches: Any) -> int:
    """Bytes of the slabs that a SinkLoader has page-locked where they lie; it keeps them until it is closed."""
    slots = batches._slots if isinstance(batches, torch_sink.SinkLoader) else None
    slabs = getattr(slots, "slabs", None)
    if slabs is None:
        return 0
    return sum(size for (_, size), is_locked in slabs.items() if is_locked)
