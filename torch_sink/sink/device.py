"""What a ring asks of a device: streams, events, memory and how much of it, and who may touch a slot when."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torch_sink.common.containers import is_lazy, is_plain
from torch_sink.errors import SinkError
from torch_sink.sink.slots import ImageFormat
from torch_sink.thread_waits import capture_lock


@functools.cache
def copy_stream_of(device: torch.device) -> torch.cuda.Stream:
    """The copy stream of a device, one for the life of the process.

    torch hands out streams round robin from a pool of 32, each with a memory cache of its own: a stream per loader
    would leak caches and end up as an alias of the stream that trains.

    Its kernels go first: a batch of images is made by dozens of small ones in a row, each of which would wait behind
    large ones of training. What that gains has not been measured.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class DeviceOps:
    """A CUDA (or ROCm) device as the ring sees it; `copy_stream` is the one on which slots are filled.

    Tests put a simulated device in its place.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copy_stream: Any = copy_stream_of(device)
        self._streams: dict[Any, torch.cuda.Stream] = {}

    def current_stream(self) -> Any:
        """The calling thread's current stream on this device; its object is made once, for it is asked every step."""
        key = torch._C._cuda_getCurrentStream(self.device.index)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = torch.cuda.current_stream(self.device)
        return stream

    def new_event(self, *, host_waits: bool) -> Any:
        """An event without timing; a thread that waits for it sleeps instead of spinning."""
        return torch.cuda.Event(blocking=host_waits)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def on_copy_stream(self) -> Iterator[None]:
        """Work issued inside goes to the copy stream: sets device and stream of the calling thread."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.copy_stream):
            yield

    def empty(self, shape: torch.Size, dtype: torch.dtype, memory_format: torch.memory_format) -> torch.Tensor:
        """Memory of the default stream's cache, where it can be reused by everybody once the ring is closed."""
        with torch.cuda.stream(self.default_stream()):
            return torch.empty(shape, dtype=dtype, device=self.device, memory_format=memory_format)

    def empty_pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Page-locked host memory: only from there do copies run beside the host."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def page_lock(self, address: int, size: int) -> bool:
        """Page-locks host memory; where that fails, the error is taken back, or the next launch would report it."""
        with torch.cuda.device(self.device), capture_lock:
            is_locked = int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0  # type: ignore[no-untyped-call]
            if not is_locked:
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self.device)
        return is_locked

    def page_unlock(self, address: int) -> None:
        """Takes `page_lock` back, once nothing is in flight: what still lies there lies in ordinary memory."""
        with torch.cuda.device(self.device), capture_lock:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """From the host only with equal dtype and layout, else torch would convert there and wait."""
        target.copy_(source, non_blocking=True)

    def follow(self, stream: Any) -> None:
        """Makes the copy stream wait, on the device, for the work issued to `stream` so far."""
        self.copy_stream.wait_stream(stream)

    def default_stream(self) -> Any:
        """The stream whose memory cache `empty` allocates from."""
        return torch.cuda.default_stream(self.device)

    def finish(self) -> None:
        """Before memory is given back; not inside a graph capture, and not beside one of another thread."""
        with capture_lock:
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(self.device)  # host sync


