"""torch's DataLoader with broken files: placeholders in its fetchers, whole batches out of its iterators.

Two ways lead here. The image backend puts `create_fetcher` and `begin_iterator` in the place of torch's own, for all
loaders of a process and for its workers. A `LoaderGuard` guards what a `SinkLoader` has made, also without the backend.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch.utils.data import _DatasetKind, dataloader
from torch.utils.data._utils import fetch

from torch_sink.damage.report import (
    DecodeReport,
    add_to_report,
    current_policy,
    or_current,
    policy_of_thread,
    set_policy,
)
from torch_sink.damage.samples import GuardedCollate, GuardedDataset, GuardedStream, PartialBatch, raise_without_samples


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


class GuardedInit:
    """A `worker_init_fn` that guards its worker, whose fetcher is made after it."""

    def __init__(self, init: Callable[[int], None] | None, policy: str) -> None:
        self.init, self.policy = init, policy

    def __call__(self, worker: int) -> None:
        set_policy(self.policy)
        stock = _DatasetKind.create_fetcher
        if not hasattr(stock, "__wrapped__"):
            setattr(_DatasetKind, "create_fetcher", create_fetcher(stock))  # noqa: B010 - a method, to a type checker
        if self.init is not None:
            self.init(worker)


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

    What is lost goes to the `guard`; of a plain loader, it is counted in the report and logged at the end of the pass.
    """

    def __init__(self, iterator: Any, guard: LoaderGuard | None = None) -> None:
        self.iterator = weakref.ref(iterator)
        self.guard = guard
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
            if self.guard is not None:
                self.guard.note(batch)
            else:
                self.of_pass.add(batch.loss)
                add_to_report(batch.loss)
            if not batch.is_empty:
                return batch.batch


def begin_iterator(stock: Callable[..., None]) -> Callable[..., None]:
    """Stand-in for `_BaseDataLoaderIter.__init__`: the iterator gives what is left of each batch, and counts."""

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if current_policy() != "raise":
            self._next_data = _NextData(self)

    return __init__


class LoaderGuard:
    """Guards the iterators that one `SinkLoader` has made, whether or not the image backend is on."""

    def __init__(self) -> None:
        self.policy = "raise"  # of the SinkLoader; this leaves it to the image backend
        self.loss = DecodeReport()  # since somebody asked
        self.left_out: list[Any] = []  # what is left of each batch without samples

    def note(self, batch: PartialBatch) -> None:
        """A batch has come."""
        self.loss += batch.loss
        if batch.is_empty:
            self.left_out.append(batch.batch)

    def take(self) -> tuple[DecodeReport, list[Any]]:
        """What was lost, and what is left of each batch without samples; from then on nothing was."""
        taken = self.loss, self.left_out
        self.loss, self.left_out = DecodeReport(), []
        return taken

    @contextmanager
    def making_iterator(self, loader: Any) -> Iterator[None]:
        """While `loader` makes an iterator and starts its workers."""
        policy, init = or_current(self.policy), loader.worker_init_fn
        with policy_of_thread(policy):
            if policy != "raise" and loader.num_workers:
                loader.worker_init_fn = GuardedInit(init, policy)
            try:
                yield
            finally:
                loader.worker_init_fn = init

    def add(self, iterator: Any) -> None:
        """Guards an iterator; what is no DataLoader's own is left alone."""
        policy = or_current(self.policy)
        if policy == "raise" or not isinstance(iterator, dataloader._BaseDataLoaderIter):
            return
        guard_fetcher(getattr(iterator, "_dataset_fetcher", None), policy)
        iterator._next_data = _NextData(iterator, self)  # type: ignore[method-assign]
