"""torch's DataLoader with broken files: guarded fetchers, stand-ins that open images, iterators without lost samples.

The image backend replaces torch's functions by `create_fetcher` and `begin_iterator`, for all loaders of a process and
for its workers. A `SinkLoader` guards its iterator and its workers itself, also without the backend, and does its own
counting.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch.utils.data import _DatasetKind
from torch.utils.data._utils import fetch

from torch_sink.common.patches import Patches
from torch_sink.damage.report import (
    BrokenFile,
    DecodeReport,
    Policy,
    add_to_report,
    broken_file,
    current_policy,
    name_file,
    policy_of_thread,
    set_policy,
)
from torch_sink.damage.samples import (
    GuardedCollate,
    GuardedDataset,
    GuardedStream,
    PartialBatch,
    is_reading_stream,
    note_opened,
    note_pixels,
    note_placeholder,
    raise_without_samples,
)
from torch_sink.errors import add_hints


class _Guarded:
    """Base of torch's fetchers with a guard: a fetch uses guarded samples and a guarded collate function.

    An error of a file that it raises has the path in a note; under the policy "raise" that is all.
    The fetcher's attributes stay as they are, because torchdata reads and replaces them.
    """

    policy: Policy

    def fetch(self: Any, index: Any) -> Any:
        try:
            return type(self).stock.fetch(self, index) if self.policy == "raise" else self._fetch(index)
        except Exception as error:
            name_file(error)
            raise

    def _fetch(self: Any, index: Any) -> Any:
        name, samples = self._samples()
        collate = GuardedCollate(self.collate_fn, self.policy, self.auto_collation, samples.next_good)
        guarded = SimpleNamespace(**{**vars(self), name: samples, "collate_fn": collate})
        try:
            with policy_of_thread(self.policy):
                return type(self).stock.fetch(guarded, index)
        finally:
            self.ended = getattr(guarded, "ended", False)  # set by the fetcher of an iterable dataset


class _GuardedMapFetcher(_Guarded, fetch._MapDatasetFetcher):
    stock = fetch._MapDatasetFetcher

    def _samples(self) -> tuple[str, GuardedDataset]:
        return "dataset", GuardedDataset(self.dataset)


class _GuardedIterableFetcher(_Guarded, fetch._IterableDatasetFetcher):
    stock = fetch._IterableDatasetFetcher

    def _samples(self) -> tuple[str, GuardedStream]:
        stream = vars(self).get("guarded_stream")
        if stream is None or stream.samples is not self.dataset_iter:
            stream = self.guarded_stream = GuardedStream(self.dataset_iter, keeps_last=self.policy == "replace")
            weakref.finalize(stream, place_openers().undo)
        return "dataset_iter", stream


_GUARDED = {kind.stock: kind for kind in (_GuardedMapFetcher, _GuardedIterableFetcher)}


def guard_fetcher(fetcher: Any, policy: Policy) -> None:
    """Makes one of torch's fetchers name broken files, or skip or replace their samples and return `PartialBatch`es."""
    if type(fetcher) in _GUARDED:
        fetcher.__class__ = _GUARDED[type(fetcher)]
        fetcher.policy = policy


def create_fetcher(stock: Callable[..., Any]) -> Any:
    """Stand-in for `_DatasetKind.create_fetcher`, which every iterator and every worker calls once per pass."""

    @functools.wraps(stock)
    def create(*args: Any, **kwargs: Any) -> Any:
        fetcher = stock(*args, **kwargs)
        guard_fetcher(fetcher, current_policy())
        return fetcher

    return staticmethod(create)


def next_with_hints(stock: Callable[..., Any], iterator: Any) -> Any:
    """Stand-in for `_BaseDataLoaderIter.__next__`: adds hints to errors of the dataset, as a `SinkLoader` does."""
    try:
        return stock(iterator)
    except StopIteration:
        raise
    except Exception as error:
        add_hints(error)
        raise


