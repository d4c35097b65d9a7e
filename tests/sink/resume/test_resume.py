"""A resumed run equals the uninterrupted one, random augmentation included."""

from __future__ import annotations

import functools
import io
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    default_collate,
)

from torch_sink.sink import SinkLoader
from torch_sink.sink.openers import DataLoaderOpener

pytestmark = pytest.mark.halved

BATCHES_PER_PASS = 6
TOTAL = 20


class Augmented(Dataset):
    """Draws a data-dependent number of values from the global generators; notes which samples were loaded."""

    def __init__(self, log: Path | None = None) -> None:
        self.log = log

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{index}\n")
        count = int(torch.randint(1, 5, ()))
        return torch.rand(count).sum() + random.random() + numpy.random.rand() + random.gauss(0, 1), index


def make(num_workers: int, *, log: Path | None = None, seeded: bool = True, **options: object) -> SinkLoader:
    torch.manual_seed(1)
    numpy.random.seed(1)
    random.seed(1)
    generator = torch.Generator().manual_seed(3) if seeded else None
    batches_per_epoch = options.pop("batches_per_epoch", None)
    source = DataLoader(
        Augmented(log), batch_size=4, shuffle=True, num_workers=num_workers, generator=generator, **options
    )
    return SinkLoader(source, batches_per_epoch=batches_per_epoch)


def consume(loader: SinkLoader, count: int) -> list[list[torch.Tensor]]:
    """The next `count` batches, however many epochs they take."""
    batches: list[list[torch.Tensor]] = []
    while len(batches) < count:
        for batch in loader.rest():
            batches.append(batch)
            if len(batches) == count:
                break
    return batches


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@functools.cache
def uninterrupted(num_workers: int, **options: object) -> tuple[list[dict], list[list[torch.Tensor]]]:
    """A run of `TOTAL` batches: the state before each of them, as it comes back from a file, and the batches."""
    states, batches = [], []
    with make(num_workers, **options) as loader:
        for _ in range(TOTAL):
            states.append(through_a_file(loader.state_dict()))
            batches.extend(consume(loader, 1))
    return states, batches


def check_resume(position: int, num_workers: int, changed: dict[str, object] | None = None, **options: object) -> None:
    """The next batches, the rest of this pass and some of the next, are those that came; also with changed options."""
    count = BATCHES_PER_PASS + 2
    states, batches = uninterrupted(num_workers, **options)
    options.update(changed or {})
    with make(num_workers, **options) as loader:
        loader.load_state_dict(states[position])
        torch.rand(3)  # what a script draws between loading and training must not matter
        actual = consume(loader, min(count, TOTAL - position))
    torch.testing.assert_close(actual, batches[position : position + count], rtol=0, atol=0)


# At each position: whose processes are started anew for a pass on one release, whose are kept on the other.
PERSISTENT = [
    pytest.param(False, id="fresh", marks=pytest.mark.once_on_oldest),
    pytest.param(True, id="persistent", marks=pytest.mark.once),
]


@pytest.mark.parametrize("position", [0, 1, 3, BATCHES_PER_PASS, 7, 2 * BATCHES_PER_PASS, 17])
@pytest.mark.parametrize("persistent", PERSISTENT)
@pytest.mark.sampled(8)
def test_two_workers(position: int, persistent: bool) -> None:
    check_resume(position, 2, persistent_workers=persistent)


