"""Timelines: what workers, producer, copies, device and host did when, as a page, a picture and a trace.

Functions of torch and torch_sink are wrapped while a timeline records, and put back afterwards. So a run without one
costs nothing: its functions are the very same objects.
"""

from __future__ import annotations

import functools
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from torch_sink.common.patches import WORKER_LOOPS, Patches, WorkerLoop
from torch_sink.tracing.outputs import write_page, write_picture, write_trace
from torch_sink.tracing.spans import Recorder, Span, host_lane

__all__ = ["timeline"]

_log = logging.getLogger("torch_sink")

SUFFIXES = (".html", ".png", ".json")

_active: list[Recorder] = []


@contextmanager
def timeline(path: str | Path) -> Iterator[None]:
    """Records what data workers, producer, copy stream, device and host do inside, and when the host syncs.

    Works around any PyTorch code, with or without torch_sink. Three files are written at the end, side by side: an HTML
    page to zoom and search in, which needs no network; a PNG; and a JSON trace for https://ui.perfetto.dev. Page and
    PNG begin with a verdict: whether loader, copy or step limits, and how much of its time the loop waited for data.

    Lanes of the device are there on CUDA only: on the CPU, what computes is the host. Data workers that already run
    when it begins are not seen.

    While nothing records, this costs nothing: no function is changed. Recording costs about 2 microseconds for each
    span, and 4 more for each that is timed on a CUDA device.

    Args:
        path: of the page, "run.html"; the others are "run.png" and "run.json". Folders that are missing are made.

    Raises:
        TypeError: not a path.
        ValueError: the path names no file.
        OSError: a file cannot be written there; found before anything runs.
        RuntimeError: another timeline records in this process.

    Examples:
        >>> import tempfile, torch, torch_sink
        >>> folder = tempfile.TemporaryDirectory()
        >>> data = [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))] * 10
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loop = torch_sink.StepLoop(model, torch.nn.functional.cross_entropy, optimizer)
        >>> with torch_sink.timeline(f"{folder.name}/run.html"):
        ...     history = loop.run(data)
        >>> folder.cleanup()
    """
    if _active:
        raise RuntimeError("a timeline records already; leave its block before another one begins")
    page = _page_at(path)
    with tempfile.TemporaryDirectory(prefix="torch_sink_timeline_", ignore_cleanup_errors=True) as folder:
        clock, recorder = DeviceClock(), Recorder(folder)
        _active.append(recorder)
        try:
            with Hooks(recorder, clock):
                yield
        finally:
            _active.remove(recorder)
            ended = time.perf_counter_ns()
            try:
                clock.collect(recorder)
            except RuntimeError as error:  # a device that has failed: what the host did says where
                _log.warning("the timeline lacks what the device did: %s", error)
            try:
                spans = recorder.collected()
                write_page(page, spans, recorder.began, ended)
                write_picture(page.with_suffix(".png"), spans, recorder.began, ended)
                write_trace(page.with_suffix(".json"), spans, recorder.began)
            except OSError:  # such as a full disk: no reason to lose what ran, or to hide its own error
                _log.exception("the timeline %s is not complete", page)


def _page_at(path: str | Path) -> Path:
    """Where the page goes, where all three files can be written: a run of days shall not fail at its end."""
    if not isinstance(path, (str, Path)):
        raise TypeError(f'timeline={path!r}; give the path of a page, such as "run.html"')
    path = Path(path)
    if not path.name:
        raise ValueError(f'timeline={str(path)!r} names no file; give the path of a page, such as "run.html"')
    if path.is_dir():
        raise IsADirectoryError(f"timeline={str(path)!r} is a folder; give the path of a page, such as {path}/run.html")
    # Only a suffix of ours is replaced: "epoch.5" is not "epoch".
    page = path.with_suffix(".html") if path.suffix in SUFFIXES else path.with_name(f"{path.name}.html")
    page = page.absolute()  # whatever changes the working folder meanwhile
    page.parent.mkdir(parents=True, exist_ok=True)
    for suffix in SUFFIXES:
        page.with_suffix(suffix).open("ab").close()
    return page


