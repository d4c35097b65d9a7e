"""Captures functions as CUDA graphs, and finds the graph that belongs to a batch."""

from __future__ import annotations

import functools
import gc
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph as autograd_graph
from torch.nn.modules import _functions

from torch_sink.loop.core.batches import UsualShape, batch_constants, batch_tensors, map_tensors, tensors_among
from torch_sink.loop.core.history import Reasons
from torch_sink.loop.core.host_sync import caller, innermost_file
from torch_sink.loop.engines.memory import GraphMemory
from torch_sink.thread_waits import capture_lock, device_waits, host_sync_allowed

STAGED = "staged"
ODD_BATCHES = "batches of another shape or with other numbers than the usual ones ran uncaptured"
LEFT_BEHIND = (
    "graphs are captured again because work that ran uncaptured left tensors in their memory, such as a cache that a "
    "forward pass keeps"
)
Replay = Callable[[], Any]

# Kept alive: the allocators of torch 2.11 and 2.12 go on using a graph whose capture has failed.
_failed: list[torch.cuda.CUDAGraph] = []


@functools.cache
def _stream_of(index: int) -> torch.cuda.Stream:
    """The stream of captured training on a device, one for the life of the process.

    torch takes streams from a pool of 32, in turn, so a stream per loop could become an alias of the copy stream.
    """
    return torch.cuda.Stream(index)


@contextmanager
def _switched(name: str, enabled: bool) -> Iterator[None]:
    """A context that sets a switch of autograd, where this torch has it."""
    switch: Callable[[bool], None] | None = getattr(autograd_graph, f"set_{name}", None)
    if switch is None:
        yield
        return
    before = getattr(torch._C, f"_{name}")()
    switch(enabled)
    try:
        yield
    finally:
        switch(before)


