"""Timelines: what data workers, producer, copy stream, device and host do when, as a page, a picture and a trace.

A timeline wraps functions of torch and torch_sink while it runs, and puts the originals back afterwards. So a run
without a timeline pays nothing.
"""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data._utils import fetch

from torch_sink.common.arguments import check_bool, explains_wrong_calls
from torch_sink.common.patches import Patches
from torch_sink.common.ranks import speaks, warn_of_rank
from torch_sink.tracing.spans import Span, SpanLog, host_lane, write_page, write_picture, write_trace
from torch_sink.worker.batch import Note
from torch_sink.worker.prepare import WORKER_LOOPS, Worker, WorkerCollate

__all__ = ["timeline"]

_log = logging.getLogger("torch_sink")

SUFFIXES = (".html", ".png", ".json")

_active: list[SpanLog] = []


@explains_wrong_calls()
@contextmanager
def timeline(path: str | Path, *, every_rank: bool = False) -> Iterator[None]:
    """Shows what data workers, producer, copy stream, device and host do inside the block, and when the host syncs.

    Works around any PyTorch code, with or without torch_sink. Three files are written at the end: an HTML page to zoom
    and search in, which needs no network; a PNG; and a JSON trace for https://ui.perfetto.dev. Page and PNG begin with
    a verdict: whether loader, copy or step limits, and how much of the time the loop waited for data.

    Lanes of the device exist on CUDA only: on the CPU, the host computes. Data workers that were started before the
    block are missing.

    Inside the block a span costs about 2 microseconds, and 4 more if it is timed on a CUDA device. Outside it costs
    nothing.

    Args:
        path: of the page, "run.html"; the others are "run.png" and "run.json". Missing folders are created.
        every_rank: record on each rank, and not on rank 0 alone; then give each a path of its own.

    Raises:
        TypeError: not a path.
        ValueError: the path names no file.
        OSError: a file cannot be written there; raised before the block runs.
        RuntimeError: another timeline is running in this process.

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
        raise RuntimeError("another timeline is running; leave its block before this one begins")
    check_bool("every_rank", every_rank)
    if not speaks(every_rank):
        yield
        return
    page = _page_at(path)
    with ExitStack() as running:
        clock, log = DeviceClock(), SpanLog()
        _active.append(log)
        running.callback(_end, page, log, clock)
        # For a block that is still open when the program ends, as after `__enter__` in a notebook.
        atexit.register(running.close)
        running.callback(atexit.unregister, running.close)
        running.enter_context(Hooks(log, clock))
        yield


def _end(page: Path, log: SpanLog, clock: DeviceClock) -> None:
    """Writes the three files, and lets another timeline begin."""
    _active.remove(log)
    ended = time.perf_counter_ns()
    try:
        clock.collect(log)
    except RuntimeError as error:  # the device has failed; the spans of the host show where
        warn_of_rank("the timeline lacks what the device did: %s", error)
    try:
        spans = log.collected()
        write_page(page, spans, log.began, ended)
        write_picture(page.with_suffix(".png"), spans, log.began, ended)
        write_trace(page.with_suffix(".json"), spans, log.began)
    except OSError:  # a full disk must not hide an error of the block
        _log.exception("the timeline %s is not complete", page)


def _page_at(path: str | Path) -> Path:
    """The path of the page; raises unless all three files can be written, before a long run and not at its end."""
    if not isinstance(path, (str, Path)):
        raise TypeError(f'timeline={path!r}; give the path of a page, such as "run.html"')
    path = Path(path)
    if not path.name:
        raise ValueError(f'timeline={str(path)!r} names no file; give the path of a page, such as "run.html"')
    if path.is_dir():
        raise IsADirectoryError(f"timeline={str(path)!r} is a folder; give the path of a page, such as {path}/run.html")
    # A suffix of another kind is part of the name: "epoch.5" becomes "epoch.5.html".
    page = path.with_suffix(".html") if path.suffix in SUFFIXES else path.with_name(f"{path.name}.html")
    page = page.absolute()  # the block may change the working folder
    page.parent.mkdir(parents=True, exist_ok=True)
    for suffix in SUFFIXES:
        page.with_suffix(suffix).open("ab").close()
    return page


class DeviceClock:
    """Measures on CUDA when devices ran launched work, by an event before and one after it, 2 us of the host each.

    Nothing waits for the device until `collect`. Without CUDA this does nothing.
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
        """Queues an event before a launch on the current stream of a device; that stream decides the lane "stream"."""
        if not self.is_on or torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(device)
        if lane == "stream":
            lane = "device" if stream in self.training_streams else "copy stream"
        return lane, name, stream, self._event(stream)

    def end(self, begun: tuple[str, str, Any, Any] | None) -> None:
        """Queues an event after the launch that `begun` belongs to."""
        if begun is not None and not torch.cuda.is_current_stream_capturing():
            self.pairs.append((begun, self._event(begun[2])))

    def collect(self, log: SpanLog) -> None:
        """Waits for the devices in use, and adds their spans to the log."""
        nows: dict[torch.device, tuple[Any, int]] = {}  # events of different devices cannot be compared
        for (lane, name, stream, begin), end in self.pairs:
            if stream.device not in nows:  # an event after all work of the device, and the host's time at that event
                torch.cuda.synchronize(stream.device)
                event = self._event(stream)
                event.synchronize()
                nows[stream.device] = event, time.perf_counter_ns()
            now, nanoseconds = nows[stream.device]
            first, last = (nanoseconds - round(event.elapsed_time(now) * 1e6) for event in (begin, end))
            log.add(lane, name, first, last)


