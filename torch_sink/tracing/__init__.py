"""Timelines: what workers, producer, copies, device and host did when, as a page, a picture and a trace."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_sink.tracing.hooks import DeviceClock, Hooks
from torch_sink.tracing.spans import Recorder, write_page, write_picture, write_trace

__all__ = ["timeline"]

SUFFIXES = (".html", ".png", ".json")

_active: list[Recorder] = []


@contextmanager
def timeline(path: str | Path) -> Iterator[None]:
    """Records what data workers, producer, copy stream, device and host do inside, and when the host syncs.

    Works around any PyTorch code, with or without torch_sink. Three files are written at the end, side by side: an HTML
    page to zoom and search in, which needs no network; a PNG; and a JSON trace for https://ui.perfetto.dev.

    Lanes of the device are there on CUDA only: on the CPU, what computes is the host. Data workers that already run
    when it begins are not seen. Set the image backend before.

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
            clock.collect(recorder)
            spans = recorder.collected()
            write_page(page, spans, recorder.began, ended)
            write_picture(page.with_suffix(".png"), spans, recorder.began, ended)
            write_trace(page.with_suffix(".json"), spans, recorder.began)


def _page_at(path: str | Path) -> Path:
    """Where the page goes, where all three files can be written: a run of days shall not fail at its end."""
    if not isinstance(path, (str, Path)):
        raise TypeError(f'timeline={path!r}; give the path of a page, such as "run.html"')
    path = Path(path)
    if not path.name:
        raise ValueError(f'timeline={str(path)!r} names no file; give the path of a page, such as "run.html"')
    # Only a suffix of ours is replaced: "epoch.5" is not "epoch".
    page = path.with_suffix(".html") if path.suffix in SUFFIXES else path.with_name(f"{path.name}.html")
    page.parent.mkdir(parents=True, exist_ok=True)
    for suffix in SUFFIXES:
        page.with_suffix(suffix).open("ab").close()
    return page
