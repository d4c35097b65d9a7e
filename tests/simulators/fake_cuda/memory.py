"""The caching allocator: host memory that pretends to be on the device, looks like garbage outside its life, and ends."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .host_memory import Statistics
from .streams import Work

if TYPE_CHECKING:
    from .device import FakeCuda
    from .streams import FakeStream

GARBAGE = 0xFF  # NaN in every floating point dtype, -1 in every signed integer
SEGMENT = 2 << 20  # bytes that are asked of the device at a time
WORKSPACE = 8192
ROUND = 512  # bytes to which an allocation is rounded up
_numbers = itertools.count(1)


class Block:
    """Memory of one allocation.

    Attributes:
        host: uint8 [bytes], where the values really are.
        stream: on which it was allocated: the one on which it can be reused at once when it is freed.
        pool: the graph pool it belongs to, or None.
        users: other streams that were named by `record_stream`.
        number: how many were allocated before it.
        is_freed: whether no tensor refers to it any more.
    """

    def __init__(self, size: int, stream: FakeStream, pool: Pool | None) -> None:
        self.host = torch.empty(max(size, 1), dtype=torch.uint8)
        self.host.fill_(GARBAGE)
        self.size, self.stream, self.pool = size, stream, pool
        self.users: list[FakeStream] = []
        self.number = next(_numbers)
        self.is_freed = False

    @property
    def rounded(self) -> int:
        """Bytes that it takes."""
        return -(-max(self.size, 1) // ROUND) * ROUND

    @property
    def address(self) -> int:
        return self.host.data_ptr()

    def spoil(self) -> None:
        """What another owner of the memory does to it."""
        self.host.fill_(GARBAGE)


class Pool:
    """The private memory of the graphs that were captured into it.

    Attributes:
        uses: graphs and captures that hold it.
        live: blocks with a tensor, by address.
    """

    def __init__(self, handle: Any) -> None:
        self.handle, self.uses = handle, 0
        self.live: dict[int, Block] = {}

    def spoil_later_than(self, number: int) -> None:
        """What a replay does to tensors that were put where its graph had freed memory."""
        for block in [block for block in self.live.values() if block.number > number]:
            block.spoil()


class Arena:
    """Memory of one pool for one stream: what tensors have of it, and what was asked of the device for it.

    It has no holes: what is free is one piece.
    """

    def __init__(self) -> None:
        self.live = self.reserved = 0

    def missing(self, size: int) -> int:
        """Bytes of segments to ask for, so that `size` more fit."""
        return max(0, _in_segments(self.live + size) - self.reserved)

    def shrink(self) -> None:
        """Give the free segments back."""
        self.reserved = _in_segments(self.live)


def _in_segments(size: int) -> int:
    return -(-size // SEGMENT) * SEGMENT


class Allocator:
    """Blocks by address, pools by handle; `limit` bytes on each device.

    Attributes:
        captures_underway: pools into which a capture or a thread allocates.
    """

    def __init__(self, cuda: FakeCuda, limit: int) -> None:
        self._cuda = cuda
        self.limit = limit
        self._blocks: dict[int, Block] = {}
        self._pools: dict[Any, Pool] = {}
        self._arenas: dict[Any, Arena] = {}  # by pool (None: the default one), device and stream
        self._statistics: dict[int, Statistics] = {}
        self._of_threads: dict[int, Any] = {}
        self.captures_underway: list[Any] = []
        self._cached: list[Block] = []
        self._workspaces: dict[Any, Tensor] = {}  # of cuBLAS: by stream, and whether the engine's thread has it

    def tensor(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor, from the pool of the current stream's capture or of this thread, or the default one.

        Raises:
            torch.OutOfMemoryError: the device has no room, also after all that is cached was given back to it.
        """
        stream = self._cuda.current_stream(device)
        elements = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        with self._cuda.queues.lock:
            capture = stream.capture
            pool = self._pools[capture.pool] if capture is not None else self._pool_of_thread()
            block = Block(elements * dtype.itemsize, stream, pool)
            self._take(block)
            if pool is None:
                self._reuse(stream)
            else:
                pool.live[block.address] = block
            self._blocks[block.address] = block
            if capture is not None:
                capture.graph.blocks.append(block)
        storage = torch._C._construct_storage_from_data_pointer(block.address, stream.device, block.size)
        self._watch(storage, block)
        meta = {
            "nbytes": block.size,
            "data_ptr": block.address,
            "size": tuple(size),
            "stride": tuple(stride),
            "dtype": dtype,
            "storage_offset": 0,
            "device_index": stream.device.index,
        }
        return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(meta, storage)

    def block_of(self, tensor: Tensor) -> Block:
        """The memory of a tensor on the device."""
        return self._blocks[tensor.untyped_storage().data_ptr()]

    def on_host(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor on the CPU."""
        storage = self.block_of(tensor).host.untyped_storage()
        alias = torch.empty(0, dtype=tensor.dtype)
        return alias.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _pool_of_thread(self) -> Pool | None:
        handle = self._of_threads.get(threading.get_ident())
        return self._pools[handle] if handle is not None else None

    def _arena(self, block: Block) -> Arena:
        handle = block.pool.handle if block.pool is not None else None
        return self._arenas.setdefault((handle, *block.stream.key), Arena())

    def _take(self, block: Block) -> None:
        arena, device, size = self._arena(block), block.stream.device.index, block.rounded
        missing = arena.missing(size)
        if missing and self.reserved(device) + missing > self.limit and not self.captures_underway:
            self._give_back()
        if missing and self.reserved(device) + missing > self.limit:
            self.statistics(device).add("num_ooms", 1)
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes on GPU {device}, which has {self.limit}; of the "
                f"{self.reserved(device)} reserved, with {self.private(device)} allocated in private pools (e.g., CUDA Graphs)."
            )
        arena.live += size
        arena.reserved += missing
        self._note(device, allocated=size)

    def _note(self, device: int, allocated: int = 0) -> None:
        statistics = self.statistics(device)
        for name in ("allocated_bytes.all", "active_bytes.all", "requested_bytes.all"):
            statistics.add(name, allocated)
        statistics.add("reserved_bytes.all", self.reserved(device) - statistics.current["reserved_bytes.all"])

    def _watch(self, storage: torch.UntypedStorage, block: Block) -> None:
        weakref.finalize(storage, self._let_go, storage._cdata, block).atexit = False

    def _let_go(self, address: int, block: Block) -> None:
        """Python's object of a storage goes. In torch 2.8 it may go as garbage while tensors still hold the storage."""
        if torch._C._storage_Use_Count(address) > 1:
            self._watch(torch.UntypedStorage._new_with_weak_ptr(address), block)
        else:
            self._free(block)

    def _free(self, block: Block) -> None:
        """Give memory back. A block of a graph's pool stays the graph's: its next replay writes there."""
        with self._cuda.queues.lock:
            del self._blocks[block.address]
            self._arena(block).live -= block.rounded
            self._note(block.stream.device.index, allocated=-block.rounded)
            block.is_freed = True
            if block.pool is None:
                self._cached.append(block)
            else:
                del block.pool.live[block.address]

    def _reuse(self, stream: FakeStream) -> None:
        """The next owner of a stream's free memory writes to it on that stream, without a wait for any other."""
        free = [block for block in self._cached if block.stream == stream]
        self._cached = [block for block in self._cached if block.stream != stream]
        for block in free:
            for user in block.users:
                self._cuda.queues.order(user, stream)
            self._cuda.queues.of(stream).append(Work(block.spoil, name="reuse"))

    def _give_back(self) -> None:
        """Give the device what is free in the default pool and in pools that no graph holds."""
        self._pools = {handle: pool for handle, pool in self._pools.items() if pool.uses or pool.live}
        for (handle, *_), arena in self._arenas.items():
            if handle not in self._pools or not self._pools[handle].uses:
                arena.shrink()
        for device in self._statistics:
            self._note(device)

    def empty_cache(self) -> None:
        """Give cached memory back, and pools that no graph holds and no tensor lies in."""
        if self.captures_underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self._give_back()

    def with_workspace(self, stream: FakeStream, run: Callable[[], None]) -> Callable[[], None]:
        """A kernel of cuBLAS. Its workspace is allocated at first use and kept; a graph goes on using the one it found."""
        key = stream.key, self._cuda.engine.is_current
        if key not in self._workspaces:
            self._workspaces[key] = self.tensor((WORKSPACE,), (1,), torch.uint8, stream.device)
        block, captured = self.block_of(self._workspaces[key]), stream.capture is not None

        def with_it() -> None:
            if captured and block.pool is None and block.is_freed:
                raise AssertionError("a graph writes to a workspace of cuBLAS that others may have by now")
            run()

        return with_it

    def clear_workspaces(self) -> None:
        """`torch._C._cuda_clearCublasWorkspaces`."""
        self._workspaces.clear()

    # What is used

    def statistics(self, device: int) -> Statistics:
        """Of a device."""
        return self._statistics.setdefault(device, Statistics())

    def reserved(self, device: int) -> int:
        """Bytes of all segments on a device."""
        return sum(arena.reserved for (_, index, _), arena in [*self._arenas.items()] if index == device)

    def private(self, device: int) -> int:
        """Bytes of segments that graphs hold."""
        arenas = [*self._arenas.items()]
        return sum(a.reserved for (pool, index, _), a in arenas if pool is not None and index == device)

    def memory_stats(self, device: int) -> dict[str, int]:
        """`torch.cuda.memory_stats`: what has a meaning here."""
        statistics = self.statistics(device)
        names = ("allocated_bytes.all", "active_bytes.all", "requested_bytes.all", "reserved_bytes.all")
        stats = {f"{name}.current": statistics.current[name] for name in names}
        stats |= {f"{name}.peak": statistics.peak[name] for name in names}
        return {**stats, "num_ooms": statistics.current["num_ooms"]}

    def snapshot(self, handle: Any = None) -> list[dict[str, Any]]:
        """`torch.cuda.memory_snapshot`: a segment for each block in use, and one for what is free beside them."""
        segments = []
        for (pool, device, stream), arena in [*self._arenas.items()]:
            if handle is not None and pool != handle:
                continue
            about = {"device": device, "stream": stream, "segment_pool_id": pool or (0, 0)}
            for block in [block for block in [*self._blocks.values()] if self._arena(block) is arena]:
                inside = {"size": block.rounded, "state": "active_allocated"}
                segments.append({**about, "address": block.address, "total_size": block.rounded, "blocks": [inside]})
            free = arena.reserved - sum(
                segment["total_size"] for segment in segments if segment.items() >= about.items()
            )
            segments.append({**about, "address": 0, "total_size": free, "blocks": []})
        return segments

    # Pools

    def begin_allocate_to_pool(self, handle: Any) -> None:
        """A capture begins."""
        pool = self._pools.get(handle)
        if pool is None:
            pool = self._pools[handle] = Pool(handle)
        elif pool.uses == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        pool.uses += 1
        if handle in self.captures_underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.captures_underway.append(handle)

    def begin_allocate_thread_to_pool(self, handle: Any) -> None:
        """What this thread allocates comes from a pool."""
        self.begin_allocate_to_pool(handle)
        self._of_threads[threading.get_ident()] = handle

    def end_allocate_to_pool(self, handle: Any) -> None:
        """A capture, or the thread's allocations in the pool, have ended."""
        if handle not in self.captures_underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.captures_underway.remove(handle)
        self._of_threads = {thread: pool for thread, pool in self._of_threads.items() if pool != handle}

    def release_pool(self, handle: Any) -> None:
        """A graph does not need its memory any more."""
        self._pools[handle].uses -= 1

    def pool(self, handle: Any) -> Pool:
        """The pool of a handle."""
        return self._pools[handle]

    def has_live_blocks(self, handle: Any, expected: set[int]) -> bool:
        """`torch._C._cuda_checkPoolLiveAllocations`: whether these are the pool's tensors, and no others."""
        return self._pools[handle].live.keys() == expected
