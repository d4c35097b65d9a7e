"""Slabs under loaders with an `__iter__` of their own: used where that is safe, page-locked where nobody else copies."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy
import psutil
import pytest
import torch
from fake_cuda import FakeCuda
from torch.utils.data import DataLoader

from torch_sink.sink import SinkLoader
from torch_sink.sink.loaders import OwnIteratorSource

from .test_own_iterators import Chained, Generated, Kept, Repeated, Wrapping, stateful
from .test_slabs import Vectors, files_in_shared_memory, is_as_made, no_slab_is_left, slab_files  # noqa: F401

pytestmark = pytest.mark.once_on_oldest


class KeptFromTheFirstPass(DataLoader[Any]):
    """Keeps one iterator for all passes, which is made when it is first needed, as in newer releases of timm."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        vars(self)["batch_sampler"] = Repeated(self.batch_sampler)
        self.iterator = None

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[Any]:
        if self.iterator is None:
            self.iterator = super().__iter__()
        for _ in range(len(self)):
            yield next(self.iterator)


class Behind:
    """Around a DataLoader, and none itself, like timm's PrefetchLoader."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.loader = DataLoader(*args, **options)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


KINDS = [Generated, KeptFromTheFirstPass, Wrapping, Behind]


def received(loader: SinkLoader) -> int:
    """Batches that came in slabs."""
    return loader._source.slabs.batches_received


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_come_in_slabs_and_are_those_of_the_loader(on_a_ring: None, kind: Any, persistent: bool) -> None:
    with SinkLoader(kind(Vectors(), 4, num_workers=2, persistent_workers=persistent)) as loader:
        for _ in range(3):
            assert all([is_as_made(batch, number) for number, batch in enumerate(loader)])
        assert received(loader) > 2 * 24  # all but the first ones


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", [Generated, Wrapping, Behind, stateful])
def test_batches_of_other_loops_over_the_loader_do_not_lie_in_slabs(on_a_ring: None, kind: Any) -> None:
    """Slabs may be page-locked: who copies from one beside the host has to hold it until the copy is done."""
    source = kind(Vectors(), 4, num_workers=1)
    with SinkLoader(source) as loader:
        list(loader)
        before = received(loader)
        assert all([is_as_made(batch, number) for number, batch in enumerate(source)])
        assert received(loader) == before > 0


def test_workers_that_ran_before_go_on_as_they_are(on_a_ring: None) -> None:
    with SinkLoader(Kept(Vectors(), 4, num_workers=1)) as loader:
        assert all([is_as_made(batch, number) for number, batch in enumerate(loader)])
        assert received(loader) == 0
        next(iter(loader))
        loader.restart()  # which takes new ones
        assert all([is_as_made(batch, number) for number, batch in enumerate(loader)])
        assert received(loader) > 12


def test_workers_beside_those_that_use_the_slabs_take_the_ordinary_way(on_a_ring: None) -> None:
    class Twice(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from (batch for both in zip(super().__iter__(), super().__iter__(), strict=True) for batch in both)

    with SinkLoader(Twice(Vectors(), 4, num_workers=1)) as loader:
        assert all([is_as_made(batch, number // 2) for number, batch in enumerate(loader)])
        assert 12 < received(loader) <= 24


def test_workers_that_follow_others_take_their_slabs_over(on_a_ring: None) -> None:
    with SinkLoader(Chained(Vectors(), 4, num_workers=1)) as loader:
        assert all([is_as_made(batch, number % 24) for number, batch in enumerate(loader)])
        assert received(loader) > 36


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_leaves_nothing_and_the_next_pass_uses_slabs_again(on_a_ring: None, kind: Any) -> None:
    with SinkLoader(kind(Vectors(400), 4, num_workers=2)) as loader:
        batches = iter(loader)
        assert all([is_as_made(next(batches), number) for number in range(30)])
        before = received(loader)
        pids = [worker.pid for worker in loader._source.slab_writers]
        psutil.Process(pids[-1]).kill()
        with pytest.raises(RuntimeError, match=f"{pids[-1]}"):
            list(batches)
        del batches
        gc.collect()
        assert files_in_shared_memory(*pids) == []
        again = iter(loader)
        assert all([is_as_made(next(again), number) for number in range(30)])
        assert received(loader) > before > 0


class Moving(Generated):
    """Brings its batches to the device itself, and lets go of them before the copies are done."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield [leaf.to("cuda", non_blocking=True) for leaf in batch]


@pytest.mark.parametrize("is_locked", [False, True])
def test_memory_that_the_loader_s_own_code_copies_from_is_not_page_locked(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, is_locked: bool
) -> None:
    if is_locked:
        stock = OwnIteratorSource.make_slabs
        monkeypatch.setattr(
            OwnIteratorSource, "make_slabs", lambda source, count: (stock(source, count), source.slabs)[1]
        )
    with SinkLoader(Moving(Vectors(), 4, num_workers=1), slots=2) as loader:
        seen = [[leaf * 1 for leaf in batch] for batch in loader]
        assert received(loader) > 12
        assert bool(fake_cuda.registered) == is_locked
    right = [is_as_made([leaf.cpu() for leaf in batch], number) for number, batch in enumerate(seen)]
    assert all(right) != is_locked


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_a_plain_loop_meets_no_page_locked_slab(fake_cuda: FakeCuda, persistent: bool) -> None:
    """Persistent workers are the loader's: a plain loop goes on with those that a SinkLoader started."""
    source = stateful(Vectors(), 4, num_workers=1, persistent_workers=persistent)
    with SinkLoader(source) as loader:
        seen = [[leaf.cpu() for leaf in batch] for batch in loader]
        assert all([is_as_made(batch, number) for number, batch in enumerate(seen)])
        assert bool(fake_cuda.registered) != persistent
        batches = [getattr(batch, "batch", batch) for batch in source]
        assert not any(leaf.is_pinned() for batch in batches for leaf in batch)


def collate_in_a_buffer_of_its_own(samples: Any) -> Any:
    numbers = torch.from_numpy(numpy.array([number for _, number in samples]))
    vectors = torch.from_numpy(numpy.stack([vector.numpy() for vector, _ in samples]))
    return vectors, numbers


def collate_views(samples: Any) -> Any:
    vectors, numbers = collate_in_a_buffer_of_its_own(samples)
    return vectors, numbers, vectors[:2]


@pytest.mark.parametrize(("collate", "in_slabs"), [(collate_in_a_buffer_of_its_own, True), (collate_views, False)])
def test_what_is_collated_by_other_means_is_sent_in_a_slab(on_a_ring: None, collate: Any, in_slabs: bool) -> None:
    """Large enough: small tensors are sent by value. Views of one another still share memory, as they did."""
    with SinkLoader(DataLoader(Vectors(width=lambda _: 5000), 4, num_workers=1, collate_fn=collate)) as loader:
        for number, batch in enumerate(loader):
            assert is_as_made(batch, number)
        assert (loader._slots.slabs.batches_received > 12) == in_slabs
