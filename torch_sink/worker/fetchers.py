"""torch's DataLoader with broken files: guarded fetchers, and iterators without lost samples.

The image backend replaces torch's functions by `create_fetcher` and `begin_iterator`, for all loaders of a process and
for its workers. A `SinkLoader` guards its iterator and its workers itself, also without the backend, and does its own
counting.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch.utils.data import _DatasetKind, get_worker_info
from torch.utils.data._utils import fetch

from torch_sink.damage.guarded import GuardedDataset, raise_without_samples, settled
from torch_sink.damage.report import (
    IN_A_STREAM,
    DecodeReport,
    Policy,
    add_to_report,
    decode_errors,
    name_file,
    policy_of_thread,
    set_policy,
)
from torch_sink.errors import add_hints
from torch_sink.worker.batch import WorkerBatch


class _Guarded:
    """Base of torch's fetchers with a guard: a fetch uses guarded samples and a guarded collate function.

    An error of a file that it raises has the path in a note; under the policy "raise" that is all.
    The fetcher's attributes stay as they are, because torchdata reads and replaces them.
    """

    policy: Policy
    finish: Callable[[Any], Any] | None = None  # what is done to each batch
    advice = ""  # for the error of a broken file

    def fetch(self: Any, index: Any) -> Any:
        try:
            if self.policy == "raise":
                made = type(self).stock.fetch(self, index)
            else:
                with policy_of_thread(self.policy):
                    made = self._fetch(index)
            return made if self.finish is None else self.finish(made)
        except Exception as error:
            name_file(error, self.advice)
            raise


class _GuardedMapFetcher(_Guarded, fetch._MapDatasetFetcher):
    stock = fetch._MapDatasetFetcher

    def _fetch(self, index: Any) -> Any:
        dataset = GuardedDataset(self.dataset)
        guarded: Any = SimpleNamespace(**{**vars(self), "dataset": dataset, "collate_fn": lambda fetched: fetched})
        fetched = self.stock.fetch(guarded, index)
        samples, loss = settled(fetched if self.auto_collation else [fetched], self.policy, dataset.next_good)
        if loss is None:
            return self.collate_fn(fetched)
        if samples:
            made = self.collate_fn(samples if self.auto_collation else samples[0])
        else:  # that of a worker may have something to tell all the same
            made = getattr(self.collate_fn, "of_no_samples", lambda: None)()
        sent = made if type(made) is WorkerBatch else WorkerBatch(made)
        sent.loss, sent.is_empty = loss, not samples
        return sent


class _GuardedIterableFetcher(_Guarded, fetch._IterableDatasetFetcher):
    """The policy has files checked where the dataset opens them, but an exception there ends its generator."""

    stock, advice = fetch._IterableDatasetFetcher, IN_A_STREAM

    def _fetch(self, index: Any) -> Any:
        return self.stock.fetch(self, index)


_GUARDED = {kind.stock: kind for kind in (_GuardedMapFetcher, _GuardedIterableFetcher)}


def guard_fetcher(fetcher: Any, policy: Policy) -> None:
    """Makes one of torch's fetchers name broken files; of samples by index also skip or replace them.

    A batch that has lost some is then a `WorkerBatch`.
    """
    if type(fetcher) in _GUARDED:
        fetcher.__class__ = _GUARDED[type(fetcher)]
        fetcher.policy = policy


def create_fetcher(stock: Callable[..., Any], finish: Callable[[Any], Any] | None = None) -> Any:
    """Stand-in for `_DatasetKind.create_fetcher`, which every iterator and every worker calls once per pass.

    `finish` is called with each batch that is made outside of a worker, where `WorkerCollate.finish` is.
    """

    @functools.wraps(stock)
    def create(*args: Any, **kwargs: Any) -> Any:
        fetcher = stock(*args, **kwargs)
        guard_fetcher(fetcher, decode_errors.policy)
        if type(fetcher) in _GUARDED.values() and get_worker_info() is None:
            fetcher.finish = finish
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
            if type(batch) is not WorkerBatch or batch.loss is None:
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
        if decode_errors.policy != "raise":
            self._next_data = _NextData(self)

    return __init__


def give_worker_batches(iterator: Any, policy: Policy) -> None:
    """Makes an iterator return `WorkerBatch`es as they are."""
    vars(iterator).pop("_next_data", None)  # set by `begin_iterator`
    guard_fetcher(getattr(iterator, "_dataset_fetcher", None), policy)
