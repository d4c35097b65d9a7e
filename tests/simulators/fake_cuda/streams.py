"""Streams and events: queues of work that runs when somebody waits, in any order that the events allow."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .device import FakeCuda
    from .graphs import Capture

CUDA = 1  # number of the device type in torch.Stream


class Work:
    """One piece of work in a stream; it may run once what it waits for is done."""

    def __init__(self, run: Callable[[], None] | None = None, needs: Work | None = None, name: str = "mark") -> None:
        self.run, self.needs, self.name, self.is_done = run, needs, name, False

    @property
    def is_ready(self) -> bool:
        return self.needs is None or self.needs.is_done


class Queues:
    """The work of all streams, and which piece runs next.

    Attributes:
        lock: held while work is queued or run.
    """

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self._rng = random.Random(seed)
        self._streams: dict[tuple[int, int], deque[Work]] = {}

    def of(self, stream: FakeStream) -> deque[Work]:
        """The queue of a stream."""
        return self._streams.setdefault(stream.key, deque())

    def order(self, first: FakeStream, then: FakeStream) -> None:
        """Later work of one stream waits for the other's work so far, whether they capture or not."""
        mark = Work()
        self.of(first).append(mark)
        self.of(then).append(Work(needs=mark, name="wait"))

    def run_some(self) -> bool:
        """Run one piece of work of a random stream; False if none can run."""
        with self.lock:
            ready = [queue for queue in self._streams.values() if queue and queue[0].is_ready]
            if ready:
                work = self._rng.choice(ready).popleft()
                if work.run is not None:
                    work.run()
                work.is_done, work.run, work.needs = True, None, None
            return bool(ready)

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Run work until something is done; other streams may fall behind or run ahead."""
        while not is_done():
            # Another thread may have run it meanwhile.
            if not self.run_some() and not is_done():
                raise AssertionError("deadlock: the host waits for work that nothing can finish")

    def drain(self) -> None:
        """Run all work."""
        while self.run_some():
            pass

    def is_idle(self, device: int) -> bool:
        """Whether nothing is queued on any stream of a device."""
        return not any(queue for (index, _), queue in list(self._streams.items()) if index == device)


class FakeStream:
    """`torch.cuda.Stream`. Which one is current is torch's own thread-local state, so that autograd sees it too."""

    _ids = itertools.count(1)
    cuda: FakeCuda  # set while the device is installed

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None) -> None:
        index = self.cuda.index_of(device)
        self.device = torch.device("cuda", index)
        self.priority = priority
        self.stream_id = next(self._ids) if stream_id is None else stream_id
        self.cuda_stream = self.stream_id
        self.key = index, self.stream_id
        self.handle = torch.Stream(stream_id=self.stream_id, device_index=index, device_type=CUDA)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"FakeStream(device={self.device}, stream_id={self.stream_id})"

    @property
    def capture(self) -> Capture | None:
        """The capture that the stream takes part in."""
        return self.cuda.captures.of(self)

    def issue(self, run: Callable[[], None], name: str) -> None:
        """Queue work, or record it if the stream captures."""
        with self.cuda.queues.lock:
            capture = self.capture or self.cuda.captures.of_stranger(self)
            if capture is not None:
                capture.add(run, name)
            else:
                self.cuda.queues.of(self).append(Work(run, name=name))

    def wait_event(self, event: FakeEvent) -> None:
        """Later work of this stream waits for the event."""
        if event.mark is None:
            return
        with self.cuda.queues.lock:
            self.cuda.captures.wait(self, event)
            if not isinstance(event.mark, Work) or self.capture is not None:
                return
            self.cuda.queues.of(self).append(Work(needs=event.mark, name="wait"))

    def wait_stream(self, stream: FakeStream) -> None:
        """Later work of this stream waits for what the other holds by now."""
        self.wait_event(stream.record_event())

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Mark what was issued so far."""
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for the stream."""
        self.cuda.host_waits("stream.synchronize", stream=self)
        queue = self.cuda.queues.of(self)
        self.cuda.queues.wait_for(lambda: not queue)

    def query(self) -> bool:
        """Whether all work is done."""
        self.cuda.captures.forbid("cudaStreamQuery", self.capture)
        return not self.cuda.queues.of(self)