def guard_worker(policy: Policy) -> None:
    """Makes a worker name broken files, or skip or replace their samples; called before it makes its fetcher."""
    set_policy(policy)
    stock = _DatasetKind.create_fetcher
    if not hasattr(stock, "__wrapped__"):
        setattr(_DatasetKind, "create_fetcher", create_fetcher(stock))  # noqa: B010 - a method, to a type checker


# --- functions that open images for a stream, while the image backend is off

# Large enough for the checks of stock transforms, such as that a crop fits into the image.
PLACEHOLDER_SIZE = (1024, 1024)
_is_on = {"backend": False}
_inside = threading.local()  # `an_opener`: whether the thread is inside a stand-in, which may call another one


def set_backend(is_on: bool) -> None:
    """Sets whether the image backend, which replaces the functions that open files, is on in this process."""
    _is_on["backend"] = is_on


def place_openers() -> Patches:
    """Replaces the functions that open images by stand-ins; `undo()` of the result puts them back."""
    patches = Patches()
    patches.replace(importlib.import_module("PIL.Image"), "open", _or_placeholder)
    if "torchvision.datasets.folder" in sys.modules:
        patches.replace(sys.modules["torchvision.datasets.folder"], "pil_loader", _or_placeholder)
    return patches


def _or_placeholder(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def load(*args: Any, **kwargs: Any) -> Any:
        is_inside = getattr(_inside, "an_opener", False)
        if is_inside or _is_on["backend"] or not is_reading_stream():
            return stock(*args, **kwargs)

        def opened() -> Any:
            image = stock(*args, **kwargs)
            try:
                image.load()
            except BaseException:
                image.close()
                raise
            return image

        _inside.an_opener = True
        try:
            found = open_in_stream(opened)
        finally:
            _inside.an_opener = False
        if not isinstance(found, BrokenFile):
            return found
        note_pixels(found)  # an ordinary image cannot report when its pixels are read
        return importlib.import_module("PIL.Image").new("RGB", PLACEHOLDER_SIZE)

    return load


def open_in_stream(load: Callable[[], Any]) -> Any:
    """Calls `load` for a guarded stream, which opens and decodes; returns the broken file, which is noted, if it fails.

    An exception that came later, when the pixels are used, would end the stream.
    """
    note_opened()
    try:
        return load()
    except Exception as error:
        broken = broken_file(error, "")
        if broken is None:
            raise
    note_placeholder(broken)
    return broken


# --- iterators


def end_pass(lost: DecodeReport, is_empty: bool) -> None:
    """Logs the broken files of a pass; raises DecodeError if it had no batch at all, because all are broken."""
    if lost and is_empty:
        raise_without_samples(next(iter(lost.files.items())))
    if lost:
        lost.log()


class _NextData:
    """Stand-in for an iterator's `_next_data`, which counts lost samples in the report and logs them after the pass."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = weakref.ref(iterator)  # a cycle would keep the workers alive
        self.of_pass = DecodeReport()

    def __call__(self) -> Any:
        iterator: Any = self.iterator()
        while True:
            try:
                batch = type(iterator)._next_data(iterator)
            except StopIteration:
                lost, self.of_pass = self.of_pass, DecodeReport()
                end_pass(lost, is_empty=iterator._num_yielded == 0)
                raise
            if type(batch) is not PartialBatch:
                return batch
            self.of_pass.add(batch.loss)
            add_to_report(batch.loss)
            if not batch.is_empty:
                return batch.batch


def begin_iterator(stock: Callable[..., None]) -> Callable[..., None]:
    """Stand-in for `_BaseDataLoaderIter.__init__`: the iterator returns the samples that are left of each batch."""

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if current_policy() != "raise":
            self._next_data = _NextData(self)

    return __init__


def give_partial_batches(iterator: Any, policy: Policy) -> None:
    """Makes an iterator return `PartialBatch`es as they are, including those from worker processes."""
    vars(iterator).pop("_next_data", None)  # set by `begin_iterator`
    guard_fetcher(getattr(iterator, "_dataset_fetcher", None), policy)
