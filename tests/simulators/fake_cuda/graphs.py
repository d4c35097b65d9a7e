"""Capture and replay: what a capture forbids, what an error inside it leaves behind, what a graph holds."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .device import FakeCuda
    from .memory import Block
    from .streams import FakeEvent, FakeStream


TAKEN = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters.keys()  # by this release


class Capture:
    """One capture under way.

    Attributes:
        graph: that is recorded.
        streams: that take part: the first, and those that wait for what was recorded.
        thread: that began it.
        error: the first thing that was not allowed; everything after it fails.
    """

    def __init__(self, graph: FakeGraph, stream: FakeStream, pool: Any) -> None:
        self.graph, self.streams, self.pool = graph, [stream], pool
        self.joined: set[FakeStream] = set()
        self.thread = threading.get_ident()
        self.error: str | None = None

    def add(self, run: Callable[[], None], name: str) -> None:
        """Record a piece of work."""
        if self.error is not None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.graph.nodes.append((name, run))

    def fail(self, error: str) -> None:
        """Not allowed: the capture is lost, and the caller learns it."""
        self.error = self.error or error
        raise RuntimeError(f"CUDA error: {error}")


class Captures:
    """The captures under way; torch allows one in a process."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.current: Capture | None = None

    def of(self, stream: FakeStream) -> Capture | None:
        """The capture in which a stream takes part."""
        capture = self.current
        return capture if capture is not None and stream in capture.streams else None

    def here(self) -> Capture | None:
        """The capture of the calling thread, or of the one for which it runs a backward pass."""
        capture, engine = self.current, self._cuda.engine
        thread = engine.caller if engine.is_current else threading.get_ident()
        return capture if capture is not None and capture.thread == thread else None

    def forbid(self, what: str, capture: Capture | None) -> None:
        """Fail if there is a capture."""
        if capture is not None:
            capture.fail(f"operation not permitted when stream is capturing ({what})")

    def of_stranger(self, stream: FakeStream) -> Capture | None:
        """Work of the capturing thread on a stream that takes no part uses what is only recorded, not there.

        The engine of autograd takes it into the capture, if it was told so.
        """
        capture = self.here()
        if capture is not None and not self._cuda.overrides_stale_streams:
            capture.fail(f"dependency created on uncaptured work in another stream ({stream})")
        return capture

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        """`stream` waits for `event`: it joins the capture, or the capture is lost."""
        capture = self.of(stream)
        if isinstance(event.mark, Capture):
            if event.mark is not self.current:
                raise RuntimeError("CUDA error: the event was recorded in a capture that has ended")
            if capture is None:
                event.mark.streams.append(stream)
            else:
                capture.joined.add(event.recorded_on)
        elif capture is not None and not event.mark.is_done:
            capture.fail("dependency created on uncaptured work in another stream")


class FakeGraph:
    """`torch.cuda.CUDAGraph`."""

    cuda: FakeCuda

    def __init__(self, keep_graph: bool = False) -> None:
        self.cuda = type(self).cuda  # also when the device is gone
        self.nodes: list[tuple[str, Callable[[], None]]] = []
        self.blocks: list[Block] = []
        self.draws = 0
        self.replays = 0
        self._capture: Capture | None = None
        self._pool: Any = None
        self._ended = self._holds_pool = False
        self._latest_block = 0
        self._draw_offset = [0]  # of the replay under way, where the recorded kernels find it
        self._index = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **options: Any) -> None:
        """Begin to record what is issued to the current stream."""
        if not options.keys() <= TAKEN:
            raise TypeError(f"capture_begin() of torch {torch.__version__} takes {', '.join(TAKEN)}")
        cuda = self.cuda
        stream = cuda.current_stream()
        if stream == cuda.default_stream():
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if cuda.captures.current is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing (a second capture)")
        if capture_error_mode != "thread_local":
            raise AssertionError("a DataLoader's pin thread asks for events, which another mode does not survive")
        cuda.graphs_begun += 1
        self._pool = pool if pool is not None else cuda.new_pool_handle()
        self._index = stream.device.index
        if cuda.leaves_generators:
            self._generator.is_capturing = True
        cuda.allocator.begin_allocate_to_pool(self._pool)
        cuda.host_allocator.begin_allocate_to_pool(self._pool)
        self._capture = cuda.captures.current = Capture(self, stream, self._pool)

    def capture_end(self) -> None:
        """End the recording.

        Raises:
            RuntimeError: something inside was not allowed. In torch 2.11 and 2.12 the allocators then go on as if the
                capture were under way, in 2.11 the generator too; later ones give the pool back with the graph.
        """
        cuda, capture = self.cuda, self._capture
        if capture is None:
            raise RuntimeError("capture_end() called before capture_begin().")
        if cuda.current_stream() != capture.streams[0]:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self._capture = cuda.captures.current = None
        error = capture.error
        if any(stream not in capture.joined for stream in capture.streams[1:]):
            error = error or "unjoined work in a captured stream"
        if error is not None:
            if not cuda.leaks_failed_captures:
                self._end_allocations()
                self._holds_pool = True
            raise RuntimeError(f"CUDA error: operation failed due to a previous error during capture: {error}")
        self._end_allocations()
        self._generator.is_capturing = False
        self._ended = self._holds_pool = True
        self._latest_block = max((block.number for block in self.blocks), default=0)

    def _end_allocations(self) -> None:
        self.cuda.allocator.end_allocate_to_pool(self._pool)
        self.cuda.host_allocator.end_allocate_to_pool(self._pool)

    def capture_end_pre(self) -> None:
        """What torch 2.15 calls when `__enter__` fails."""
        self.capture_end()

    def draw(self) -> tuple[list[int], int]:
        """A recorded kernel's offset: the place of the replay's first one, and what is added to it."""
        self.draws += 4
        return self._draw_offset, self.draws - 4

    def replay(self) -> None:
        """Queue all that was recorded."""
        if not self._ended:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        cuda = self.cuda
        self.replays += 1
        first = self._generator.advance(self.draws)
        stream = cuda.current_stream(torch.device("cuda", self._index))
        nodes, offset = tuple(self.nodes), self._draw_offset
        freed = [block for block in self.blocks if block.is_freed]
        pool, latest = cuda.allocator.pool(self._pool), self._latest_block

        def run() -> None:
            offset[0] = first
            for block in freed:
                block.spoil()  # other graphs and captures use the same pool
            pool.spoil_later_than(latest)
            for _, node in nodes:
                node()

        stream.issue(run, "replay")

    def reset(self) -> None:
        """Destroy the graph; its memory goes back to the pool's owner."""
        if self._holds_pool:
            self.cuda.allocator.release_pool(self._pool)
        self._ended = self._holds_pool = False
        self.nodes, self.blocks = [], []

    def pool(self) -> Any:
        """The pool's handle."""
        return self._pool

    def __del__(self) -> None:
        if self._holds_pool:
            self.reset()

    @property
    def _generator(self) -> Any:
        return self.cuda.generators[self._index]
