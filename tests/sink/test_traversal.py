"""Epochs, passes and restarts."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from sink.conftest import wait_for
from sink.numbered import numbered, values
from torch_sink.errors import SinkError
from torch_sink.sink import SinkLoader, workers
from torch_sink.sink import producer as thread_producer

pytestmark = pytest.mark.halved

POLL_SECONDS = 0.05  # in place of torch_sink's, for a test


def test_batches_per_epoch_is_the_length_of_an_epoch_and_the_traversal_goes_on() -> None:
    loader = SinkLoader(numbered(5), batches_per_epoch=3)
    assert len(loader) == 3
    assert [values(loader) for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_epochs_longer_than_the_source() -> None:
    loader = SinkLoader(numbered(2), batches_per_epoch=5)
    assert values(loader) == [0, 1, 0, 1, 0]


def test_default_epoch_is_one_pass() -> None:
    loader = SinkLoader(numbered(3))
    assert len(loader) == 3
    assert [values(loader), values(loader)] == [[0, 1, 2], [0, 1, 2]]


def test_with_a_length_of_epochs_iter_after_break_gives_the_rest_then_a_new_epoch() -> None:
    loader = SinkLoader(numbered(4), batches_per_epoch=4)
    for batch in loader:
        if int(batch) == 1:
            break
    assert values(loader) == [2, 3]
    assert values(loader) == [0, 1, 2, 3]


@pytest.mark.parametrize("batches_per_epoch", [None, 3])
def test_break_at_the_last_batch_does_not_leave_an_empty_epoch(batches_per_epoch: int | None) -> None:
    loader = SinkLoader(numbered(3), batches_per_epoch=batches_per_epoch)
    for batch in loader:
        if int(batch) == 2:
            break
    assert values(loader) == [0, 1, 2]


def test_restart_drops_the_rest() -> None:
    loader = SinkLoader(numbered(4))
    batches = iter(loader)
    next(batches)
    loader.restart()
    with pytest.raises(SinkError, match="replaced by a later iter"):
        next(batches)
    assert values(loader) == [0, 1, 2, 3]


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_restart_with_workers_gives_the_plain_loop_s_later_shuffles(persistent: bool) -> None:
    """A pass that was begun early is dropped, and what it drew is taken back."""

    def make() -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.arange(12))
        options = {"num_workers": 1, "persistent_workers": persistent}
        return DataLoader(data, batch_size=3, shuffle=True, generator=generator, **options)

    plain = make()
    left = iter(plain)
    first = [next(left)[0].tolist() for _ in range(2)]
    del left
    second = [batch[0].tolist() for batch in plain]
    with SinkLoader(make(), slots=8, prefetch_next_epoch=True) as loader:
        batches = iter(loader)
        assert next(batches)[0].tolist() == first[0]
        wait_for(loader._producer, lambda: loader._producer.current is None)
        assert next(batches)[0].tolist() == first[1]
        assert len(loader._traversal.passes) == 2
        loader.restart()
        assert [batch[0].tolist() for batch in loader] == second


def test_restart_after_a_whole_pass_skips_none() -> None:
    """Whether the queue has begun the next one by then, timing decides."""
    data = TensorDataset(torch.arange(12))

    def make() -> DataLoader:
        return DataLoader(data, 3, shuffle=True, generator=torch.Generator().manual_seed(0), num_workers=1)

    plain = make()
    first, second = [[batch[0].tolist() for batch in plain] for _ in range(2)]
    with SinkLoader(make(), slots=8, prefetch_next_epoch=True) as loader:
        batches = iter(loader)
        begin = next(batches)[0].tolist()
        wait_for(loader._producer, lambda: loader._producer.current is None)
        assert [begin, *(batch[0].tolist() for batch in batches)] == first
        assert len(loader._traversal.passes) == 1
        loader.restart()
        state = loader.state_dict()
        assert (state["pass_number"], state["epoch"], state["batch_in_pass"]) == (1, 1, 0)
        assert [batch[0].tolist() for batch in loader] == second
        loader.load_state_dict(state)
        assert [batch[0].tolist() for batch in loader] == second


class Pausing(torch.utils.data.Dataset):
    """User code that for one sample takes longer than a producer waits before it looks whether to go on."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(4 * POLL_SECONDS if index == 2 else 0.0)
        return torch.tensor(index)


