"""The timeline as a PNG: one bar a span, one row a lane, a red line where the host syncs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from torch_sink.tracing.spans import Span, lanes_of

# Readable on white and for people who see no red or green (https://jfly.uni-koeln.de/color/).
COLORS = {"worker": "#56B4E9", "producer": "#0072B2", "copy stream": "#E69F00", "device": "#009E73", "host": "#999999"}
SYNC_COLOR = "#D55E00"
WIDTH, LEFT, ROW, TOP, MARGIN = 1600, 150, 44, 20, 40


def color_of(lane: str) -> str:
    """The color of a lane; all workers have one."""
    return COLORS[lane.rstrip(" 0123456789")]


def nice_step(milliseconds: float, most: int = 10) -> float:
    """A distance between marks of an axis, 1, 2 or 5 times a power of ten, so that there are at most `most`."""
    step = 1e-3
    while milliseconds / step > most:
        step *= 2.5 if f"{step:e}"[0] == "2" else 2
    return step


def write_picture(path: Path, spans: Sequence[Span], began: int, ended: int, title: str = "") -> None:
    """Writes the whole timeline, `WIDTH` pixels wide.

    Args:
        path: of the PNG file.
        spans: what happened.
        began: left end, in nanoseconds.
        ended: right end.
        title: above it.
    """
    lanes = lanes_of(spans)
    above = TOP + (30 if title else 0)
    height = above + ROW * len(lanes) + 40
    image = Image.new("RGB", (WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(size=16)
    scale = (WIDTH - LEFT - MARGIN) / max(ended - began, 1)
    draw.text((LEFT, 10), title, "black", font)
    bottom = above + ROW * len(lanes)
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
        color = SYNC_COLOR if span.is_sync else color_of(span.lane)
        if span.is_sync:
            draw.line([(left, above), (left, bottom)], SYNC_COLOR)
        outline = "white" if right - left > 4 else None
        draw.rectangle([left, top, max(right, left + 1), top + ROW - 16], color, outline)
        if draw.textlength(span.name, font) < right - left - 6:
            draw.text(((left + right) / 2, top + ROW / 2 - 8), span.name, "white", font, anchor="mm")
    image.save(path)
