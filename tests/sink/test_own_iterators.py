"""DataLoader subclasses that make or keep their iterators in their own way: the same batches and the same guarantees."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torch_sink.errors import SinkTimeout
from torch_sink.sink import SinkLoader

from .conftest import wait_for
from .test_matches_plain_loop import Augmented, train


class Generated(DataLoader):
    """`__iter__` is a generator, which starts the workers at its first `next`."""

    def __iter__(self) -> Iterator[object]:
        yield from super().__iter__()


class Repeated:
    """A sampler without an end."""

    def __init__(self, sampler: object) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[object]:
        while True:
            yield from iter(self.sampler)


class Kept(DataLoader):
    """Keeps one iterator, and its workers, for all passes, like timm's MultiEpochsDataLoader."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        vars(self)["batch_sampler"] = Repeated(self.batch_sampler)
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[object]:
        for _ in range(len(self)):
            yield next(self.iterator)


class Wrapping(DataLoader):
    """Holds another DataLoader and is one batch behind it, like accelerate's DataLoaderShard."""

    def __init__(self, *args: object, **options: object) -> None:
        self.inner = DataLoader(*args, **options)

    def __getattr__(self, name: str) -> object:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __iter__(self) -> Iterator[object]:
        batches = iter(self.inner)
        current = next(batches)
        for following in batches:
            yield current
            current = following
        yield current


KINDS = [Generated, Kept, Wrapping]


class Slow(Dataset):
    """Batches that do not share files with the worker, so that its death takes none with it.

    They take a moment, as user code does: a worker is killed, or left, before it has made them all.
    """

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        time.sleep(0.005)
        return index


def unchanged(samples: list[int]) -> list[int]:
    return samples


def stateful(*args: object, **options: object) -> DataLoader:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the extra 'stateful' (torchdata)")
    return module.StatefulDataLoader(*args, **options)


def make(kind: type, dataset: object, **options: object) -> SinkLoader:
    return SinkLoader(kind(dataset, batch_size=4, num_workers=2, **options))


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
@pytest.mark.parametrize("kind", KINDS)
def test_passes_and_a_restart(kind: type, persistent: bool) -> None:
    expected = [list(range(i, i + 4)) for i in range(0, 40, 4)]
    with make(kind, range(40), collate_fn=unchanged, persistent_workers=persistent) as loader:
        assert [list(loader), list(loader)] == [expected, expected]
        next(iter(loader))
        loader.restart()
        assert list(loader) == expected
        assert loader.stats().batches == 31
    if not isinstance(loader.loader, Kept):
        assert "_get_iterator" not in vars(loader.loader)
        assert list(loader.loader) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_loader_is_freed_at_once(kind: type) -> None:
    """Not by garbage collection, which would free the workers' queues first, and then wait in vain for each worker."""
    gc.disable()
    try:
        with make(kind, range(8), collate_fn=unchanged, persistent_workers=True) as loader:
            list(loader)
        inner = weakref.ref(loader.loader)
        del loader
        assert inner() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("first", [0, 1], ids=["closed in order", "closed out of order"])
@pytest.mark.parametrize("kind", [Generated, Wrapping, stateful])
def test_other_loops_over_the_same_loader_are_plain_ones(kind: type, first: int) -> None:
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    source = kind(range(12), batch_size=4, num_workers=1, collate_fn=unchanged)
    before = dict(vars(source))
    loaders = [SinkLoader(source), SinkLoader(source)]
    plain = iter(source)
    seen = [next(plain)]
    for loader in loaders:
        assert list(loader) == expected
    assert seen + list(plain) == expected, "the end of another loop's pass stopped its workers"
    for closed, left in ((loaders.pop(first), loaders), (loaders.pop(), [])):
        closed.close()
        assert [list(one) for one in (source, *left)] == [expected] * (1 + len(left))
    assert vars(source).keys() == before.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_is_an_error_in_order_and_the_loader_can_go_on(kind: type) -> None:
    others = psutil.Process().children()
    with make(kind, Slow(), collate_fn=unchanged) as loader:
        batches = iter(loader)
        seen = [next(batches)[0]]
        new = [child for child in psutil.Process().children() if child not in others]
        workers = [child for child in new if "multiprocessing" not in " ".join(child.cmdline())]
        started = time.monotonic()
        workers[-1].kill()
        with pytest.raises(RuntimeError, match=f"{workers[-1].pid}.*killed by SIGKILL"):
            seen.extend(batch[0] for batch in batches)
        assert time.monotonic() - started < 10
        assert seen == list(range(0, 4 * len(seen), 4))
        assert next(iter(loader)) == [0, 1, 2, 3]


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "unseeded"])
def test_a_generator_draws_in_the_plain_loops_order(seeded: bool) -> None:
    def fresh() -> Generated:
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(3) if seeded else None
        return Generated(Augmented(), batch_size=4, shuffle=True, num_workers=2, generator=generator)

    expected = train(fresh())
    with SinkLoader(fresh()) as loader:
        actual = train(loader)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("position", [3, 13])
