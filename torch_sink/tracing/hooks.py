"""What a timeline looks at: functions of torch and torch_sink, wrapped while it records and put back afterwards.

So a run without a timeline costs nothing: its functions are the very same objects.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch, worker

from torch_sink.tracing.spans import Recorder, Span, host_lane


class DeviceClock:
    """When the device did what was launched: on CUDA, an event before and one after each launch, 2 us of the host each.

    Nothing waits until `collect`. On other devices it does nothing.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []
        self.is_on = torch.cuda.is_available()
        if self.is_on:
            torch.cuda.synchronize()
            self.training_stream = torch.cuda.current_stream()
            self.origin = self._event(self.training_stream)
            self.origin.synchronize()
            self.origin_nanoseconds = time.perf_counter_ns()

    def _event(self, stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def begin(self, lane: str, name: str) -> tuple[str, str, Any, Any] | None:
        """Before something is launched on the current stream; the lane "stream" is found by that."""
        if not self.is_on or torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream()
        if lane == "stream":
            lane = "device" if stream == self.training_stream else "copy stream"
        return lane, name, stream, self._event(stream)

    def end(self, begun: tuple[str, str, Any, Any] | None) -> None:
        """After it was launched."""
        if begun is not None and not torch.cuda.is_current_stream_capturing():
            self.pairs.append((begun, self._event(begun[2])))

    def collect(self, recorder: Recorder) -> None:
        """Waits for the device, and adds what it did to the recorder."""
        if not self.is_on:
            return
        torch.cuda.synchronize()
        for (lane, name, _, begin), end in self.pairs:
            first, last = (round(self.origin.elapsed_time(event) * 1e6) for event in (begin, end))
            recorder.add(lane, name, self.origin_nanoseconds + first, self.origin_nanoseconds + last)


class Hook(NamedTuple):
    """A function to look at; modules that nobody has imported are left alone."""

    module: str
    path: str  # class and name
    name: str  # of its spans
    # Of what it launches on the stream that is current when it is called: "device", "copy stream", or "stream" for the
    # copy stream unless it is the one that trains; "" for what launches nothing.
    lane: str = ""
    is_part: bool = False  # left out inside of another hook
    waits: bool = False  # the host waits for the device in it, where the tensor that it is called on lies on one


HOOKS = (
    Hook("torch.utils.data.dataloader", "_BaseDataLoaderIter.__next__", "receive a batch", is_part=True),
    Hook("torch_sink.sink.queue.thread", "ThreadProducer.take", "wait for a batch"),
    Hook("torch_sink.sink.queue.ring", "DeviceRing._copy_ordinary", "copy a batch", "copy stream"),
    Hook("torch_sink.sink.queue.slots", "Slots.fill", "take a batch"),
    Hook("torch_sink.image.execute.batch", "LazyBatch.__torch_sink_execute__", "decode and transform", "stream"),
    Hook("torch_sink.loop.run", "TrainingRun._step", "step", "device"),
    Hook("torch_sink.loop.run", "TrainingRun._finish_sink", "end of the sink", waits=True),
    Hook("torch", "Tensor.backward", "backward", "device", is_part=True),
    Hook("torch.cuda", "synchronize", "synchronize", waits=True),
    *(
        Hook("torch", f"Tensor.{name}", name.strip("_"), waits=True)
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
    ),
)
_MISSING = object()


class Hooks(ExitStack):
    """Wraps the functions when entered, and puts them back when left."""

    def __init__(self, recorder: Recorder, clock: DeviceClock) -> None:
        super().__init__()
        self.recorder, self.clock = recorder, clock
        self.inside = threading.local()

    def __enter__(self) -> Hooks:
        super().__enter__()
        for hook in HOOKS:
            owner, _, attribute = f".{hook.path}".rpartition(".")
            if hook.module in sys.modules:
                holder = functools.reduce(getattr, filter(None, owner.split(".")), sys.modules[hook.module])
                self._replace(holder, attribute, self._wrapped(getattr(holder, attribute), hook))
        self.callback(register_optimizer_step_pre_hook(self._pre_update).remove)
        self.callback(register_optimizer_step_post_hook(self._post_update).remove)
        stock = worker._worker_loop
        self._replace(worker, "_worker_loop", WorkerLoop(stock, self.recorder.folder))
        return self

    def _replace(self, holder: Any, attribute: str, value: Any) -> None:
        own = vars(holder).get(attribute, _MISSING)
        setattr(holder, attribute, value)
        self.callback(delattr, holder, attribute) if own is _MISSING else self.callback(setattr, holder, attribute, own)

    def _wrapped(self, function: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        add, clock, inside = self.recorder.add, self.clock, self.inside

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            is_seen = _waits_for_device(args) if hook.waits else not hook.is_part or getattr(inside, "spans", 0) == 0
            if not is_seen:
                return function(*args, **kwargs)
            inside.spans = getattr(inside, "spans", 0) + 1
            mark = clock.begin(hook.lane, hook.name) if hook.lane else None
            begin = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                inside.spans -= 1
                add(host_lane(), hook.name, begin, time.perf_counter_ns(), hook.waits)
                clock.end(mark)

        traced.untraced = function  # type: ignore[attr-defined]
        return traced

    def _pre_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        is_seen = not getattr(self.inside, "spans", 0)
        self._update = (time.perf_counter_ns(), self.clock.begin("device", "optimizer")) if is_seen else None

    def _post_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._update is not None:
            begin, mark = self._update
            self.recorder.add(host_lane(), "optimizer", begin, time.perf_counter_ns())
            self.clock.end(mark)


def untraced(function: Any) -> Any:
    """What a timeline has wrapped; any other function as it is. Torch hands modes the function that is in place."""
    return getattr(function, "untraced", function)


def _waits_for_device(args: tuple[Any, ...]) -> bool:
    """Whether a call has to wait: not on a tensor that lies on the CPU, nor inside of what is compiled."""
    on_host = bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type in ("cpu", "meta")
    return not on_host and not torch.compiler.is_compiling()


class WorkerLoop:
    """Stands in for the function that a data worker runs; can be pickled, for workers that are spawned."""

    def __init__(self, stock: Callable[..., Any] | None, folder: str) -> None:
        self.stock = stock or worker._worker_loop
        self.folder = folder

    def __reduce__(self) -> Any:
        # torch's own goes by its name, which here leads to this stand-in: a spawned worker looks it up itself.
        is_torchs = getattr(self.stock, "__module__", "") == worker.__name__
        return WorkerLoop, (None if is_torchs else self.stock, self.folder)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = Recorder(self.folder)
        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            kind.fetch = _fetching(kind.fetch, recorder)  # type: ignore[method-assign]
        return self.stock(*args, **kwargs)


def _fetching(stock: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(stock)
    def traced(fetcher: Any, indices: Any) -> Any:
        begin = time.perf_counter_ns()
        try:
            return stock(fetcher, indices)
        finally:
            info = get_worker_info()
            lane = f"worker {info.id if info is not None else 0}"
            recorder.leave(Span(lane, "make a batch", begin, time.perf_counter_ns()))

    return traced