def test_restart_does_not_cancel_the_next_pass_of_the_same_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "POLL_SECONDS", POLL_SECONDS)
    with SinkLoader(DataLoader(Pausing(), num_workers=1, persistent_workers=True), timeout_seconds=60) as loader:
        next(iter(loader))
        loader.restart()
        assert values(loader) == [0, 1, 2]


def test_a_new_epoch_waits_for_a_batch_that_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may compile a kernel for it; its workers are not at fault, and go on."""
    monkeypatch.setattr(thread_producer, "JOIN_SECONDS", POLL_SECONDS)
    makes, may_go_on, fill = threading.Event(), threading.Event(), thread_producer.fill
    numbers = itertools.count()

    def compiles_once(*arguments: Any) -> Any:
        if next(numbers) == 2:  # the loop has the first batch, and the second is ready
            makes.set()
            may_go_on.wait(60)
        return fill(*arguments)

    monkeypatch.setattr(thread_producer, "fill", compiles_once)
    with SinkLoader(DataLoader(range(6), num_workers=1, persistent_workers=True)) as loader:
        assert next(iter(loader)).tolist() == [0]
        assert makes.wait(60)
        workers = [worker.pid for worker in loader._traversal.passes[0].batches._workers]
        compiled = threading.Timer(8 * POLL_SECONDS, may_go_on.set)
        compiled.start()
        batches = iter(loader)
        assert next(batches).tolist() == [0]
        assert [worker.pid for worker in loader._traversal.passes[0].batches._workers] == workers
        assert [batch.item() for batch in batches] == list(range(1, 6))
        loader.restart()
        assert sorted(loader._producer.free_slots()) == [0, 1, 2]
        compiled.join()


class Slow(torch.utils.data.Dataset):
    """User code that takes a moment, so that a restart finds workers at work."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        return torch.tensor(index)


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_restart_in_the_middle_of_a_pass_with_workers(persistent: bool) -> None:
    source = DataLoader(Slow(), batch_size=2, num_workers=2, persistent_workers=persistent)
    with SinkLoader(source) as loader:
        for _ in range(3):
            assert next(iter(loader)).tolist() == [0, 1]
            loader.restart()
        assert [batch.tolist()[0] for batch in loader] == list(range(0, 60, 2))


class FailsLater(torch.utils.data.Sampler):
    """Fails at the beginning of its second traversal."""

    def __init__(self) -> None:
        self.traversals = 0

    def __iter__(self) -> Iterator[int]:
        self.traversals += 1
        if self.traversals > 1:
            raise LookupError("no second traversal")
        yield from range(8)

    def __len__(self) -> int:
        return 8


def test_an_error_of_a_pass_begun_early_waits_for_its_turn() -> None:
    source = DataLoader(
        TensorDataset(torch.arange(8)), sampler=FailsLater(), num_workers=1, generator=torch.Generator()
    )
    with SinkLoader(source, slots=4, prefetch_next_epoch=True) as loader:
        seen = []
        for batch in loader:
            seen.append(int(batch[0]))
            if len(seen) == 7:  # one is left, which is ready when the second pass has failed
                wait_for(loader._producer, lambda: loader._producer.current is None)
        assert seen == list(range(8))
        with pytest.raises(LookupError, match="no second traversal"):
            next(iter(loader))


def test_an_older_iterator_says_that_it_was_replaced() -> None:
    loader = SinkLoader(numbered(4))
    older = iter(loader)
    assert int(next(older)) == 0
    newer = iter(loader)
    assert int(next(newer)) == 0
    with pytest.raises(SinkError, match="replaced"):
        next(older)


def test_finished_iterators_stay_finished() -> None:
    batches = iter(SinkLoader(numbered(1)))
    next(batches)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(batches)


def test_uneven_last_batch_keeps_its_size() -> None:
    loader = SinkLoader(DataLoader(TensorDataset(torch.arange(10)), batch_size=4))
    assert [len(batch[0]) for batch in loader] == [4, 4, 2]