@pytest.mark.parametrize(("position", "epoch_is_over"), [(3, False), (6, True), (9, False), (12, False), (12, True)])
@pytest.mark.sampled(2)
def test_persistent_workers_without_a_seeded_generator(position: int, epoch_is_over: bool) -> None:
    """Orders come from the global generator, whose state a script keeps itself; only a first pass seeds the workers."""
    batches: list[list[torch.Tensor]] = []
    taken: list[tuple[dict, torch.Tensor]] = []

    def train(loader: SinkLoader, total: int) -> None:
        def take(now: bool) -> None:
            if now and len(batches) == position and not taken:
                taken.append((through_a_file(loader.state_dict()), torch.get_rng_state()))

        while len(batches) < total:
            for batch in loader:
                batches.append(batch)
                torch.rand(3)  # the model's dropout
                take(not epoch_is_over)
            take(epoch_is_over)

    with make(2, seeded=False, persistent_workers=True) as loader:
        train(loader, 3 * BATCHES_PER_PASS)
    expected, batches = batches[position:], []
    with make(2, seeded=False, persistent_workers=True) as loader:
        loader.load_state_dict(taken[0][0])
        torch.set_rng_state(taken[0][1])
        train(loader, len(expected))
    torch.testing.assert_close(batches, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("position", [1, 5, 8])
@pytest.mark.parametrize("persistent", PERSISTENT)
@pytest.mark.sampled(2)
def test_three_workers(position: int, persistent: bool) -> None:
    check_resume(position, 3, persistent_workers=persistent)


@pytest.mark.parametrize("position", [0, 1, 5, 6, 9])
def test_no_workers(position: int) -> None:
    check_resume(position, 0)


@pytest.mark.parametrize("position", [1, 9])
def test_no_workers_and_no_seeded_generator(position: int) -> None:
    check_resume(position, 0, seeded=False)


@pytest.mark.parametrize("position", [3, 4, 5, 10])
@pytest.mark.sampled(2)
def test_epochs_that_cross_passes(position: int) -> None:
    check_resume(position, 2, batches_per_epoch=4)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_other_start_methods(context: str, persistent: bool) -> None:
    check_resume(9, 2, multiprocessing_context=context, persistent_workers=persistent)


def test_a_worker_of_a_fork_server_goes_on_where_a_forked_one_was() -> None:
    changed = {"multiprocessing_context": "forkserver"}
    check_resume(9, 1, changed, multiprocessing_context="fork", persistent_workers=True)


class Faulty(Augmented):
    """One sample draws as the others do, and then something goes wrong with its batch."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if index == 22 and self.fault != "in the collate function":
            if self.fault == "on the way":
                return lambda: sample
            raise StopIteration if self.fault == "a wrong exception" else LookupError
        return sample

    def collate(self, samples: list[Any]) -> Any:
        if any(not isinstance(sample, tuple) for sample in samples):
            return samples
        if self.fault == "in the collate function" and 22 in [index for _, index in samples]:
            raise LookupError
        return default_collate(samples)


def passes_with_errors(loader: SinkLoader, passes: int) -> Iterator[Any]:
    """What comes in some passes, None in the place of an error."""
    while passes:
        try:
            yield from loader.rest()
            passes -= 1
        except (LookupError, RuntimeError):
            yield None


@pytest.mark.parametrize(
    ("fault", "workers"),
    [
        ("in the dataset", 0), ("in the dataset", 2), ("in the collate function", 2), ("on the way", 2),
        ("a wrong exception", 2),
    ],
)  # fmt: skip
@pytest.mark.sampled(4)
def test_behind_an_error_that_was_caught(fault: str, workers: int) -> None:
    """The draws of the batch that failed are among those that the worker goes on from."""

    def loader() -> SinkLoader:
        dataset = Faulty(fault)
        generator = torch.Generator().manual_seed(3)
        options: Any = {"num_workers": workers, "generator": generator, "persistent_workers": workers > 0}
        return SinkLoader(DataLoader(dataset, 4, shuffle=True, collate_fn=dataset.collate, **options))

    with loader() as first:
        came, states = [], []
        for batch in passes_with_errors(first, 2):
            came.append(batch)
            states.append(through_a_file(first.state_dict()))
    failed = came.index(None)
    assert (failed, came.count(None), len(came)) == (2, 2, 2 * BATCHES_PER_PASS)
    with loader() as resumed:
        resumed.load_state_dict(states[failed])
        rest = list(passes_with_errors(resumed, 2))
    torch.testing.assert_close(rest, came[failed + 1 :], rtol=0, atol=0)


class Failing(Iterator[torch.Tensor]):
    """Batches that go on behind an error."""

    def __init__(self) -> None:
        self.count = 0

    def __next__(self) -> torch.Tensor:
        self.count += 1
        if self.count == 3:
            raise LookupError
        if self.count > 6:
            raise StopIteration
        return torch.rand(1) + self.count


class FailingStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return Failing()


@pytest.mark.parametrize(
    "source",
    [
        lambda: DataLoader(Faulty("in the dataset"), batch_size=None, sampler=[5, 3, 22, 7, 8, 9]),
        lambda: DataLoader(FailingStream(), batch_size=None),
        lambda: Failing,
        lambda: DataLoader(FailingStream(), batch_size=None, num_workers=1, generator=torch.Generator().manual_seed(1)),
    ],
    ids=["samples", "stream", "iterable", "worker"],
)
def test_batches_that_are_made_again_may_fail_again(source: Any) -> None:
    with SinkLoader(source()) as first:
        came = passes_with_errors(first, 2)
        assert [batch is None for batch in itertools.islice(came, 4)] == [False, False, True, False]
        state = through_a_file(first.state_dict())
        rest = list(itertools.islice(came, 4))
    with SinkLoader(source()) as resumed:
        resumed.load_state_dict(state)
        torch.testing.assert_close(list(itertools.islice(passes_with_errors(resumed, 2), 4)), rest, rtol=0, atol=0)


def test_epoch_goes_on_where_it_was() -> None:
    with make(2) as loader:
        consume(loader, 4)
        state = loader.state_dict()
    with make(2) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == BATCHES_PER_PASS - 4
        assert len(list(loader)) == BATCHES_PER_PASS


def test_state_of_a_state() -> None:
    """Loading and saving at once gives the same state, so a run that is stopped early loses nothing."""
    with make(2) as loader:
        consume(loader, 4)
        state = loader.state_dict()
    with make(2) as loader:
        loader.load_state_dict(state)
        again = loader.state_dict()
        torch.testing.assert_close(again, state, rtol=0, atol=0)


def test_loading_into_a_loader_in_use() -> None:
    with make(2, persistent_workers=True) as loader:
        consume(loader, 3)
        state = loader.state_dict()
        expected = consume(loader, 9)
        loader.load_state_dict(state)
        torch.testing.assert_close(consume(loader, 9), expected, rtol=0, atol=0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipped_samples_are_not_loaded(num_workers: int, tmp_path: Path) -> None:
    with make(num_workers) as loader:
        seen = {int(i) for batch in consume(loader, 4) for i in batch[1]}
        state = loader.state_dict()
    log = tmp_path / "loaded"
    with make(num_workers, log=log) as loader:
        loader.load_state_dict(state)
        rest = [int(i) for batch in loader for i in batch[1]]
    loaded = [int(line) for line in log.read_text().split()]
    assert sorted(set(rest)) == sorted(set(range(23)) - seen)
    assert seen.isdisjoint(loaded[: len(rest)])


def check_goes_on(fresh: Callable[[], SinkLoader], before: int, after: int) -> None:
    """Another loader gives the batches that would have followed, to the bit."""
    with fresh() as loader:
        consume(loader, before)
        state = loader.state_dict()
        expected = consume(loader, after)
    with fresh() as loader:
        loader.load_state_dict(state)
        torch.testing.assert_close(consume(loader, after), expected, rtol=0, atol=0)


def test_replacement_sampler_that_draws_in_the_middle_of_a_pass() -> None:
    def fresh() -> SinkLoader:
        generator = torch.Generator().manual_seed(7)
        sampler = RandomSampler(range(23), replacement=True, num_samples=200, generator=generator)
        loader_generator = torch.Generator().manual_seed(8)
        source = DataLoader(Augmented(), batch_size=4, sampler=sampler, num_workers=2, generator=loader_generator)
        return SinkLoader(source)

    check_goes_on(fresh, 20, 40)


def test_distributed_sampler_goes_on_with_its_epoch() -> None:
    def fresh() -> SinkLoader:
        sampler = DistributedSampler(range(23), num_replicas=2, rank=1, shuffle=True, seed=5)
        return SinkLoader(DataLoader(range(23), batch_size=4, sampler=sampler, num_workers=2))

    check_goes_on(fresh, 4, 6)


def test_another_number_of_workers_keeps_the_order_and_warns() -> None:
    with make(2) as loader:
        consume(loader, 3)
        state = loader.state_dict()
        expected = [batch[1].tolist() for batch in consume(loader, 7)]
    with make(1) as loader:
        with pytest.warns(UserWarning, match="num_workers=2, this loader has 1"):
            loader.load_state_dict(state)
        assert [batch[1].tolist() for batch in consume(loader, 7)] == expected


class Stream(IterableDataset):
    """Draws random numbers on the way, so that dropped samples must be made again."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        for i in range(12):
            yield torch.rand(int(torch.randint(1, 3, ()))).sum() + i + 100 * (worker.id if worker else 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterable_dataset_is_loaded_again_and_dropped(num_workers: int) -> None:
    def fresh() -> SinkLoader:
        torch.manual_seed(5)
        return SinkLoader(
            DataLoader(Stream(), batch_size=2, num_workers=num_workers, generator=torch.Generator().manual_seed(3))
        )

    with fresh() as loader:
        consume(loader, 3)
        state = loader.state_dict()
        expected = consume(loader, 8)
    assert any("IterableDataset" in note for note in state["not_covered"])
    with fresh() as loader:
        loader.load_state_dict(state)
        torch.testing.assert_close(consume(loader, 8), expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("num_workers", "persistent", "position"),
    [*((0, False, i) for i in (0, 1, 4, 6, 7)), *((2, False, i) for i in (0, 1, 6, 7)), (2, True, 4), (2, True, 7)],
)
@pytest.mark.sampled(6)
def test_stateful_data_loader_brings_its_own_state(num_workers: int, persistent: bool, position: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the extra 'stateful' (torchdata)")

    def fresh() -> SinkLoader:
        generator = torch.Generator().manual_seed(3)
        torch.manual_seed(1)
        numpy.random.seed(1)
        random.seed(1)
        options = {"num_workers": num_workers, "persistent_workers": persistent}
        source = stateful.StatefulDataLoader(Augmented(), batch_size=4, shuffle=True, generator=generator, **options)
        return SinkLoader(source)

    with fresh() as loader:
        consume(loader, position)
        state = loader.state_dict()
        expected = consume(loader, BATCHES_PER_PASS + 2)
    with fresh() as loader:
        loader.load_state_dict(state)
        torch.testing.assert_close(consume(loader, BATCHES_PER_PASS + 2), expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("is_stateful", [False, True])
def test_a_start_of_workers_that_failed_leaves_no_draws_of_the_loaded_state(
    monkeypatch: pytest.MonkeyPatch, is_stateful: bool
) -> None:
    """The next pass is begun anew, so its workers are seeded as those of any other."""
    kind: Any = DataLoader
    if is_stateful:
        stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the extra 'stateful' (torchdata)")
        kind = stateful.StatefulDataLoader

    def fail(opener: DataLoaderOpener) -> None:
        raise OSError("cannot fork")

    def fresh() -> SinkLoader:
        return SinkLoader(kind(Augmented(), batch_size=4, num_workers=2))

    def whole_pass(loader: SinkLoader) -> list[torch.Tensor]:
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        return consume(loader, BATCHES_PER_PASS)

    with fresh() as loader:
        consume(loader, 3)
        state = loader.state_dict()
    with fresh() as loader:
        loader.load_state_dict(state)
        with monkeypatch.context() as patch:
            patch.setattr(DataLoaderOpener, "open", fail)
            with pytest.raises(OSError, match="cannot fork"):
                iter(loader)
        loader.restart()
        given = whole_pass(loader)
    with fresh() as loader:
        torch.testing.assert_close(given, whole_pass(loader), rtol=0, atol=0)


def shuffled(kind: str, generator: torch.Generator | None) -> dict[str, Any]:
    """Options of a loader that shuffles in one of the ways that there are."""
    sampler = RandomSampler(range(23), generator=generator)
    ways = {
        "the loader": {"batch_size": 4, "shuffle": True, "generator": generator},
        "a sampler": {"batch_size": 4, "sampler": sampler},
        "a batch sampler": {"batch_sampler": BatchSampler(sampler, 4, False)},
    }
    return ways[kind]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("is_seeded", [True, False])
@pytest.mark.parametrize("kind", ["the loader", "a sampler", "a batch sampler"])
@pytest.mark.parametrize("position", [0, 1, 4, 6, 7, 9])
@pytest.mark.sampled(12)
def test_a_stateful_loader_whose_sampler_keeps_no_state(kind: str, position: int, is_seeded: bool) -> None:
    """torchdata skips the indices of such a sampler at the first batch; what it draws then is drawn in its place."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the extra 'stateful' (torchdata)")

    def fresh() -> SinkLoader:
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(3) if is_seeded else None
        return SinkLoader(stateful.StatefulDataLoader(Augmented(), **shuffled(kind, generator)))

    with fresh() as loader:
        consume(loader, position)
        state = loader.state_dict()
        expected = consume(loader, 2 * BATCHES_PER_PASS)
    with fresh() as loader:
        torch.manual_seed(99)  # another process
        loader.load_state_dict(state)
        torch.testing.assert_close(consume(loader, 2 * BATCHES_PER_PASS), expected, rtol=0, atol=0)


class WithGenerator(Augmented):
    """Keeps generators that no state dict of ours can see into."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = numpy.random.default_rng(0)
        self.transforms = [torch.Generator()]


def test_state_names_what_it_does_not_cover() -> None:
    def notes(dataset: Dataset, **options: object) -> str:
        with SinkLoader(DataLoader(dataset, batch_size=4, **options)) as loader:
            return " | ".join(loader.state_dict()["not_covered"])

    seeded = {"generator": torch.Generator(), "num_workers": 2}
    assert notes(Augmented(), **seeded) == ""
    assert "unseeded generator" in notes(Augmented(), shuffle=True)
    assert "in_order=False" in notes(Augmented(), **seeded, in_order=False)
    assert "generators inside the dataset" in notes(WithGenerator(), **seeded)
    assert "dataset.rng, dataset.transforms[0]" in notes(WithGenerator(), **seeded)
    assert "unseeded generator" in notes(Augmented(), sampler=RandomSampler(range(23)), **seeded)


@pytest.mark.parametrize("state", [{}, {"epoch": 3}, None, {"version": 99}])
def test_a_foreign_state_is_refused(state: object) -> None:
    with pytest.raises(ValueError, match="not a state of a SinkLoader"):
        SinkLoader([torch.zeros(1)]).load_state_dict(state)