class SlotProtocol:
    """Order between the filling of a slot and its use, kept on the device: two parties, two streams, three events.

    Each slot has a staging area on the host, where it needs one, and a buffer on the device, and the events

    * `staged`: the copy from the staging area is done, so the host may write there again. The producer's host waits, if
      there was such a copy.
    * `filled`: the buffer is complete. The consumer's stream waits.
    * `free`: the consumer's last use of the buffer is done. The copy stream waits.

    A slot goes producer -> consumer -> producer through a lock-protected queue on the host, so an event is always
    recorded before the other side is told to wait for it. Without the wait for `free` a batch is overwritten while it
    is read; without the wait for `staged` a batch is replaced, on its way, by a later one; without the wait for
    `filled` it is read before it is there.
    """

    def __init__(self, count: int, ops: DeviceOps) -> None:
        self.ops = ops
        self.staged = [ops.new_event(host_waits=True) for _ in range(count)]
        self.filled = [ops.new_event(host_waits=False) for _ in range(count)]
        self.free = [ops.new_event(host_waits=False) for _ in range(count)]
        self.was_staged = [False] * count
        self.was_used = [False] * count

    def begin_staging(self, slot: int) -> None:
        """Before the host writes to the staging area of `slot`."""
        if self.was_staged[slot]:
            self.staged[slot].synchronize()  # host sync: the thread that fills slots, for a copy of `count` batches ago

    def begin_filling(self, slot: int) -> None:
        """Before work that writes to the buffer of `slot` is issued to the copy stream."""
        if self.was_used[slot]:
            self.ops.copy_stream.wait_event(self.free[slot])

    def end_staging(self, slot: int, *, reads_host: bool) -> None:
        """All copies into the buffer of `slot` were issued; whether some read memory of the host."""
        self.staged[slot].record(self.ops.copy_stream)
        self.was_staged[slot] = reads_host

    def give_back(self, slot: int, source_stream: Any) -> None:
        """Lets the loader, whose batch on `source_stream` was copied, write to the same memory again."""
        source_stream.wait_event(self.staged[slot])

    def end_filling(self, slot: int) -> None:
        """All work that writes to the buffer of `slot` was issued."""
        self.filled[slot].record(self.ops.copy_stream)

    def begin_use(self, slot: int) -> None:
        """The consumer's current stream will read the buffer of `slot`."""
        self.ops.current_stream().wait_event(self.filled[slot])

    def end_use(self, slot: int) -> None:
        """The consumer issued its last read of `slot` to its current stream."""
        self.free[slot].record(self.ops.current_stream())
        self.was_used[slot] = True


class LeafPlan(NamedTuple):
    """One tensor of a batch, which has a buffer in each slot."""

    shape: torch.Size  # of the first batch; later ones may have fewer rows
    dtype: torch.dtype  # in the slot
    memory_format: torch.memory_format  # in the slot
    source_dtype: torch.dtype  # in which it comes from the host
    is_lazy: bool  # made on the device, so nothing is staged

    @property
    def source_bytes(self) -> int:
        """Bytes that are staged for one slot."""
        return 0 if self.is_lazy else self.shape.numel() * self.source_dtype.itemsize

    @property
    def is_converted(self) -> bool:
        """Whether dtype or layout change on the device, after the copy."""
        changes = self.dtype != self.source_dtype or self.memory_format is not torch.contiguous_format
        return changes and not self.is_lazy


class RingPlan:
    """The memory of a ring of up to `slots` slots within `max_bytes` of device memory, decided from the first batch."""

    def __init__(self, first: Sequence[Any], form: ImageFormat, slots: int, max_bytes: int | None) -> None:
        # None for what stays on the host or cannot have a fixed buffer.
        self.leaves = [
            LeafPlan(leaf.shape, form.dtype_of(leaf), form.layout_of(leaf), leaf.dtype, is_lazy(leaf))
            if is_lazy(leaf) or is_plain(leaf)
            else None
            for leaf in first
        ]
        planned = [leaf for leaf in self.leaves if leaf is not None]
        self.slot_bytes = sum(leaf.shape.numel() * leaf.dtype.itemsize for leaf in planned)
        # Where they lie before they are converted: one set for all slots.
        landing_bytes = sum(leaf.source_bytes for leaf in planned if leaf.is_converted)
        self.slots = slots
        if max_bytes is not None and slots * self.slot_bytes + landing_bytes > max_bytes:
            self.slots = (max_bytes - landing_bytes) // max(1, self.slot_bytes)
        if self.slots < 1:
            raise SinkError(
                f"max_bytes={max_bytes:,} does not hold one batch of {self.slot_bytes + landing_bytes:,} bytes: "
                "raise max_bytes, use a smaller batch, or a smaller dtype"
            )
        self.device_bytes = self.slots * self.slot_bytes + landing_bytes
        self.pinned_bytes = self.slots * sum(leaf.source_bytes for leaf in planned)

    def __str__(self) -> str:
        return (
            f"slots={self.slots} of {self.slot_bytes:,} bytes = {self.device_bytes:,} bytes on the device, "
            f"up to {self.pinned_bytes:,} bytes of pinned memory"
        )