class CudaCapture:
    """Captures and replays CUDA graphs on one stream, in one `memory` that other captures may share.

    All backward passes run on this stream from the first step on, because autograd remembers the stream on which a
    gradient was first accumulated.
    """

    def __init__(self, device: torch.device, memory: GraphMemory | None = None) -> None:
        self._stream = _stream_of(device.index if device.index is not None else torch.cuda.current_device())
        self.memory = memory if memory is not None else GraphMemory()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def stream(self) -> Iterator[None]:
        """A context for all work of a run, captured or not, which runs in order with the work before and after it.

        Gradients that autograd binds to another stream are captured too, without a warning, if this torch can do that.
        """
        quiet = _switched("warn_on_accumulate_grad_stream_mismatch", False)
        with quiet, _switched("override_stale_capture_stream", True):
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    @contextmanager
    def trial(self, problems: list[str]) -> Iterator[None]:
        """A context for an uncaptured step: adds the waits for the device that would make its capture fail."""

        def note() -> None:
            if innermost_file() == _functions.__file__:
                return  # SyncBatchNorm looks for ranks without samples, but not in a capture
            place, in_optimizer = caller()
            problems.append(f"the host waits for the device {'in the optimizer' if in_optimizer else f'at {place}'}")

        with device_waits(note):
            yield

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture the device work of `function` without executing it; returns a function that replays it.

        After an error of `function`, another capture may be tried.
        """
        graph, pool = torch.cuda.CUDAGraph(), self.memory.handle(self._stream.device.index)
        reason: BaseException | None = None
        try:
            # thread_local: the pin thread of a DataLoader may query events meanwhile, and cannot be stopped from here.
            with (
                capture_lock,
                _isolated(),
                torch.cuda.graph(  # host sync
                    graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                try:
                    function()
                except BaseException as error:
                    reason = error
                    raise
        except BaseException:
            self._recover(graph, pool)
            if reason is not None:
                raise reason from None  # torch's error only says that the capture failed
            raise
        self._graphs.append(graph)
        self.memory.graphs += 1
        self.memory.note()
        return graph.replay

    def reset(self) -> None:
        """Destroy every graph."""
        if self._graphs:
            self._stream.synchronize()  # host sync
        for graph in self._graphs:
            graph.reset()
        self.memory.graphs -= len(self._graphs)
        self._graphs.clear()

    def _recover(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a failed capture for the device's allocator and the random generator, and leave its pool.

        torch 2.11 and 2.12 do not end it (pytorch #180395), and nothing can end it for the allocator of page-locked
        memory. So no other capture may use that pool, and all of its graphs are destroyed. Later releases end it, and
        give the pool's memory back with the graph.
        """
        index = self._stream.device.index
        self.memory.give_up()
        try:
            torch._C._cuda_endAllocateToPool(index, pool)
        except RuntimeError:
            graph.reset()
            return
        torch._C._cuda_releasePool(index, pool)
        _failed.append(graph)
        scratch, complete = torch.zeros(1, device=self._stream.device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(complete, stream=self._stream, capture_error_mode="thread_local"):  # host sync
            scratch.zero_()


@contextmanager
def _isolated() -> Iterator[None]:
    """A context for a capture, without garbage collection and with new workspaces of cuBLAS.

    Collecting garbage could free memory of an earlier graph, and code outside could free workspaces that a graph uses.
    """
    collecting = gc.isenabled()
    gc.disable()
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        if collecting:
            gc.enable()


def overrides_stale_streams() -> bool:
    """Whether this torch can capture gradients that autograd binds to another stream; 2.12 cannot."""
    return hasattr(autograd_graph, "set_override_stale_capture_stream")


class CapturedGraphs:
    """The graphs of a function of a batch: one for each slot of a ring, and one for batches that lie elsewhere.

    The graph of a slot reads the batch there. A batch of the usual shape that lies in no slot is copied to a staging
    place, which has a graph too. Batches of other shapes run uncaptured, and so does the first one of the usual shape,
    during which libraries initialize and the compiler runs. When another shape becomes the usual one, the graphs of the
    shape before are destroyed. `pause()` stops the producer of the current loader.

    Attributes:
        tried: kinds of steps for which a trial has found what makes their capture fail, with the usual shape.
        was_odd: whether the latest batch that was looked at had another shape, or other numbers, than the usual ones.
    """

    def __init__(self, capture: CudaCapture, reasons: Reasons) -> None:
        self.cuda, self._reasons = capture, reasons
        capture.memory.join(self)
        self.tried: set[Any] = set()
        self.was_odd = False
        self._shape = UsualShape()
        self.pause: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._replays: dict[tuple[Any, Any], tuple[list[Tensor], Replay]] = {}
        self._staging: Any = None  # a batch that others are copied to
        self._staged: list[Tensor] = []  # its tensors
        self._ring: weakref.ref[Any] | None = None

    def __len__(self) -> int:
        return len(self._replays)

    def begin(self) -> None:
        """An epoch or an evaluation begins, whose batches may have another shape."""
        self._shape.unsettle()

    def knows(self, constants: Any) -> bool:
        """Whether a batch of these constants has run uncaptured, and is of the usual shape."""
        return self._shape.knows(constants)

    def accepts(self, constants: Any) -> bool:
        """Whether a batch has the usual shape; has to be called for every batch that is not replayed."""
        is_known = self._shape.knows(constants)
        self.was_odd = not self._shape.accepts(constants)
        if not self.was_odd and not is_known:  # it has just become the usual one
            self.forget()
            self.tried.clear()
        return not self.was_odd

    def attach(self, loader: Any) -> None:
        """Set the loader of the coming batches, whose slots graphs read in place."""
        self.pause = getattr(loader, "_paused", nullcontext)
        if self._replays and self._ring is not None and self._ring() is not loader:
            self.forget()  # these graphs read the slots of another ring
        self._ring = weakref.ref(loader)

    def find(self, batch: Any, leaves: list[Any], kind: Any = None) -> tuple[Any, Any, Replay | None] | None:
        """Finds the graph of a batch: its slot, the batch as it lies there, and the replay, None if not captured yet.

        Returns None for a batch that has to run uncaptured.
        """
        slot = getattr(self._ring() if self._ring is not None else None, "slot_index", None)
        known, tensors = self._replays.get((slot, kind)), tensors_among(leaves)
        if known is not None and len(tensors) == len(leaves) and same_places(tensors, known[0]):
            self._shape.settle()
            return slot, batch, known[1]  # only tensors, all where the graph reads them
        constants = batch_constants(leaves)
        is_known = self.knows(constants)
        if not self.accepts(constants):
            self._reasons.count(ODD_BATCHES)
            return None
        if not is_known:
            return None
        if slot is None or (known is not None and not same_places(tensors, known[0])):
            if self._staging is None:
                self._staging = map_tensors(Tensor.clone, batch)
                self._staged = batch_tensors(self._staging)
            for target, source in zip(self._staged, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            slot, batch, known = STAGED, self._staging, self._replays.get((STAGED, kind))
        return slot, batch, known[1] if known is not None else None

    def whole_ring(self, slot: Any, batch: Any) -> dict[Any, Any]:
        """The batch by its slot, with those of all other slots, whose graphs are captured in one go."""
        others = getattr(self._ring() if self._ring is not None else None, "_static_batches", None)
        return {slot: batch} if slot == STAGED or others is None else {**others(batch), slot: batch}

    def capture(self, function: Callable[[Any], Any], batches: dict[Any, Any]) -> dict[Any, Replay]:
        """Capture a function for each slot's batch; `find` knows the graphs once they are given to `keep`."""
        with host_sync_allowed(), self.pause():
            return {slot: self.cuda.capture(partial(function, batch)) for slot, batch in batches.items()}

    def keep(self, replays: dict[Any, Replay], batches: dict[Any, Any], kind: Any = None) -> None:
        """Make `find` return these replays."""
        self._replays.update({(slot, kind): (batch_tensors(batches[slot]), replays[slot]) for slot in replays})

    def forget(self) -> None:
        """Destroy all graphs."""
        self._replays.clear()
        self._staging, self._staged = None, []
        self.cuda.reset()


def same_places(tensors: list[Tensor], captured: list[Tensor]) -> bool:
    """Whether tensors lie where those that a graph reads do; batches of a slot are mostly the same objects."""
    if len(tensors) != len(captured):
        return False
    return all(map(operator.is_, tensors, captured)) or _addresses(tensors) == _addresses(captured)


def _addresses(tensors: list[Tensor]) -> list[Any]:
    return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]