class Hook(NamedTuple):
    """A function to trace; hooks of modules that are not imported have no effect."""

    module: str
    path: str  # class and name of the function
    name: str  # of its spans
    # The lane of the work that it launches on the current stream: "device", "copy stream", or "stream", which is the
    # copy stream unless the current stream is the one that trains; "" if it launches nothing.
    lane: str = ""
    is_part: bool = False  # whether it is left out inside another hook
    waits: bool = False  # whether the host waits in it, if its first argument is a tensor on a device


HOOKS = (
    Hook("torch.utils.data.dataloader", "_BaseDataLoaderIter.__next__", "receive a batch", is_part=True),
    Hook("torch_sink.sink.producer", "Producer._receive", "wait for a batch"),
    Hook("torch_sink.sink.ring", "DeviceRing._copy_ordinary", "copy a batch", "copy stream"),
    Hook("torch_sink.sink.slots", "Slots.fill", "take a batch"),
    Hook("torch_sink.image.run.batch", "LazyBatch.__torch_sink_execute_all__", "decode and transform", "stream"),
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
    spans = 0  # how many hooks the calling thread is inside of


class Hooks(ExitStack):
    """A context manager that wraps the functions of `HOOKS`, and puts the originals back."""

    def __init__(self, log: SpanLog, clock: DeviceClock) -> None:
        super().__init__()
        self.log, self.clock, self.inside = log, clock, _Inside()

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
                make = functools.partial(Worker, feature=TracedWorker(self.log.number))
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

        traced.untraced = function  # type: ignore[attr-defined] # torch passes the wrapper to its modes
        return traced

    def _begin(self, name: str, lane: str, owner: Any = None) -> tuple[str, Any, int]:
        device = getattr(owner, "device", None) if lane else None
        is_known = isinstance(device, torch.device) and device.type == "cuda"  # else it is the current one
        mark = self.clock.begin(lane, name, device if is_known else None) if lane else None
        return name, mark, time.perf_counter_ns()

    def _end(self, begun: tuple[str, Any, int], is_sync: bool = False) -> None:
        name, mark, begin = begun
        self.log.add(host_lane(), name, begin, time.perf_counter_ns(), is_sync)
        self.clock.end(mark)

    def _pre_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameter = optimizer.param_groups[0]["params"][0]
        self._update = None if self.inside.spans else self._begin("optimizer", "device", parameter)

    def _post_update(self, *_: Any) -> None:
        if self._update is not None:
            self._end(self._update)


def _waits_for_device(args: tuple[Any, ...]) -> bool:
    """Whether a call waits for the device: not one on a tensor on the CPU, nor one in code that is being compiled."""
    on_host = bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type in ("cpu", "meta")
    return not on_host and not torch.compiler.is_compiling()


class TracedWorker:
    """What a timeline does in a data worker: a span for each batch travels with it.

    Args:
        number: of the timeline that the spans belong to.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, collate: WorkerCollate, arguments: dict[str, Any]) -> None:
        began = 0

        def fetching(stock: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(stock)
            def fetch_batch(fetcher: Any, indices: Any) -> Any:
                nonlocal began
                began = time.perf_counter_ns()
                return stock(fetcher, indices)

            return fetch_batch

        def made() -> Note:
            span = Span(f"worker {collate.worker}", "make a batch", began, time.perf_counter_ns())
            return _arrived, (self.number, span)

        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            kind.fetch = fetching(kind.fetch)  # type: ignore[method-assign]
        collate.reporters.append(made)


def _arrived(note: tuple[int, Span]) -> None:
    number, span = note
    for log in _active:
        if log.number == number:
            log.spans.append(span)
