"""A device in slow motion: streams whose work runs when a scheduler says so, in any order that the events allow."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator

import torch


class Work:
    """One piece of work in a stream."""

    def __init__(self, run: Callable[[], None] = lambda: None, needs: Work | None = None) -> None:
        self.run, self.needs, self.is_done = run, needs, False

    @property
    def is_ready(self) -> bool:
        return self.needs is None or self.needs.is_done


class SimulatedStream:
    """Work in order; the head may run once what it waits for is done."""

    def __init__(self) -> None:
        self.work: deque[Work] = deque()

    def issue(self, run: Callable[[], None]) -> None:
        self.work.append(Work(run))

    def wait_event(self, event: SimulatedEvent) -> None:
        self.work.append(Work(needs=event.mark))

    def can_run(self) -> bool:
        return bool(self.work) and self.work[0].is_ready

    def run_one(self) -> None:
        work = self.work.popleft()
        work.run()
        work.is_done = True


class SimulatedEvent:
    """Refers to the mark that was recorded last, like a CUDA event."""

    def __init__(self, ops: SimulatedOps) -> None:
        self.ops = ops
        self.mark: Work | None = None

    def record(self, stream: SimulatedStream) -> None:
        self.mark = Work()
        stream.work.append(self.mark)

    def synchronize(self) -> None:
        while self.mark is not None and not self.mark.is_done:
            assert self.ops.run_some_work(), "deadlock: the host waits for work that nothing can finish"


class SimulatedOps:
    """`DeviceOps` whose copies read their source and write their target in two halves, when they run."""

    def __init__(self, rng: random.Random) -> None:
        self.device = torch.device("cpu")
        self.rng = rng
        self.copy_stream = SimulatedStream()
        self.compute_stream = SimulatedStream()

    def current_stream(self) -> SimulatedStream:
        return self.compute_stream

    def new_event(self, *, host_waits: bool) -> SimulatedEvent:
        return SimulatedEvent(self)

    @contextlib.contextmanager
    def on_copy_stream(self) -> Iterator[None]:
        yield

    def empty(self, shape: torch.Size, dtype: torch.dtype, memory_format: torch.memory_format) -> torch.Tensor:
        return torch.full(shape, -1, dtype=dtype).to(memory_format=memory_format)

    def empty_pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, -2, dtype=dtype)

    def page_lock(self, address: int, size: int) -> bool:
        return True

    def page_unlock(self, address: int) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        half = len(target) // 2
        self.copy_stream.issue(lambda: target[:half].copy_(source[:half]))
        self.copy_stream.issue(lambda: target[half:].copy_(source[half:]))

    def follow(self, stream: SimulatedStream) -> None:
        mark = Work()
        stream.work.append(mark)
        self.copy_stream.work.append(Work(needs=mark))

    def default_stream(self) -> SimulatedStream:
        return self.compute_stream

    def finish(self) -> None:
        while self.run_some_work():
            pass

    def run_some_work(self) -> bool:
        """Runs one piece of work of a random stream; False if none can run."""
        ready = [stream for stream in (self.copy_stream, self.compute_stream) if stream.can_run()]
        if ready:
            self.rng.choice(ready).run_one()
        return bool(ready)


class ImmediateOps(SimulatedOps):
    """The same device without any delay, for tests of what ends up where."""

    def __init__(self) -> None:
        super().__init__(random.Random(0))
        self.copy_stream = self.compute_stream = NoStream()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def new_event(self, *, host_waits: bool) -> SimulatedEvent:
        return NoEvent(self)

    def follow(self, stream: SimulatedStream) -> None:
        pass


class NoStream(SimulatedStream):
    """Work is done when it is issued."""

    def issue(self, run: Callable[[], None]) -> None:
        run()

    def wait_event(self, event: SimulatedEvent) -> None:
        assert event.mark is DONE, "a wait for an event that was never recorded"


class NoEvent(SimulatedEvent):
    """Nothing is ever in flight."""

    def record(self, stream: SimulatedStream) -> None:
        self.mark = DONE


DONE = Work()
DONE.is_done = True
