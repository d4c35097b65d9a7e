"""Datasets, streams and collate functions that put a placeholder in the place of each sample with a broken file.

An exception would end the generator of an iterable dataset. So while a sample of such a stream is read
(`is_reading_stream`), functions that open images return a placeholder image for a broken file, and the sample is left
out afterwards. These functions call `note_opened` for each image, `note_placeholder` for each placeholder, and
`note_pixels` when code reads the pixels of a placeholder.
"""

from __future__ import annotations

import copy
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from torch.utils.data import get_worker_info

from torch_sink.common.containers import leaves
from torch_sink.common.random_state import global_draws, set_global_draws
from torch_sink.damage.report import BrokenFile, DecodeReport, Policy, broken_file
from torch_sink.errors import DecodeError


class Placeholder(NamedTuple):
    """Takes the place of a sample whose file is broken."""

    file: BrokenFile


class PartialBatch(NamedTuple):
    """A batch with broken files, as a data worker makes it: the samples that are left, and a report of the others."""

    batch: Any
    loss: DecodeReport
    is_empty: bool = False  # no sample is left, and `batch` is not a batch


class GuardedDataset:
    """A map-style dataset that returns a placeholder for a sample whose file is broken.

    The samples after it draw the same random numbers as in a loop that catches stock code's exception and goes on.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.first_after = 0  # where the search for a sample that replaces a whole batch begins

    def __getitem__(self, index: Any) -> Any:
        return self._guarded(functools.partial(operator.getitem, self.dataset), index, index)

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        at_once = getattr(self.dataset, "__getitems__", None)
        if not at_once:
            return [self[index] for index in indices]
        before = global_draws()
        samples = self._guarded(at_once, indices, indices)
        if type(samples) is not Placeholder:
            return samples
        set_global_draws(before)
        found = [self._guarded(at_once, [index], index) for index in indices]
        return [one if type(one) is Placeholder else one[0] for one in found]

    def _guarded(self, get: Callable[[Any], Any], argument: Any, index: Any) -> Any:
        try:
            self.first_after = operator.index(index) + 1
        except TypeError:
            self.first_after = -1
        try:
            return get(argument)
        except Exception as error:
            file = broken_file(error, f"sample {index} of {type(self.dataset).__name__}")
            if file is None:
                raise
            return Placeholder(file)

    def next_good(self) -> Any:
        """The next good sample by index, None if there is none; random generators are left as they were."""
        try:
            count = len(self.dataset)
        except (TypeError, NotImplementedError):
            count = 0
        if self.first_after < 0:
            return None
        first, before = self.first_after, global_draws()
        samples = (self.__getitems__([(first + step) % count])[0] for step in range(count))
        try:
            return next((sample for sample in samples if type(sample) is not Placeholder), None)
        finally:
            set_global_draws(before)


@dataclass(eq=False)
class GuardedCollate:
    """A `collate_fn` that leaves out or replaces the placeholders among its samples."""

    collate: Callable[[Any], Any]  # the loader's function
    policy: Policy  # "skip" or "replace"
    is_batch: bool  # whether `collate` gets a list of samples, as with automatic batching, or a single one
    next_good: Callable[[], Any]  # returns a sample that replaces all samples of a batch, or None

    def __call__(self, fetched: Any) -> Any:
        samples = fetched if self.is_batch else [fetched]
        files = tuple(sample.file for sample in samples if type(sample) is Placeholder)
        if not files:
            return self.collate(fetched)
        good = [row for row, sample in enumerate(samples) if type(sample) is not Placeholder]
        if self.policy == "replace":
            replaced = self._replaced(samples, good, files)
            return PartialBatch(self._collated(replaced), DecodeReport(0, len(files), dict(files)))
        loss = DecodeReport(len(files), 0, dict(files))
        if good:
            return PartialBatch(self._collated([samples[row] for row in good]), loss)
        # A collate function may return data even for a batch without samples.
        of_no_samples = getattr(self.collate, "of_no_samples", None)
        return PartialBatch(None if of_no_samples is None else of_no_samples(), loss, is_empty=True)

    def _collated(self, samples: list[Any]) -> Any:
        return self.collate(samples if self.is_batch else samples[0])

    def _replaced(self, samples: list[Any], good: list[int], files: tuple[BrokenFile, ...]) -> list[Any]:
        if good:
            instead = (next((other for other in good if other > row), good[0]) for row in range(len(samples)))
            pairs = zip(samples, instead, strict=True)
            return [_again(samples[row]) if type(sample) is Placeholder else sample for sample, row in pairs]
        sample = self.next_good()
        if sample is None:
            raise_without_samples(files[0])
        return [sample, *(_again(sample) for _ in samples[1:])]


def raise_without_samples(first: tuple[str, str]) -> NoReturn:
    """Raises the DecodeError of a pass without any good sample; `first` is path and reason of its first broken file."""
    path, reason = first
    raise DecodeError(path, -1, f"{reason}; not one sample of this pass could be made")


def _again(sample: Any) -> Any:
    """A sample again, in new containers: a collate function may write to them."""
    return copy.copy(sample) if isinstance(sample, (dict, list)) else sample


# --- streams


class _Reading(threading.local):
    """The state of a thread while it reads a sample of a guarded stream."""

    is_on = False
    opened = 0  # number of images opened, broken or not
    first: tuple[BrokenFile, Any] | None = None  # the first placeholder, and the random generators before it
    read: BrokenFile | None = None  # the file whose placeholder's pixels were read first


READING = _Reading()


def is_reading_stream() -> bool:
    """Whether this thread is reading a sample of a guarded stream, so that a broken file becomes a placeholder."""
    return READING.is_on


def note_opened() -> None:
    """Counts an image that is opened for the sample under way."""
    READING.opened += 1


def note_placeholder(file: BrokenFile) -> None:
    """Notes the placeholder of a broken file, for the sample under way."""
    if READING.first is None:
        READING.first = file, global_draws()


def note_pixels(file: BrokenFile) -> None:
    """Notes that code reads a placeholder's pixels; outside a stream, where they would pass for an image, it raises."""
    if not READING.is_on:
        raise DecodeError(file.path, -1, file.reason)
    READING.read = READING.read or file


