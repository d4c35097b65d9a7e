"""The timeline as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_sink.tracing.spans import Span, lanes_of


def write_trace(path: Path, spans: Sequence[Span], began: int) -> None:
    """Writes trace events: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

    Args:
        path: of the JSON file.
        spans: what happened.
        began: the time that is 0, in nanoseconds.
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
