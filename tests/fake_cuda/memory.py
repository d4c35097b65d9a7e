"""The caching allocator: host memory that pretends to be on the device, and looks like garbage outside its life."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .streams import Work

if TYPE_CHECKING:
    from .device import FakeCuda
    from .streams import FakeStream

GARBAGE = 0xFF  # NaN in every floating point dtype, -1 in every signed integer


class Block:
    """Memory of one allocation.

    Attributes:
        host: uint8 [bytes], where the values really are.
        stream: on which it was allocated: the one on which it can be reused at once when it is freed.
        pool: the graph pool it belongs to, or None.
        users: other streams that were named by `record_stream`.
        is_freed: whether no tensor refers to it any more.
    """

    def __init__(self, size: int, stream: FakeStream, pool: Pool | None) -> None:
        self.host = torch.empty(max(size, 1), dtype=torch.uint8)
        self.host.fill_(GARBAGE)
        self.size, self.stream, self.pool = size, stream, pool
        self.users: list[FakeStream] = []
        self.is_freed = False

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
        live: blocks with a tensor.
    """

    def __init__(self, handle: Any) -> None:
        self.handle, self.uses, self.live = handle, 0, 0


class Allocator:
    """Blocks by address, pools by handle.

    Attributes:
        live, peak: bytes of all blocks that tensors refer to, now and at most.
        captures_underway: pools into which a capture allocates, as the allocator believes.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._blocks: dict[int, Block] = {}
        self._pools: dict[Any, Pool] = {}
        self.captures_underway: list[Any] = []
        self._cached: list[Block] = []
        self.live = self.peak = 0

    def tensor(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor, from the pool of the capture that the current stream takes part in."""
        stream = self._cuda.current_stream(device)
        elements = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        with self._cuda.queues.lock:
            capture = stream.capture
            pool = self._pools[capture.pool] if capture is not None else None
            block = Block(elements * dtype.itemsize, stream, pool)
            if pool is None:
                self._reuse(stream)
            self._blocks[block.address] = block
            self.live += block.size
            self.peak = max(self.peak, self.live)
            if capture is not None and pool is not None:
                pool.live += 1
                capture.graph.blocks.append(block)
        storage = torch._C._construct_storage_from_data_pointer(block.address, stream.device, block.size)
        weakref.finalize(storage, self._free, block).atexit = False
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

    def _free(self, block: Block) -> None:
        """Give memory back. A block of a graph's pool stays the graph's: its next replay writes there."""
        with self._cuda.queues.lock:
            del self._blocks[block.address]
            self.live -= block.size
            block.is_freed = True
            if block.pool is None:
                self._cached.append(block)
            else:
                block.pool.live -= 1

    def _reuse(self, stream: FakeStream) -> None:
        """The next owner of a stream's free memory writes to it on that stream, without a wait for any other."""
        free = [block for block in self._cached if block.stream == stream]
        self._cached = [block for block in self._cached if block.stream != stream]
        for block in free:
            for user in block.users:
                self._cuda.queues.order(user, stream)
            self._cuda.queues.of(stream).append(Work(block.spoil, name="reuse"))

    def empty_cache(self) -> None:
        """Give cached memory back, and pools that no graph holds and no tensor lies in."""
        if self.captures_underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self._pools = {handle: pool for handle, pool in self._pools.items() if pool.uses or pool.live}

    def begin_allocate_to_pool(self, handle: Any) -> None:
        """A capture begins."""
        pool = self._pools.get(handle)
        if pool is None:
            pool = self._pools[handle] = Pool(handle)
        elif pool.uses == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        pool.uses += 1
        self.captures_underway.append(handle)

    def end_allocate_to_pool(self, handle: Any) -> None:
        """A capture has ended."""
        if handle not in self.captures_underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.captures_underway.remove(handle)

    def release_pool(self, handle: Any) -> None:
        """A graph does not need its memory any more."""
        self._pools[handle].uses -= 1
