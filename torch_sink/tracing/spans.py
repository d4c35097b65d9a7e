"""Spans of time from all threads and processes of a run: the verdict on what limits it, and page, picture and trace.

Those of data workers travel with their batches. Times are `time.perf_counter_ns()`, which on Linux and macOS is one
clock for all processes of a machine.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL import ImageDraw

PRODUCER_THREAD = "torch_sink-producer"
# Names of spans in which a thread waits for a batch, of a DataLoader and of a SinkLoader.
WAITS_FOR_DATA = ("receive a batch", "wait for a batch")
FEWEST_BATCHES = 4
# Some waiting is part of every run: a loop that waits less than this share of the time is limited by its steps.
LIMITING_SHARE = 0.1
# The first batch and the first step do not count, because workers start and code is compiled then.
PERIOD = "Counted from the second batch on."

_numbers = itertools.count()

Intervals = list[tuple[int, int]]  # (begin, end) in nanoseconds, sorted and disjoint


class Span(NamedTuple):
    """A named interval of time on a lane, in nanoseconds."""

    lane: str  # one of `LANES`; a worker's has its number: "worker 0"
    name: str
    begin: int
    end: int
    is_sync: bool = False  # the host waited for the device

    @property
    def waits_for_data(self) -> bool:
        """Whether the thread waited for a batch."""
        return self.name in WAITS_FOR_DATA


def host_lane() -> str:
    """The lane of the calling thread of the training process."""
    return "producer" if threading.current_thread().name == PRODUCER_THREAD else "host"


class SpanLog:
    """Collects the spans of a timeline, those of data workers as their batches arrive."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.spans: list[Span] = []
        self.began = time.perf_counter_ns()

    def add(self, lane: str, name: str, begin: int, end: int, is_sync: bool = False) -> None:
        """Appends a span; safe from any thread."""
        self.spans.append(Span(lane, name, begin, end, is_sync))

    def collected(self) -> list[Span]:
        """The spans, sorted by their begin."""
        return sorted((span for span in self.spans if span.end >= self.began), key=lambda span: span.begin)


def verdict(spans: Sequence[Span]) -> str:
    """Says in one line whether loader, copy or step limits the run, and how much of the time the loop waited for data.

    Only the time from the second wait for a batch to the last step counts. Waits while the device still computes cost
    nothing and are ignored. A wait during which a batch is copied to the device, or transformed there, is due to the
    copy; any other is due to the loader.
    """
    host = [span for span in spans if span.lane == "host"]
    fetches = [span.begin for span in host if span.waits_for_data]
    if len(fetches) <= FEWEST_BATCHES:  # the last one gets no batch
        return f"No verdict: the loop took fewer than {FEWEST_BATCHES} batches from a DataLoader or SinkLoader."
    begin = fetches[1]
    end = max(fetches[-1], *(span.end for span in host if not span.waits_for_data), 0)
    busy = _joined(span for span in spans if span.lane == "device")
    copies = _joined(
        span for span in spans if span.lane == "copy stream" or (span.lane == "producer" and not span.waits_for_data)
    )
    waits = _common(_joined(span for span in host if span.waits_for_data), [(begin, end)])
    waited = _length(waits) - _length(_common(waits, busy))
    during_copies = _common(waits, copies)
    copied = _length(during_copies) - _length(_common(during_copies, busy))
    share = f"the loop waited {100 * waited / (end - begin):.0f} % of the time for data"
    if waited < LIMITING_SHARE * (end - begin):
        return f"The step limits: {share}. A faster loader would not help."
    if 2 * copied > waited:
        return f"The copy limits: {share}, mostly while batches were copied to the device or transformed there."
    return f"The loader limits: {share}. Use more workers, a faster dataset, or make the pixels on the device."


