"""A dataset that puts a placeholder in the place of each sample with a broken file, and what becomes of these."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from torch_sink.common.random_state import global_draws, set_global_draws
from torch_sink.damage.report import BrokenFile, DecodeReport, Policy, broken_file
from torch_sink.errors import DecodeError


class Placeholder(NamedTuple):
    """Takes the place of a sample whose file is broken."""

    file: BrokenFile


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


def settled(samples: list[Any], policy: Policy, next_good: Callable[[], Any]) -> tuple[list[Any], DecodeReport | None]:
    """The samples without placeholders, and a report of these; None if there were none.

    Args:
        policy: "skip" leaves placeholders out; "replace" puts the next good sample in the place of each.
        next_good: returns a sample that replaces all samples of a batch, or None.
    """
    files = tuple(sample.file for sample in samples if type(sample) is Placeholder)
    if not files:
        return samples, None
    good = [row for row, sample in enumerate(samples) if type(sample) is not Placeholder]
    if policy == "skip":
        return [samples[row] for row in good], DecodeReport(len(files), 0, dict(files))
    loss = DecodeReport(0, len(files), dict(files))
    if good:
        instead = (next((other for other in good if other > row), good[0]) for row in range(len(samples)))
        pairs = zip(samples, instead, strict=True)
        return [_again(samples[row]) if type(sample) is Placeholder else sample for sample, row in pairs], loss
    sample = next_good()
    if sample is None:
        raise_without_samples(files[0])
    return [sample, *(_again(sample) for _ in samples[1:])], loss


def raise_without_samples(first: tuple[str, str]) -> NoReturn:
    """Raises the DecodeError of a pass without any good sample; `first` is path and reason of its first broken file."""
    path, reason = first
    raise DecodeError(path, -1, f"{reason}; not one sample of this pass could be made")


def _again(sample: Any) -> Any:
    """A sample again, in new containers: a collate function may write to them."""
    return copy.copy(sample) if isinstance(sample, (dict, list)) else sample
