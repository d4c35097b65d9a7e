"""Turning a function into a CUDA graph; all that is specific to the device lies here."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph as autograd_graph

from torch_sink.loop.core.host_sync import caller
from torch_sink.thread_waits import capture_lock, device_waits

# Memory allocators of torch 2.11 go on asking a graph whose capture has failed.
_failed: list[torch.cuda.CUDAGraph] = []


@functools.cache
def _stream_of(index: int) -> torch.cuda.Stream:
    """The stream of captured training on a device, one for the life of the process.

    torch hands streams out round robin from a pool of 32, so that a stream per loop could end up as an alias of the
    stream on which batches are copied.
    """
    return torch.cuda.Stream(index)


class CudaCapture:
    """CUDA graphs in one memory pool, recorded and replayed on one stream.

    Sharing the pool is sound because replays follow one another on the stream and no recording leaves a live tensor
    in it. All backward passes run on this stream from the first step on, because autograd remembers the stream on
    which a gradient was first accumulated.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream_of(device.index if device.index is not None else torch.cuda.current_device())
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Context in which all work of a run is queued, captured or not, in order with the work around it.

        torch's warning about gradients that it keeps on another stream is not for the user: captures override them.
        """
        warned = torch._C._warn_on_accumulate_grad_stream_mismatch()  # type: ignore[attr-defined]
        autograd_graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            autograd_graph.set_warn_on_accumulate_grad_stream_mismatch(warned)

    @contextmanager
    def trial(self, problems: list[str]) -> Iterator[None]:
        """Context of an uncaptured step: adds to `problems` what would make its capture fail."""

        def note() -> None:
            place, inside_optimizer = caller()
            problems.append(
                f"the host waits for the device at {place}"
                if not inside_optimizer
                else "the optimizer waits for the device"
            )

        with device_waits(note):
            yield

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record the device work of `function` without executing it; the result replays it.

        After what it raises, another capture may be tried.
        """
        graph = torch.cuda.CUDAGraph()
        reason: BaseException | None = None
        try:
            # thread_local: the pin thread of some DataLoader may query events meanwhile, and cannot be parked from
            # here.
            with (
                capture_lock,
                _no_collection(),
                _stale_streams_overridden(),
                torch.cuda.graph(  # host sync
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                try:
                    function()
                except BaseException as error:
                    reason = error
                    raise
        except BaseException:
            self._recover(graph)
            if reason is not None:
                raise reason from None  # torch's own error only says that there was one
            raise
        self._graphs.append(graph)
        return graph.replay

    def reset(self) -> None:
        """Destroy every recording."""
        if self._graphs:
            self._stream.synchronize()  # host sync
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        # torch asserts that no graph is captured into a pool which all graphs have left, while a tensor lies in it.
        self._pool = torch.cuda.graph_pool_handle()

    def _recover(self, graph: torch.cuda.CUDAGraph) -> None:
        """After a failed capture: torch 2.11 leaves the allocator and the random generator in it (pytorch #180395)."""
        index, pool = self._stream.device.index, self._pool
        self._pool = torch.cuda.graph_pool_handle()
        try:
            torch._C._cuda_endAllocateToPool(index, pool)
        except RuntimeError:
            return  # it was ended
        torch._C._cuda_releasePool(index, pool)
        _failed.append(graph)
        scratch, complete = torch.zeros(1, device=self._stream.device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(complete, stream=self._stream, capture_error_mode="thread_local"):  # host sync
            scratch.zero_()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collecting garbage inside a capture could free memory of an earlier one."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def overrides_stale_streams() -> bool:
    """Whether this torch can capture gradients that autograd binds to another stream; 2.11 cannot."""
    return hasattr(autograd_graph, "set_override_stale_capture_stream")


@contextmanager
def _stale_streams_overridden() -> Iterator[None]:
    """Let autograd stay in the capture where it remembers another stream, as that of a loss from before the run."""
    if not overrides_stale_streams():
        yield
        return
    set_override: Any = autograd_graph.set_override_stale_capture_stream
    before = getattr(torch._C, "_override_stale_capture_stream", lambda: False)()
    set_override(True)
    try:
        yield
    finally:
        set_override(before)