class GuardedStream:
    """The iterator of an iterable dataset; returns a `Placeholder` for each sample with a placeholder image.

    A sample whose code read the pixels of a placeholder is one too. It can be told which sample that is as long as
    every sample opens the same number of images, because then the stream holds no sample back, as a shuffle buffer
    does. The samples after it draw the same random numbers as if the dataset's code had left the file out.
    """

    def __init__(self, samples: Iterator[Any], keeps_last: bool) -> None:
        self.samples = samples
        self.keeps_last = keeps_last
        self.last: Any = None
        self.ahead: list[Any] = []
        self.count = 0
        self.is_searched = False  # a placeholder image was given, so samples are searched for it
        self.images_of_a_sample = 0
        self.is_in_step = True  # every sample so far has opened as many images as the first: none is held back
        self.read_at_first: BrokenFile | None = None  # file whose placeholder's pixels were read for the first sample

    def __iter__(self) -> GuardedStream:
        return self

    def __next__(self) -> Any:
        sample = self.ahead.pop(0) if self.ahead else self._read()
        if self.keeps_last and type(sample) is not Placeholder:
            self.last = sample
        return sample

    def next_good(self) -> Any:
        """The next good sample, which the stream returns again later; at its end, the last good one."""
        held: list[Any] = []
        for sample in self:
            held.append(sample)
            if type(sample) is not Placeholder:
                break
        self.ahead = held + self.ahead
        return self.last

    def _read(self) -> Any:
        outer = vars(READING).copy()  # the state of a stream that reads this one
        vars(READING).update(is_on=True, opened=0, first=None, read=None)
        try:
            sample = next(self.samples)
            opened, first, read = READING.opened, READING.first, READING.read
        finally:
            vars(READING).clear()
            vars(READING).update(outer)
        self.count += 1
        if self.count == 1:
            self.images_of_a_sample, self.read_at_first = opened, read
        self.is_in_step = self.is_in_step and opened == self.images_of_a_sample
        unknown = None if self.is_in_step else read or self.read_at_first
        if unknown is not None:
            why = (
                f"{unknown.reason}; its pixels were read by code of a stream that opens more images for some samples "
                "than for others, so which sample is broken cannot be told: catch the error there"
            )
            raise DecodeError(unknown.path, -1, why)
        self.is_searched = self.is_searched or first is not None
        sources = [getattr(leaf, "lazy_source", None) for leaf in leaves(sample)] if self.is_searched else []
        files: list[BrokenFile] = [found for one in sources if (found := getattr(one, "broken_file", None))]
        files += [] if read is None else [read]
        if not files:
            return sample
        if first is not None and any(file is first[0] for file in files):
            set_global_draws(first[1])
        worker = get_worker_info()
        whose = "a stream" if worker is None else f"the stream of worker {worker.id}"
        return Placeholder(files[0]._replace(path=files[0].path or f"sample {self.count - 1} of {whose}"))
