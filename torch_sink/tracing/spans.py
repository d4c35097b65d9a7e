"""Spans of time from all threads and processes of a run.

Every process writes what it saw to a file of its own. Times are `time.perf_counter_ns()`, which on Linux and macOS is
one clock for all processes of a machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

PRODUCER_THREAD = "torch_sink-producer"
# What a thread does until it has a batch that another one makes: "receive a batch" is of a DataLoader, "wait for a
# batch" of a SinkLoader.
WAITS_FOR_DATA = ("receive a batch", "wait for a batch")


class Span(NamedTuple):
    """Something that took time, in nanoseconds."""

    lane: str  # one of `LANES`, a worker's with its number: "worker 0"
    name: str
    begin: int
    end: int
    is_sync: bool = False  # the host waited for the device

    @property
    def waits_for_data(self) -> bool:
        """Whether it is no work: the thread had no batch."""
        return self.name in WAITS_FOR_DATA


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