class DeviceClock:
    """When devices did what was launched: on CUDA, an event before and one after each launch, 2 us of the host each.

    Nothing waits until `collect`. Elsewhere it does nothing.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []
        self.is_on = torch.cuda.is_available()
        if self.is_on:
            self.training_streams = [torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())]

    def _event(self, stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def begin(self, lane: str, name: str, device: Any = None) -> tuple[str, str, Any, Any] | None:
        """Before something is launched on the current stream of a device; the lane "stream" is found by that."""
        if not self.is_on or torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(device)
        if lane == "stream":
            lane = "device" if stream in self.training_streams else "copy stream"
        return lane, name, stream, self._event(stream)

    def end(self, begun: tuple[str, str, Any, Any] | None) -> None:
        """After it was launched."""
        if begun is not None and not torch.cuda.is_current_stream_capturing():
            self.pairs.append((begun, self._event(begun[2])))

    def collect(self, recorder: Recorder) -> None:
        """Waits for the devices that were used, and adds what they did to the recorder."""
        nows: dict[torch.device, tuple[Any, int]] = {}  # events of two devices cannot be compared
        for (lane, name, stream, begin), end in self.pairs:
            if stream.device not in nows:
                nows[stream.device] = self._now(stream)
            now, nanoseconds = nows[stream.device]
            first, last = (nanoseconds - round(event.elapsed_time(now) * 1e6) for event in (begin, end))
            recorder.add(lane, name, first, last)

    def _now(self, stream: Any) -> tuple[Any, int]:
        """An event on the device of a stream, behind all that was launched there, and the time on the host."""
        torch.cuda.synchronize(stream.device)
        event = self._event(stream)
        event.synchronize()
        return event, time.perf_counter_ns()


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
    Hook("torch_sink.sink.producer", "ThreadProducer.take", "wait for a batch"),
    Hook("torch_sink.sink.ring", "DeviceRing._copy_ordinary", "copy a batch", "copy stream"),
    Hook("torch_sink.sink.slots", "Slots.fill", "take a batch"),
    Hook("torch_sink.image.run.batch", "LazyBatch.__torch_sink_execute__", "decode and transform", "stream"),
    Hook("torch_sink.loop.run", "TrainingRun._step", "step", "device"),
    Hook("torch_sink.loop.run", "TrainingRun._finish_sink", "end of the sink", waits=True),
    Hook("torch", "Tensor.backward", "backward", "device", is_part=True),
    Hook("torch.cuda", "synchronize", "synchronize", waits=True),
    *(
        Hook("torch", f"Tensor.{name}", name.strip("_"), waits=True)
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
    ),
)


class _Inside(threading.local):
    spans = 0  # hooks that the calling thread is inside of


class Hooks(ExitStack):
    """Wraps the functions when entered, and puts them back when left."""

    def __init__(self, recorder: Recorder, clock: DeviceClock) -> None:
        super().__init__()
        self.recorder, self.clock, self.inside = recorder, clock, _Inside()

    def __enter__(self) -> Hooks:
        super().__enter__()
        patches = Patches()
        self.callback(patches.undo)
        for hook in HOOKS:
            owner, _, attribute = f".{hook.path}".rpartition(".")
            if hook.module in sys.modules:
                holder = functools.reduce(getattr, filter(None, owner.split(".")), sys.modules[hook.module])
                patches.replace(holder, attribute, functools.partial(self._wrapped, hook=hook))
        self.callback(register_optimizer_step_pre_hook(self._pre_update).remove)
        self.callback(register_optimizer_step_post_hook(self._post_update).remove)
        for name in WORKER_LOOPS:
            if name in sys.modules:
                make = functools.partial(RecordedWorker, folder=self.recorder.folder)
                patches.replace(sys.modules[name], "_worker_loop", make)
        return self

    def _wrapped(self, function: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        inside = self.inside

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if not (_waits_for_device(args) if hook.waits else not hook.is_part or inside.spans == 0):
                return function(*args, **kwargs)
            inside.spans += 1
            begun = self._begin(hook.name, hook.lane, *args[:1])
            try:
                return function(*args, **kwargs)
            finally:
                inside.spans -= 1
                self._end(begun, hook.waits)

        traced.untraced = function  # type: ignore[attr-defined] # torch hands modes the function that is in place
        return traced

    def _begin(self, name: str, lane: str, owner: Any = None) -> tuple[str, Any, int]:
        device = getattr(owner, "device", None) if lane else None
        is_known = isinstance(device, torch.device) and device.type == "cuda"  # else it is the current one
        mark = self.clock.begin(lane, name, device if is_known else None) if lane else None
        return name, mark, time.perf_counter_ns()

    def _end(self, begun: tuple[str, Any, int], is_sync: bool = False) -> None:
        name, mark, begin = begun
        self.recorder.add(host_lane(), name, begin, time.perf_counter_ns(), is_sync)
        self.clock.end(mark)

    def _pre_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameter = optimizer.param_groups[0]["params"][0]
        self._update = None if self.inside.spans else self._begin("optimizer", "device", parameter)

    def _post_update(self, *_: Any) -> None:
        if self._update is not None:
            self._end(self._update)


def _waits_for_device(args: tuple[Any, ...]) -> bool:
    """Whether a call has to wait: not on a tensor that lies on the CPU, nor inside of what is compiled."""
    on_host = bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type in ("cpu", "meta")
    return not on_host and not torch.compiler.is_compiling()


class RecordedWorker(WorkerLoop):
    """Records in a data worker when it makes its batches, in a file of its own below `folder`."""

    def __init__(self, below: Callable[..., None], folder: str) -> None:
        super().__init__(below)
        self.folder = folder

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        recorder = Recorder(self.folder)
        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            kind.fetch = _fetching(kind.fetch, recorder)  # type: ignore[method-assign]
        super().__call__(*args, **kwargs)


def _fetching(stock: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(stock)
    def traced(fetcher: Any, indices: Any) -> Any:
        begin = time.perf_counter_ns()
        try:
            return stock(fetcher, indices)
        finally:
            info = get_worker_info()
            recorder.leave(Span(f"worker {info.id if info else 0}", "make a batch", begin, time.perf_counter_ns()))

    return traced
