"""Spans of time from all threads and processes of a run, and the verdict: what limits it.

Every child process writes its spans to a separate file. Times are `time.perf_counter_ns()`, which on Linux and macOS is
one clock for all processes of a machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

PRODUCER_THREAD = "torch_sink-producer"
# Names of spans in which a thread waits for a batch, of a DataLoader and of a SinkLoader.
WAITS_FOR_DATA = ("receive a batch", "wait for a batch")
FEWEST_BATCHES = 4
# Some waiting is part of every run: a loop that waits less than this share of the time is limited by its steps.
LIMITING_SHARE = 0.1
# The first batch and the first step do not count, because workers start and code is compiled then.
PERIOD = "Counted from the second batch on."

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
    """Collects the spans of one process; its child processes write theirs to files in `folder`."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.spans: list[Span] = []
        self.began = time.perf_counter_ns()

    def add(self, lane: str, name: str, begin: int, end: int, is_sync: bool = False) -> None:
        """Appends a span; safe from any thread."""
        self.spans.append(Span(lane, name, begin, end, is_sync))

    def write(self, span: Span) -> None:
        """Appends a span to the file of this child process."""
        # On a full disk the timeline lacks the span, and the run goes on.
        with contextlib.suppress(OSError), open(Path(self.folder, str(os.getpid())), "a", encoding="utf-8") as file:
            file.write(json.dumps(span) + "\n")

    def collected(self) -> list[Span]:
        """The spans of all processes, sorted by their begin."""
        found = list(self.spans)
        for file in Path(self.folder).glob("*"):
            *lines, _ = file.read_text(encoding="utf-8").split("\n")
            found += [Span(*json.loads(line)) for line in lines]
        return sorted((span for span in found if span.end >= self.began), key=lambda span: span.begin)


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