class FakeEvent:
    """`torch.cuda.Event`: refers to the mark that was recorded last."""

    cuda: FakeCuda

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        if interprocess or external:
            raise AssertionError("an event for another process, or one that a graph records, has no fake")
        self.mark: Work | Capture | None = None
        self.recorded_on: FakeStream | None = None
        self.enable_timing, self.seconds = enable_timing, 0.0
        self.blocking = blocking  # who waits sleeps

    def record(self, stream: FakeStream | None = None) -> None:
        """Mark what was issued to a stream so far; without one, to the current stream of the current device."""
        stream = self.cuda.current_stream() if stream is None else self.cuda.stream_of(stream)
        if self.recorded_on is not None and self.recorded_on.device != stream.device:
            raise RuntimeError(f"Event device {self.recorded_on.device} does not match stream's {stream.device}")
        with self.cuda.queues.lock:
            self.mark, self.recorded_on = stream.capture, stream
            if self.mark is None:
                self.mark = Work(self._note_time if self.enable_timing else None)
                self.cuda.queues.of(stream).append(self.mark)

    def _note_time(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end_event: FakeEvent) -> float:
        """Milliseconds between the moments at which the streams came to both events."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.recorded_on is None or end_event.recorded_on is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if self.recorded_on.device != end_event.recorded_on.device:
            raise RuntimeError("CUDA error: invalid resource handle (cudaEventElapsedTime of two devices)")
        if not (self.query() and end_event.query()):
            raise RuntimeError("CUDA error: device not ready")
        return (end_event.seconds - self.seconds) * 1e3

    def wait(self, stream: FakeStream | None = None) -> None:
        """The stream waits for the event."""
        (stream or self.cuda.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for the event."""
        mark = self.mark
        if isinstance(mark, Work):
            self.cuda.host_waits("event.synchronize", sleeps=self.blocking)
            self.cuda.queues.wait_for(lambda: mark.is_done)
        elif mark is not None:
            self.cuda.captures.forbid("cudaEventSynchronize", mark)

    def query(self) -> bool:
        """Whether the marked work is done."""
        if self.mark is not None and not isinstance(self.mark, Work):
            self.cuda.captures.forbid("cudaEventQuery", self.mark)
        return self.mark is None or self.mark.is_done


class FakeAcceleratorEvent(FakeEvent):
    """`torch.Event`, which is told its device first, and takes torch's own streams; who waits for it spins."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **_: Any) -> None:
        super().__init__(enable_timing)


class OnDevice:
    """`torch.cuda.device`. A class, as there: torch asks whether what it was given is one."""

    cuda: FakeCuda  # set where it takes the place of torch's

    def __init__(self, device: Any) -> None:
        self.idx = self.cuda.index_of(device)

    def __enter__(self) -> None:
        self._before = self.cuda.index_of()
        torch._C._accelerator_setDeviceIndex(self.idx)

    def __exit__(self, *exc_info: object) -> None:
        torch._C._accelerator_setDeviceIndex(self._before)


class OnStream:
    """`torch.cuda.stream`. A class, as there: what is never left, as torch 2.11 leaves a failed capture, stays."""

    def __init__(self, cuda: FakeCuda, stream: FakeStream | None) -> None:
        self._cuda, self._stream = cuda, stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = self._cuda.index_of(), self._cuda.current_stream(self._stream.device)
            self._cuda.set_stream(self._stream)

    def __exit__(self, *exc_info: object) -> None:
        if self._stream is not None:
            device, stream = self._before
            self._cuda.set_stream(stream)
            torch._C._accelerator_setDeviceIndex(device)
