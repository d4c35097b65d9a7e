"""What a timeline leaves: a page of its own, a PNG of one bar a span, and a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from torch_sink.tracing.spans import Span, lanes_of

# Readable on white and for people who see no red or green (https://jfly.uni-koeln.de/color/).
COLORS = {"worker": "#56B4E9", "producer": "#0072B2", "copy stream": "#E69F00", "device": "#009E73", "host": "#999999"}
SYNC_COLOR = "#D55E00"
WIDTH, LEFT, ROW, TOP, MARGIN = 1600, 150, 44, 20, 40


def color_of(lane: str) -> str:
    """The color of a lane; all workers have one."""
    return COLORS[lane.rstrip(" 0123456789")]


def write_page(path: Path, spans: Sequence[Span], began: int, ended: int) -> None:
    """Writes an HTML page with scripts, style and data inside, from `began` to `ended` in nanoseconds."""
    lanes, names = lanes_of(spans), sorted({span.name for span in spans})

    def as_row(span: Span) -> list[float]:
        """Lane, name, begin and length in microseconds, sync."""
        begin, length = (span.begin - began) / 1e3, (span.end - span.begin) / 1e3
        return [lanes.index(span.lane), names.index(span.name), begin, length, int(span.is_sync)]

    data = {
        "lanes": [{"name": lane, "color": color_of(lane)} for lane in lanes],
        "names": names,
        "sync": SYNC_COLOR,
        "length": (ended - began) / 1e3,
        "spans": [as_row(span) for span in spans],
    }
    template = files("torch_sink.tracing").joinpath("page.html").read_text(encoding="utf-8")
    text = template.replace("/* title */", path.stem).replace("/* data */", json.dumps(data).replace("</", "<\\/"))
    path.write_text(text, encoding="utf-8")


def write_trace(path: Path, spans: Sequence[Span], began: int) -> None:
    """Writes trace events, with `began` as the time that is 0.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU says what they are.
    """
    threads = {lane: number for number, lane in enumerate(lanes_of(spans), 1)}
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
    lanes = lanes_of(spans)
    above = TOP + (30 if title else 0)
    bottom = above + ROW * len(lanes)
    image = Image.new("RGB", (WIDTH, bottom + 40), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=16)
    scale = (WIDTH - LEFT - MARGIN) / max(ended - began, 1)
    draw.text((LEFT, 10), title, "black", font)
    milliseconds = (ended - began) / 1e6
    step = nice_step(milliseconds)
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
        color = SYNC_COLOR if span.is_sync else color_of(span.lane)
        draw.rectangle([left, top, max(right, left + 1), top + ROW - 16], color, outline)
        if draw.textlength(span.name, font) < right - left - 6:
            draw.text(((left + right) / 2, top + ROW / 2 - 8), span.name, "white", font, anchor="mm")
    image.save(path)


def nice_step(milliseconds: float, most: int = 10) -> float:
    """A distance between marks of an axis, 1, 2 or 5 times a power of ten, so that there are at most `most`."""
    step = 1e-3
    while milliseconds / step > most:
        step *= 2.5 if f"{step:e}"[0] == "2" else 2
    return step