def _joined(spans: Iterable[Span]) -> Intervals:
    """The union of spans."""
    found: Intervals = []
    for begin, end in sorted((span.begin, span.end) for span in spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _common(one: Intervals, other: Intervals) -> Intervals:
    """The intersection of two unions."""
    found: Intervals = []
    first, second = 0, 0
    while first < len(one) and second < len(other):
        begin, end = max(one[first][0], other[second][0]), min(one[first][1], other[second][1])
        if begin < end:
            found.append((begin, end))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return found


def _length(intervals: Intervals) -> int:
    return sum(end - begin for begin, end in intervals)


# --- page, picture and trace


class Lane(NamedTuple):
    """How a page and a picture show the spans of a thread, process or stream."""

    color: str  # of spans of work; those of waits are hatched
    ink: str  # of text on that color
    does: str


# From top to bottom; workers are numbered. The colors differ on white, on black, and for color-blind readers
# (https://jfly.uni-koeln.de/color/).
LANES = {
    "worker": Lane("#56B4E9", "black", "makes batches"),
    "producer": Lane("#0072B2", "white", "keeps batches ready for the loop"),
    "copy stream": Lane("#CC79A7", "black", "copies batches to the device"),
    "device": Lane("#009E73", "black", "computes the steps"),
    "host": Lane("#8C6239", "white", "runs the training loop"),
}
# The kinds of spans, by number; for those that wait, a description and the color of the hatching.
WORK, WAIT, SYNC = 0, 1, 2
WAITS = {WAIT: ("waits for data", "#8A8A8A"), SYNC: ("waits for the device (sync)", "#D55E00")}
WIDTH, LEFT, ROW, TOP, MARGIN, HATCH = 1600, 150, 44, 50, 40, 7  # of the picture, in pixels
BACK, INK, GRID = "#ffffff", "#222222", "#dddddd"


def _number_of(span: Span) -> int:
    return SYNC if span.is_sync else WAIT if span.waits_for_data else WORK


def _kind(lane: str) -> str:
    return lane.rstrip(" 0123456789")


def _lanes_of(spans: Iterable[Span]) -> list[str]:
    """The lanes with spans, from top to bottom."""
    order = [*LANES]
    return sorted({span.lane for span in spans}, key=lambda lane: (order.index(_kind(lane)), len(lane), lane))


def write_page(path: Path, spans: Sequence[Span], began: int, ended: int) -> None:
    """Writes a self-contained HTML page of the time from `began` to `ended`, in nanoseconds."""
    lanes, names = _lanes_of(spans), sorted({span.name for span in spans})
    data = {
        "lanes": [{"name": lane, **LANES[_kind(lane)]._asdict()} for lane in lanes],
        "names": names,
        "waits": {number: {"does": does, "color": color} for number, (does, color) in WAITS.items()},
        "length": (ended - began) / 1e3,
        # Lane, name, begin and length in microseconds, kind.
        "spans": [
            [lanes.index(s.lane), names.index(s.name), (s.begin - began) / 1e3, (s.end - s.begin) / 1e3, _number_of(s)]
            for s in spans
        ],
    }
    text = files("torch_sink.tracing").joinpath("page.html").read_text(encoding="utf-8")
    for name, value in (("title", path.stem), ("verdict", verdict(spans)), ("period", PERIOD)):
        text = text.replace(f"/* {name} */", escape(value))
    path.write_text(text.replace("/* data */", json.dumps(data).replace("</", "<\\/")), encoding="utf-8")


def write_trace(path: Path, spans: Sequence[Span], began: int) -> None:
    """Writes a trace in Chrome's trace event format, with time 0 at `began`.

    The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
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


def write_picture(path: Path, spans: Sequence[Span], began: int, ended: int) -> None:
    """Writes a PNG, `WIDTH` pixels wide, of the time from `began` to `ended`: one row per lane, waits hatched.

    The text above is the verdict and a legend of the hatching.
    """
    from PIL import Image, ImageDraw, ImageFont  # training without images does not load Pillow

    lanes = _lanes_of(spans)
    image = Image.new("RGB", (WIDTH, TOP + ROW * len(lanes) + 40), BACK)
    draw = ImageDraw.Draw(image)
    draw.font = ImageFont.load_default(size=16)
    draw.text((LEFT, 10), verdict(spans), INK)
    _draw_legend(draw, {_number_of(span) for span in spans})
    _draw_axis(draw, (ended - began) / 1e6, TOP + ROW * len(lanes))
    for number, lane in enumerate(lanes):
        draw.text((LEFT - 10, TOP + ROW * number + ROW // 2), lane, INK, anchor="rm")
    scale = (WIDTH - LEFT - MARGIN) / max(ended - began, 1)
    for span in spans:
        left, right = (LEFT + (at - began) * scale for at in (max(span.begin, began), min(span.end, ended)))
        if span.is_sync:
            draw.line([(left, TOP), (left, TOP + ROW * len(lanes))], WAITS[SYNC][1])
        top = TOP + ROW * lanes.index(span.lane) + 8
        _draw_span(draw, span, (left, top, max(right, left + 1), top + ROW - 16))
    image.save(path)


def _draw_legend(draw: ImageDraw.ImageDraw, numbers: set[int]) -> None:
    right = float(WIDTH - MARGIN)
    for number in sorted(numbers - {WORK}):
        does, color = WAITS[number]
        left = right - draw.textlength(does)
        draw.text((left, 10), does, INK)
        _hatch(draw, (left - 32, 10, left - 8, 26), color)
        right = left - 56


def _draw_axis(draw: ImageDraw.ImageDraw, milliseconds: float, bottom: int) -> None:
    marks = (digit * 10.0**power for power in range(-3, 9) for digit in (1, 2, 5))
    step = next(mark for mark in marks if milliseconds / mark <= 10)  # at most ten marks
    for number in range(int(milliseconds / step) + 1):
        x = LEFT + number * step / max(milliseconds, step) * (WIDTH - LEFT - MARGIN)
        draw.line([(x, TOP), (x, bottom)], GRID)
        draw.text((x, bottom + 6), f"{number * step:g} ms", INK, anchor="ma")


def _draw_span(draw: ImageDraw.ImageDraw, span: Span, box: tuple[float, float, float, float]) -> None:
    left, top, right, bottom = box
    number, lane = _number_of(span), LANES[_kind(span.lane)]
    color = lane.color if number == WORK else WAITS[number][1]
    if number == WORK or right - left < HATCH:
        draw.rectangle(box, color, BACK if right - left > 4 else None)
    else:
        draw.rectangle(box, BACK)
        _hatch(draw, box, color)
    if draw.textlength(span.name) < right - left - 6:
        middle = (left + right) / 2, (top + bottom) / 2
        if number != WORK:
            draw.rectangle(draw.textbbox(middle, span.name, anchor="mm"), BACK)
        draw.text(middle, span.name, lane.ink if number == WORK else INK, anchor="mm")


def _hatch(draw: ImageDraw.ImageDraw, box: tuple[float, float, float, float], color: str) -> None:
    """Draws diagonal lines in a box, and its outline."""
    left, top, right, bottom = box
    height = bottom - top
    for foot in range(int(left - height), int(right), HATCH):
        first, last = max(foot, left), min(foot + height, right)
        draw.line([(first, bottom - (first - foot)), (last, bottom - (last - foot))], color)
    draw.rectangle(box, None, color)
