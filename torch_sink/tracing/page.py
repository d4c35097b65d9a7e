"""The timeline as an HTML page of its own: scripts, style and data inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from torch_sink.tracing.picture import SYNC_COLOR, color_of
from torch_sink.tracing.spans import Span, lanes_of


def write_page(path: Path, spans: Sequence[Span], began: int, ended: int) -> None:
    """Writes the page.

    Args:
        path: of the HTML file.
        spans: what happened.
        began: left end, in nanoseconds.
        ended: right end.
    """
    lanes = lanes_of(spans)
    names = sorted({span.name for span in spans})
    data = {
        "lanes": [{"name": lane, "color": color_of(lane)} for lane in lanes],
        "names": names,
        "sync": SYNC_COLOR,
        "length": (ended - began) / 1e3,
        # lane, name, begin and length in microseconds, sync
        "spans": [
            [
                lanes.index(span.lane),
                names.index(span.name),
                (span.begin - began) / 1e3,
                (span.end - span.begin) / 1e3,
                int(span.is_sync),
            ]
            for span in spans
        ],
    }
    template = files("torch_sink.tracing").joinpath("page.html").read_text(encoding="utf-8")
    text = template.replace("/* title */", path.stem).replace("/* data */", json.dumps(data).replace("</", "<\\/"))
    path.write_text(text, encoding="utf-8")
