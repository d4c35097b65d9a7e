"""The memory that CUDA graphs keep, and how work that is not captured uses it between their replays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from torch_sink.thread_waits import capture_lock, host_sync_allowed


class Forgetful(Protocol):
    """What holds graphs."""

    def forget(self) -> None:
        """Destroy them."""


class GraphMemory:
    """A pool of device memory for all graphs of a loop, those that train and those that evaluate.

    Sharing it is sound because replays follow one another on one stream, and what a replay returns is used before the
    next one. Work that is not captured, such as the step of a short last batch, takes its memory from there too: from
    the default pool it would need a second set of activations, and a model that fills more than half of the device
    would run out of memory. Nothing that such work allocates may live on, because a replay writes over it.

    Attributes:
        graphs: how many hold the pool now.
    """

    def __init__(self) -> None:
        self.graphs, self._device = 0, -1
        self._handle: Any = None
        self._holders: weakref.WeakSet[Forgetful] = weakref.WeakSet()
        self._live: set[int] = set()  # addresses of tensors that belong there
        self._needed = 0  # bytes that the graphs needed
        self._is_lent = False

    def join(self, holder: Forgetful) -> None:
        """Name somebody who holds graphs, and has to forget them when the memory is given up."""
        self._holders.add(holder)

    def handle(self, device: int) -> Any:
        """The pool to capture into."""
        if self.graphs == 0:
            # torch asserts that no graph is captured into a pool which all graphs have left, while a tensor lies in it.
            self._device, self._handle, self._live = device, torch.cuda.graph_pool_handle(), set()
        return self._handle

    def note(self) -> None:
        """After a capture: what lives in the pool now belongs there."""
        self._live, self._needed = self._blocks(), self.reserved

    @property
    def reserved(self) -> int:
        """Bytes of device memory that the graphs keep."""
        return sum(segment["total_size"] for segment in self._segments()) if self.graphs else 0

    def make_room(self) -> bool:
        """Give back what the allocator keeps beside the pool, unless the device has as much again as the graphs need.

        For work that is not captured: while a thread allocates in a pool, the allocator gives nothing back by itself.

        Returns:
            Whether there is room now for as much again.
        """
        if self._is_tight():
            with capture_lock:
                torch.cuda.empty_cache()  # host sync
        return not self._is_tight()

    def _is_tight(self) -> bool:
        return self.graphs > 0 and torch.cuda.mem_get_info(self._device)[0] < self._needed

    @contextmanager
    def lent(self) -> Iterator[bool]:
        """Context of work of this thread that is not captured: whether there is a pool, in which it then allocates."""
        if not self.graphs or not _has_pools():
            yield False
            return
        if not self._is_lent and not self._holds_only(self._live):
            self._live = self._blocks()
        self._is_lent, device, handle = True, self._device, self._handle
        # Backward passes stay in this thread, because the pool is for this thread only: others may need memory of
        # their own meanwhile. And none may ask the allocator to give its cache back.
        with capture_lock, torch.autograd.set_multithreading_enabled(False):
            torch._C._cuda_beginAllocateCurrentThreadToPool(device, handle)
            try:
                yield True
            finally:
                torch._C._cuda_endAllocateToPool(device, handle)
                torch._C._cuda_releasePool(device, handle)
                torch._C._cuda_clearCublasWorkspaces()  # of this thread's, one may lie in the pool

    def take_back(self) -> bool:
        """After what was lent is used: whether all of it is free. If not, the graphs are forgotten, as a last resort.

        What lives on, such as a cache that a forward pass has made, then lies in memory that no graph writes to.
        """
        was_lent, self._is_lent = self._is_lent, False
        if not was_lent or not self.graphs or self._holds_only(self._live) or not self._blocks() - self._live:
            return True
        gc.collect()
        if not self._blocks() - self._live:
            return True
        self.give_up()
        return False

    def give_up(self) -> None:
        """Let all graphs be forgotten; what lives in the pool lives on."""
        with host_sync_allowed():
            for holder in [*self._holders]:
                holder.forget()

    def _holds_only(self, addresses: set[int]) -> bool:
        return bool(torch._C._cuda_checkPoolLiveAllocations(self._device, self._handle, addresses))

    def _blocks(self) -> set[int]:
        found = set()
        for segment in self._segments():
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    found.add(address)
                address += block["size"]
        return found

    def _segments(self) -> list[dict[str, Any]]:
        if not _has_pools():
            return []
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(self._handle, include_traces=False)
        return [segment for segment in segments if tuple(segment["segment_pool_id"]) == self._handle]


def _has_pools() -> bool:
    """Whether torch's own allocator is at work; CUDA's (`cudaMallocAsync`) can tell nothing of its pools."""
    return bool(torch._C._cuda_getAllocatorBackend() == "native")
