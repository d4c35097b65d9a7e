"""Spans of time from all threads and processes of a run, and what a timeline writes of them.

Every process writes what it saw to a file of its own. Times are `time.perf_counter_ns()`, which on Linux and macOS is
one clock for all processes of a machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

PRODUCER_THREAD = "torch_sink-producer"
# From top to bottom; workers are numbered. Readable on white and for people who see no red or green
# (https://jfly.uni-koeln.de/color/).
LANES = {"worker": "#56B4E9", "producer": "#0072B2", "copy stream": "#E69F00", "device": "#009E73", "host": "#999999"}
SYNC_COLOR = "#D55E00"
WIDTH, LEFT, ROW, TOP, MARGIN = 1600, 150, 44, 20, 40  # of the picture


class Span(NamedTuple):
    """Something that took time, in nanoseconds."""

    lane: str  # one of `LANES`, a worker's with its number: "worker 0"
    name: str
    begin: int
    end: int
    is_sync: bool = False  # the host waited for the device


def host_lane() -> str:
    """The lane of the calling thread of the training process."""
    return "producer" if threading.current_thread().name == PRODUCER_THREAD else "host"


class Recorder:
    """Collects the spans of one process; `folder` is where its children leave theirs."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.spans: list[Span] = []
        self.began = time.perf_counter_ns()

    def add(self, lane: str, name: str, begin: int, end: int, is_sync: bool = False) -> None:
        """Appends a span; safe from any thread."""
        self.spans.append(Span(lane, name, begin, end, is_sync))

    def leave(self, span: Span) -> None:
        """In a child process: appends a span to its file. A full disk costs the timeline this, and no more."""
        with contextlib.suppress(OSError), open(Path(self.folder, str(os.getpid())), "a", encoding="utf-8") as file:
            file.write(json.dumps(span) + "\n")

    def collected(self) -> list[Span]:
        """The spans of all processes, in the order of their beginnings."""
        found = list(self.spans)
        for file in Path(self.folder).glob("*"):
            *lines, _ = file.read_text(encoding="utf-8").split("\n")
            found += [Span(*json.loads(line)) for line in lines]
        return sorted((span for span in found if span.end >= self.began), key=lambda span: span.begin)


def _kind(lane: str) -> str:
    return lane.rstrip(" 0123456789")


def _lanes_of(spans: Iterable[Span]) -> list[str]:
    """The lanes that have spans, from top to bottom."""
    order = [*LANES]
    return sorted({span.lane for span in spans}, key=lambda lane: (order.index(_kind(lane)), len(lane), lane))


def write_page(path: Path, spans: Sequence[Span], began: int, ended: int) -> None:
    """Writes an HTML page with scripts, style and data inside, from `began` to `ended` in nanoseconds."""
    lanes, names = _lanes_of(spans), sorted({span.name for span in spans})
    data = {
        "lanes": [{"name": lane, "color": LANES[_kind(lane)]} for lane in lanes],
        "names": names,
        "sync": SYNC_COLOR,
        "length": (ended - began) / 1e3,
        # Lane, name, begin and length in microseconds, sync.
        "spans": [
            [lanes.index(lane), names.index(name), (begin - began) / 1e3, (end - begin) / 1e3, int(is_sync)]
            for lane, name, begin, end, is_sync in spans
        ],
    }
    template = files("torch_sink.tracing").joinpath("page.html").read_text(encoding="utf-8")
    text = template.replace("/* title */", path.stem).replace("/* data */", json.dumps(data).replace("</", "<\\/"))
    path.write_text(text, encoding="utf-8")


def write_trace(path: Path, spans: Sequence[Span], began: int) -> None:
    """Writes trace events, with `began` as the time that is 0.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU says what they are.
    """
    threads = {lane: number for number, lane in enumerate(_lanes_of(spans), 1)}
    events: list[dict[str, Any]] = []
    for lane, number in threads.items():
        for name, value in (("thread_name", {"name": lane}), ("thread_sort_index", {"sort_index": number})):
            events.append({"ph": "M", "name": name, "pid": 1, "tid": number, "args": value})
    for span in spans:
        at = {"pid": 1, "tid": threads[span.lane], "ts": (span.begin - began) / 1e3}
        events.append({"ph": "X", "name": span.name, "dur": (span.end - span.begin) / 1e3, **at})
        if span.is_sync:
            events.append({"ph": "i", "name": "sync", "s": "t", **at})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def write_picture(path: Path, spans: Sequence[Span], began: int, ended: int, title: str = "") -> None:
    """Writes a PNG, `WIDTH` pixels wide: one row a lane, from `began` to `ended`, red lines where the host syncs."""
    from PIL import Image, ImageDraw, ImageFont  # a loop without images loads no Pillow

    lanes = _lanes_of(spans)
    above = TOP + (30 if title else 0)
    bottom = above + ROW * len(lanes)
    image = Image.new("RGB", (WIDTH, bottom + 40), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=16)
    scale = (WIDTH - LEFT - MARGIN) / max(ended - began, 1)
    draw.text((LEFT, 10), title, "black", font)
    milliseconds = (ended - began) / 1e6
    marks = (digit * 10.0**power for power in range(-3, 9) for digit in (1, 2, 5))
    step = next(mark for mark in marks if milliseconds / mark <= 10)  # at most ten of them
    for number in range(int(milliseconds / step) + 1):
        x = LEFT + number * step * 1e6 * scale
        draw.line([(x, above), (x, bottom)], "#dddddd")
        draw.text((x, bottom + 6), f"{number * step:g} ms", "black", font, anchor="ma")
    for number, lane in enumerate(lanes):
        draw.text((LEFT - 10, above + ROW * number + ROW // 2), lane, "black", font, anchor="rm")
    for span in spans:
        top = above + ROW * lanes.index(span.lane) + 8
        left, right = (LEFT + (at - began) * scale for at in (max(span.begin, began), min(span.end, ended)))
        if span.is_sync:
            draw.line([(left, above), (left, bottom)], SYNC_COLOR)
        outline = "white" if right - left > 4 else None
        color = SYNC_COLOR if span.is_sync else LANES[_kind(span.lane)]
        draw.rectangle([left, top, max(right, left + 1), top + ROW - 16], color, outline)
        if draw.textlength(span.name, font) < right - left - 6:
            draw.text(((left + right) / 2, top + ROW / 2 - 8), span.name, "white", font, anchor="mm")
    image.save(path)
