"""Samples on their way to their batch: a placeholder in the place of each that could not be made."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from torch.utils.data._utils import pin_memory

from torch_sink.common.random_state import global_draws, set_global_draws
from torch_sink.damage.cause import BrokenFile, broken_file
from torch_sink.damage.report import Loss
from torch_sink.errors import DecodeError


class Placeholder(NamedTuple):
    """In the place of a sample that could not be made."""

    file: BrokenFile


class PartialBatch(NamedTuple):
    """What a loader's worker makes of a batch with broken files: the samples that are left, and what is missing."""

    batch: Any
    loss: Loss
    is_empty: bool = False  # nothing is left, and `batch` is none

    def pin_memory(self, device: str | None = None) -> PartialBatch:
        """Called by the DataLoader's pinning thread."""
        return self._replace(batch=pin_memory.pin_memory(self.batch, device))  # type: ignore[no-untyped-call]


class GuardedDataset:
    """A map-style dataset that gives a placeholder for a sample whose file is broken.

    The draws of the samples after it are those of a loop that catches stock code's exception and goes on.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.first_after = 0  # where to look for what replaces a whole batch

    def __getitem__(self, index: Any) -> Any:
        self._note(index)
        try:
            return self.dataset[index]
        except Exception as error:
            return self._placeholder(error, index)

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        at_once = getattr(self.dataset, "__getitems__", None)
        if not at_once:
            return [self[index] for index in indices]
        for index in indices:
            self._note(index)
        before = global_draws()
        try:
            return at_once(indices)
        except Exception as error:
            self._placeholder(error, indices)  # raises what is about something else
        set_global_draws(before)
        return [self._one_of(at_once, index) for index in indices]

    def _one_of(self, at_once: Callable[[list[Any]], list[Any]], index: Any) -> Any:
        try:
            (sample,) = at_once([index])
            return sample
        except Exception as error:
            return self._placeholder(error, index)

    def _placeholder(self, error: Exception, index: Any) -> Placeholder:
        file = broken_file(error, f"sample {index} of {type(self.dataset).__name__}")
        if file is None:
            raise error
        return Placeholder(file)

    def _note(self, index: Any) -> None:
        try:
            self.first_after = operator.index(index) + 1
        except TypeError:
            self.first_after = -1

    def next_good(self) -> Any:
        """The next sample that can be made, by index; None where there is none. It draws nothing that others miss."""
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


class GuardedCollate:
    """A `collate_fn` without the placeholders among its samples.

    `is_batch` says whether the loader's own function gets lists of samples, and not one sample; `next_good` gives a
    sample that replaces all others of a batch, or None.
    """

    def __init__(
        self, collate: Callable[[Any], Any], policy: str, is_batch: bool, next_good: Callable[[], Any]
    ) -> None:
        self.collate, self.policy, self.is_batch, self.next_good = collate, policy, is_batch, next_good

    def __call__(self, fetched: Any) -> Any:
        samples = fetched if self.is_batch else [fetched]
        files = tuple(sample.file for sample in samples if type(sample) is Placeholder)
        if not files:
            return self.collate(fetched)
        good = [row for row, sample in enumerate(samples) if type(sample) is not Placeholder]
        if self.policy == "replace":
            samples = self._replaced(samples, good) if good else self._all_replaced(len(samples), files)
            return PartialBatch(self._collated(samples), Loss(0, len(files), files))
        loss = Loss(len(files), 0, files)
        if good:
            return PartialBatch(self._collated([samples[row] for row in good]), loss)
        # A collate function may have something to tell about each batch.
        of_no_samples = getattr(self.collate, "of_no_samples", None)
        return PartialBatch(None if of_no_samples is None else of_no_samples(), loss, is_empty=True)

    def _collated(self, samples: list[Any]) -> Any:
        return self.collate(samples if self.is_batch else samples[0])

    def _replaced(self, samples: list[Any], good: list[int]) -> list[Any]:
        return [
            samples[row] if row in good else again(samples[next((other for other in good if other > row), good[0])])
            for row in range(len(samples))
        ]

    def _all_replaced(self, count: int, files: tuple[BrokenFile, ...]) -> list[Any]:
        sample = self.next_good()
        if sample is None:
            raise_without_samples(files[0])
        return [sample, *(again(sample) for _ in range(count - 1))]


def raise_without_samples(first: tuple[str, str]) -> NoReturn:
    """Raises that there is no good sample at all; `first` is path and reason of a broken file."""
    path, reason = first
    raise DecodeError(path, -1, f"{reason}; not one sample of this pass could be made")


def again(sample: Any) -> Any:
    """A sample once more, with containers of its own: a collate function may write to them."""
    return copy.copy(sample) if isinstance(sample, (dict, list)) else sample
