"""The few things that a ring asks of a device: streams, events, memory. Tests put a simulated device in its place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from torch_sink.capture_lock import capture_lock


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Any) -> None:
        """Marks the work issued to `stream` so far."""

    def synchronize(self) -> None:
        """The host waits until the marked work is done."""


class DeviceOps(Protocol):
    """A device as the ring sees it. A stream is anything with `wait_event(event)`: a queue of device work.

    Attributes:
        device: where slots live.
        copy_stream: the one stream on which slots are filled.
    """

    device: torch.device
    copy_stream: Any

    def current_stream(self) -> Any:
        """The stream on which the calling thread issues its work."""

    def new_event(self, *, host_waits: bool) -> Event:
        """An event; `host_waits` says that a thread will sleep on it."""

    def on_copy_stream(self) -> contextlib.AbstractContextManager[None]:
        """Work issued inside goes to the copy stream."""

    def empty(self, shape: torch.Size, dtype: torch.dtype, memory_format: torch.memory_format) -> torch.Tensor:
        """Uninitialized device memory that outlives any one batch."""

    def empty_pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized page-locked host memory, contiguous."""

    def page_lock(self, address: int, size: int) -> bool:
        """Makes host memory one from which copies run beside the host; False if that fails."""

    def page_unlock(self, address: int) -> None:
        """Takes `page_lock` back, once nothing is in flight."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issues a copy to the copy stream: from page-locked memory of the same dtype and layout, or on the device."""

    def follow(self, stream: Any) -> None:
        """Makes the copy stream wait for the work issued to `stream` so far."""

    def default_stream(self) -> Any:
        """The stream whose memory cache `empty` allocates from."""

    def finish(self) -> None:
        """The host waits until nothing is in flight on the device."""


_copy_streams: dict[int, torch.cuda.Stream] = {}
_copy_streams_lock = threading.Lock()


def copy_stream_of(device: torch.device) -> torch.cuda.Stream:
    """The copy stream of a device, one for the life of the process.

    torch hands out streams round robin from a pool of 32, each with a memory cache of its own: a stream per loader
    would leak caches and end up as an alias of the stream that trains.
    """
    with _copy_streams_lock:
        if device.index not in _copy_streams:
            _copy_streams[device.index] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _copy_streams[device.index]


class CudaOps:
    """`DeviceOps` on a CUDA (or ROCm) device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copy_stream = copy_stream_of(device)
        self._streams: dict[Any, torch.cuda.Stream] = {}

    def current_stream(self) -> torch.cuda.Stream:
        """The calling thread's current stream on this device; its object is made once, for it is asked every step."""
        key = torch._C._cuda_getCurrentStream(self.device.index)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = torch.cuda.current_stream(self.device)
        return stream

    def new_event(self, *, host_waits: bool) -> torch.cuda.Event:
        """An event without timing; a thread that waits for it sleeps instead of spinning."""
        return torch.cuda.Event(blocking=host_waits)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def on_copy_stream(self) -> Iterator[None]:
        """Sets device and stream of the calling thread."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.copy_stream):
            yield

    def empty(self, shape: torch.Size, dtype: torch.dtype, memory_format: torch.memory_format) -> torch.Tensor:
        """Memory of the default stream's cache, where it can be reused by everybody once the ring is closed."""
        with torch.cuda.stream(self.default_stream()):
            return torch.empty(shape, dtype=dtype, device=self.device, memory_format=memory_format)

    def empty_pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Page-locked: only from there do copies run beside the host."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def page_lock(self, address: int, size: int) -> bool:
        """An error is taken back, or the next kernel's launch would report it."""
        with torch.cuda.device(self.device), capture_lock:
            is_locked = int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0  # type: ignore[no-untyped-call]
            if not is_locked:
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self.device)
        return is_locked

    def page_unlock(self, address: int) -> None:
        """Memory that a tensor still lies in becomes ordinary memory."""
        with torch.cuda.device(self.device), capture_lock:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """From the host only with equal dtype and layout, else torch would convert there and wait."""
        target.copy_(source, non_blocking=True)

    def follow(self, stream: torch.cuda.Stream) -> None:
        """A wait on the device, not on the host."""
        self.copy_stream.wait_stream(stream)

    def default_stream(self) -> torch.cuda.Stream:
        """The device's default stream."""
        return torch.cuda.default_stream(self.device)

    def finish(self) -> None:
        """Before memory is given back; not inside a graph capture, and not beside one of another thread."""
        with capture_lock:
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(self.device)  # host sync
