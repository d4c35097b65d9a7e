"""Streams: an exception would end their generator, so what opens images gives a placeholder image there.

Whoever stands in for an opener asks `opening()` whether one is wanted, says `note_placeholder` for each that it gives,
and `note_pixels` where somebody reads the pixels of one, which are made up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import get_worker_info

from torch_sink.common.containers import leaves
from torch_sink.common.random_state import global_draws, set_global_draws
from torch_sink.damage.cause import BrokenFile
from torch_sink.damage.samples import Placeholder
from torch_sink.errors import DecodeError


class _Reading(threading.local):
    """What happens in this thread while a sample of a stream is asked for."""

    depth = 0  # streams that are being read, one inside of the other
    opened = 0  # images opened for this sample, broken or not
    is_opening = False  # one of them
    draws: tuple[Any, ...] | None = None  # before what follows on the first placeholder drew
    read: list[BrokenFile]  # placeholders whose pixels somebody read


_reading = _Reading()


def is_reading_stream() -> bool:
    """True while this thread waits for a sample of a guarded stream."""
    return _reading.depth > 0


@contextmanager
def opening() -> Iterator[bool]:
    """While an image is opened; gives True where a placeholder image is wanted instead of an exception.

    That is in a stream, but not where one opener calls another.
    """
    if not _reading.depth or _reading.is_opening:
        yield False
        return
    _reading.opened += 1
    _reading.is_opening = True
    try:
        yield True
    finally:
        _reading.is_opening = False


def note_placeholder() -> None:
    """A placeholder image was given."""
    if _reading.draws is None:
        _reading.draws = global_draws()


def note_pixels(file: BrokenFile) -> None:
    """Somebody is given the pixels of a placeholder.

    Raises:
        DecodeError: outside of a stream, where they could be taken for those of an image.
    """
    if not _reading.depth:
        raise DecodeError(file.path, -1, file.reason)
    _reading.read.append(file)


class GuardedStream:
    """The iterator of an iterable dataset; gives a placeholder for each sample that holds a placeholder image.

    The samples after it draw what they would draw had the dataset's own code left the file out.
    """

    def __init__(self, samples: Iterator[Any], keeps_last: bool) -> None:
        self.samples = samples
        self.keeps_last = keeps_last
        self.last: Any = None
        self.ahead: list[Any] = []
        self.count = 0
        self.in_step = True
        self.images_of_a_sample = -1
        self.is_searched = False  # placeholders are on their way

    def __iter__(self) -> GuardedStream:
        return self

    def __next__(self) -> Any:
        sample = self.ahead.pop(0) if self.ahead else self._read()
        if self.keeps_last and type(sample) is not Placeholder:
            self.last = sample
        return sample

    def next_good(self) -> Any:
        """The next sample without broken files, which comes again; at the end of the stream, the last one."""
        held: list[Any] = []
        for sample in self:
            held.append(sample)
            if type(sample) is not Placeholder:
                break
        self.ahead = held + self.ahead
        return self.last

    def _read(self) -> Any:
        outer = vars(_reading).copy()
        vars(_reading).update(depth=_reading.depth + 1, opened=0, is_opening=False, draws=None, read=[])
        try:
            sample = next(self.samples)
            opened, before, read = _reading.opened, _reading.draws, _reading.read
        finally:
            vars(_reading).clear()
            vars(_reading).update(outer)
        self.count += 1
        self._note_step(opened)
        if before is None and not self.is_searched:
            return sample
        self.is_searched = True
        file = next(_placeholders(sample), None)
        if file is None and read:
            file = self._of_this_step(read[0])
        if file is None:
            return sample
        if before is not None and self.in_step:
            set_global_draws(before)
        return Placeholder(file if file.path else file._replace(path=self._name()))

    def _name(self) -> str:
        worker = get_worker_info()
        whose = "a stream" if worker is None else f"the stream of worker {worker.id}"
        return f"sample {self.count - 1} of {whose}"

    def _note_step(self, opened: int) -> None:
        if self.images_of_a_sample < 0:
            self.images_of_a_sample = opened
        self.in_step = self.in_step and opened == self.images_of_a_sample

    def _of_this_step(self, file: BrokenFile) -> BrokenFile:
        """The sample that came is the one whose pixels were read, unless the stream holds samples back."""
        if not self.in_step:
            why = (
                f"{file.reason}; its pixels were read by code of a stream that holds samples back, so which sample is "
                "broken cannot be told: catch the error there, or read pixels after samples were shuffled"
            )
            raise DecodeError(file.path, -1, why)
        return file


def _placeholders(sample: Any) -> Iterator[BrokenFile]:
    """The broken files of the placeholder images in a sample."""
    for leaf in leaves(sample):
        file = getattr(getattr(leaf, "sink_source", None), "broken_file", None)
        if file is not None:
            yield file