def test_resume_gives_the_samples_that_would_have_come(position: int, num_workers: int) -> None:
    def fresh() -> SinkLoader:
        generator = torch.Generator().manual_seed(3)
        source = Generated(
            range(40), batch_size=4, shuffle=True, num_workers=num_workers, generator=generator, collate_fn=unchanged
        )
        return SinkLoader(source, sink_size=20)

    def consume(loader: SinkLoader, count: int) -> list[object]:
        batches = iter(loader)
        return [next(batches) for _ in range(count)]

    with fresh() as loader:
        consume(loader, position)
        state = loader.state_dict()
        expected = consume(loader, 20 - position)
    assert any("__iter__ of its own" in note for note in state["not_covered"])
    with fresh() as loader:
        loader.load_state_dict(state)
        assert consume(loader, 20 - position) == expected


def test_a_kept_iterator_that_was_closed_is_made_anew() -> None:
    source = Kept(range(8), batch_size=4, num_workers=1, collate_fn=unchanged)
    for _ in range(2):
        with SinkLoader(source) as loader:
            assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_closing_while_a_generator_waits_is_bounded() -> None:
    before = set(threading.enumerate())
    loader = make(Generated, Slow(), collate_fn=unchanged)
    next(iter(loader))
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 5
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("torch_sink")]


class Private:
    """What a thread keeps to itself; says when it is destroyed in another process than its own."""

    def __init__(self, marker: Path) -> None:
        self.marker, self.pid = marker, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            self.marker.touch()


@pytest.mark.parametrize("kind", [Generated, Wrapping])
def test_workers_are_started_in_the_consumer_s_thread(kind: type, tmp_path: Path) -> None:
    """A process forked in another thread destroys what this one keeps to itself."""
    started: list[threading.Thread] = []

    class Starting(kind):  # type: ignore[misc, valid-type]
        def _get_iterator(self) -> object:
            started.append(threading.current_thread())
            return super()._get_iterator()

    kept = threading.local()
    kept.private = Private(tmp_path / "destroyed")
    source = Starting(range(8), batch_size=4, num_workers=1, multiprocessing_context="fork", collate_fn=unchanged)
    with SinkLoader(source) as loader:
        assert [list(loader), list(loader)] == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2
    if kind is Generated:
        assert started == [threading.current_thread()] * 2
    assert not (tmp_path / "destroyed").exists()


def names_of_threads(samples: list[int]) -> list[str]:
    return [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("kind", [Generated, Wrapping])
def test_workers_watch_for_the_end_of_their_parent(kind: type) -> None:
    with make(kind, range(8), collate_fn=names_of_threads) as loader:
        assert all("torch_sink-parent" in names for names in loader)


def collate_unpicklable(samples: list[int]) -> object:
    return (lambda: samples) if samples[0] == 4 else samples


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", [Generated, Wrapping, stateful])
def test_a_batch_that_cannot_be_sent_is_an_error_in_its_place(kind: type) -> None:
    seen = []
    with make(kind, range(12), collate_fn=collate_unpicklable) as loader:
        with pytest.raises(RuntimeError, match="cannot be sent to the training process"):
            seen.extend(loader)
        assert seen == ([] if kind is Wrapping else [[0, 1, 2, 3]]), "Wrapping is a batch behind"


class Chained(DataLoader):
    """Starts workers a second time in the middle of a pass."""

    def __iter__(self) -> Iterator[object]:
        yield from super().__iter__()
        yield from super().__iter__()


def test_workers_that_are_started_in_the_middle_of_a_pass() -> None:
    with make(Chained, range(8), collate_fn=unchanged) as loader:
        assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


class Unstartable(Generated):
    error: type[BaseException] = OSError

    def _get_iterator(self) -> object:
        error, self.error = self.error, None
        if error is not None:
            raise error("no process can be started")
        return super()._get_iterator()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_workers_that_cannot_be_started(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unstartable, "error", error)
    with make(Unstartable, range(8), collate_fn=unchanged) as loader:
        batches = iter(loader)
        with pytest.raises(error, match="no process can be started"):
            next(batches)
        assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Late(Generated):
    """Comes to the start of its workers when nobody waits for a batch any more."""

    def __iter__(self) -> Iterator[object]:
        self.may_start.wait(20)
        yield from super().__iter__()


@pytest.mark.parametrize("ending", ["closed", "asked again"])
def test_a_start_for_which_the_consumer_does_not_wait(ending: str) -> None:
    with make(Late, range(8), collate_fn=unchanged) as loader:
        loader.loader.may_start = threading.Event()
        loader._traversal.timeout_seconds = 0.1
        batches = iter(loader)
        with pytest.raises(SinkTimeout):
            next(batches)
        loader.loader.may_start.set()
        wait_for(loader._producer, lambda: loader._producer.request is not None)
        started = time.monotonic()
        if ending == "asked again":
            loader._traversal.timeout_seconds = 60
            assert list(batches) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert time.monotonic() - started < 5
