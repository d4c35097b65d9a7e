"""Turning a function into a CUDA graph; all that is specific to the device lies here."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

_streams: dict[int, torch.cuda.Stream] = {}
_streams_lock = threading.Lock()


def capture_stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream of captured training on a device, one for the life of the process.

    torch hands streams out round robin from a pool of 32, so that a stream per loop could end up as an alias of the
    stream on which batches are copied.
    """
    with _streams_lock:
        index = device.index if device.index is not None else torch.cuda.current_device()
        if index not in _streams:
            _streams[index] = torch.cuda.Stream(index)
        return _streams[index]


class Capture(Protocol):
    """Records functions whose device work can be replayed."""

    def stream(self) -> AbstractContextManager[Any]:
        """Context in which all work of a run is queued, captured or not."""
        ...

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record the device work of `function` without executing it; the result replays it."""
        ...

    def reset(self) -> None:
        """Destroy every recording."""
        ...


class CudaCapture:
    """CUDA graphs in one memory pool, recorded and replayed on one stream.

    Sharing the pool is sound because replays follow one another on the stream and no recording leaves a live tensor
    in it. All backward passes run on this stream from the first step on, because autograd remembers the stream on
    which a gradient was first accumulated.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = capture_stream_of(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def stream(self) -> AbstractContextManager[Any]:
        return _OnStream(self._stream)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: the pin thread of some DataLoader may query events meanwhile, and cannot be parked from here.
        # Collecting garbage inside a capture could free memory of an earlier one.
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(  # host sync
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                function()
        finally:
            if collecting:
                gc.enable()
        self._graphs.append(graph)
        return graph.replay

    def reset(self) -> None:
        if self._graphs:
            self._stream.synchronize()  # host sync
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


class _OnStream:
    """Makes a stream current, ordered after the work before it and before the work after it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._context = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._context.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._context.__exit__(*exc_info)
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
