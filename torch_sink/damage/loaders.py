"""torch's DataLoader with broken files: placeholders in its fetchers, whole batches out of its iterators.

The image backend puts `create_fetcher` and `begin_iterator` in the place of torch's own, for all loaders of a process
and for its workers. A `SinkLoader` guards its own iterator and workers, also without the backend, and counts itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch.utils.data import _DatasetKind
from torch.utils.data._utils import fetch

from torch_sink.damage.openers import place_openers
from torch_sink.damage.report import (
    DecodeReport,
    add_to_report,
    current_policy,
    policy_of_thread,
    set_policy,
)
from torch_sink.damage.samples import GuardedCollate, GuardedDataset, GuardedStream, PartialBatch, raise_without_samples
from torch_sink.errors import add_hints


class _Guarded:
    """Part of a fetcher of torch's: for the time of a call it has other samples and another collate function.

    Its own stay in their places, because torchdata looks at them and puts others there.
    """

    policy: str

    def fetch(self: Any, index: Any) -> Any:
        name, samples = self._samples()
        collate = GuardedCollate(self.collate_fn, self.policy, self.auto_collation, samples.next_good)
        guarded = SimpleNamespace(**{**vars(self), name: samples, "collate_fn": collate})
        try:
            with policy_of_thread(self.policy):
                return type(self).stock.fetch(guarded, index)
        finally:
            self.ended = getattr(guarded, "ended", False)  # a stream


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


def guard_fetcher(fetcher: Any, policy: str) -> None:
    """Makes a fetcher of torch's skip or replace samples with broken files: its batches are then `PartialBatch`es."""
    if policy != "raise" and type(fetcher) in _GUARDED:
        fetcher.__class__ = _GUARDED[type(fetcher)]
        fetcher.policy = policy


def create_fetcher(stock: Callable[..., Any]) -> Any:
    """Stand-in for `_DatasetKind.create_fetcher`, which every iterator and every worker calls once a pass."""

    @functools.wraps(stock)
    def create(*args: Any, **kwargs: Any) -> Any:
        fetcher = stock(*args, **kwargs)
        guard_fetcher(fetcher, current_policy())
        return fetcher

    return staticmethod(create)


def next_with_hints(stock: Callable[..., Any], iterator: Any) -> Any:
    """For `_BaseDataLoaderIter.__next__`: errors of the dataset say what to do, as those of a `SinkLoader` do."""
    try:
        return stock(iterator)
    except StopIteration:
        raise
    except Exception as error:
        add_hints(error)
        raise


def guard_worker(policy: str) -> None:
    """In a worker whose fetcher is not made yet: it skips or replaces samples with broken files."""
    if policy == "raise":
        return
    set_policy(policy)
    stock = _DatasetKind.create_fetcher
    if not hasattr(stock, "__wrapped__"):
        setattr(_DatasetKind, "create_fetcher", create_fetcher(stock))  # noqa: B010 - a method, to a type checker


# --- what comes out of iterators


def end_pass(lost: DecodeReport, is_empty: bool) -> None:
    """Tells what a pass lost.

    Raises:
        DecodeError: the pass gave no batch at all, because all files are broken.
    """
    if lost and is_empty:
        raise_without_samples(next(iter(lost.files.items())))
    if lost:
        lost.log()


class _NextData:
    """Stands in for an iterator's `_next_data`; holds it weakly, because a cycle would keep its workers.

    What is lost is counted in the report, and logged at the end of the pass.
    """

    def __init__(self, iterator: Any) -> None:
        self.iterator = weakref.ref(iterator)
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
    """Stand-in for `_BaseDataLoaderIter.__init__`: the iterator gives what is left of each batch."""

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if current_policy() != "raise":
            self._next_data = _NextData(self)

    return __init__


def give_partial_batches(iterator: Any, policy: str) -> None:
    """Makes an iterator give `PartialBatch`es as they are, also those that its worker processes send."""
    vars(iterator).pop("_next_data", None)  # of `begin_iterator`
    guard_fetcher(getattr(iterator, "_dataset_fetcher", None), policy)
