"""What a program tells samplers and datasets with `set_epoch` holds; a SinkLoader calls it no more than a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from torch_sink import SinkLoader, data_sink
from torch_sink.common.epochs import at_epochs, epochs_of, owners_of, set_next_epochs

pytestmark = [
    pytest.mark.halved,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]  # which torchdata calls
COUNT, BATCH = 24, 3


def distributed() -> DistributedSampler[Any]:
    return DistributedSampler(range(COUNT), num_replicas=2, rank=0, seed=3)


class ShuffledStream(IterableDataset[int]):
    """In an order of its epoch, as the streams of Hugging Face."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(COUNT // 2, generator=torch.Generator().manual_seed(self._epoch)).tolist())


class Shuffled(Dataset[int]):
    """A map whose samples are those of an epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return COUNT // 2

    def __getitem__(self, index: int) -> int:
        return index + 100 * self.epoch


class OwnBatches(BatchSampler):
    """Batches of random sizes, which depend on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        first, epoch = 0, self.epoch
        while first < COUNT:
            size = (first + epoch) % 4 + 1
            yield list(range(first, min(first + size, COUNT)))
            first += size


KINDS: dict[str, Any] = {
    "sampler": lambda kind, **options: kind(range(COUNT), BATCH, sampler=distributed(), **options),
    "batch sampler": lambda kind, **options: kind(
        range(COUNT), batch_sampler=OwnBatches(range(COUNT), BATCH, False), **options
    ),
    "stream": lambda kind, **options: kind(ShuffledStream(), BATCH, **options),
    "dataset": lambda kind, **options: kind(Shuffled(), BATCH, **options),
}


def told(loader: Any) -> Any:
    (owner,) = owners_of(loader).values()
    return owner


def orders(loader: Any, used: Any, first: int) -> list[Any]:
    """A script that goes on at epoch `first`, and looks at a batch before."""
    next(iter(used))
    made = []
    for epoch in range(first, first + 3):
        told(loader).set_epoch(epoch)
        made.append([batch.tolist() for batch in used])
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.sampled(4)
def test_what_the_program_sets_holds(kind: str, num_workers: int) -> None:
    made = []
    for wraps in (False, True):
        loader = KINDS[kind](DataLoader, num_workers=num_workers)
        used = SinkLoader(loader) if wraps else loader
        made.append(orders(loader, used, 5))
        assert epochs_of(loader) == {path: 7 for path in owners_of(loader)}
        if wraps:
            used.close()
    assert made[0] == made[1]
    assert made[0][0] != made[0][1]


@pytest.mark.parametrize("batches_per_epoch", [None, 5])
def test_nobody_else_sets_it(batches_per_epoch: int | None) -> None:
    loader = SinkLoader(KINDS["sampler"](DataLoader), batches_per_epoch=batches_per_epoch)
    loader.sampler.set_epoch(2)
    loader.sampler.set_epoch = None  # nobody calls it
    made = [batch.tolist() for _ in range(4) for batch in loader]
    again = KINDS["sampler"](DataLoader)
    again.sampler.set_epoch(2)
    expected = [batch.tolist() for _ in range(6) for batch in again]
    assert made == expected[: len(made)]


MID_PASS = [
    (kind, made_by, num_workers)
    for kind in KINDS
    for made_by in (DataLoader, StatefulDataLoader)
    for num_workers in (0, 1)
    if made_by is DataLoader or kind == "sampler"
    # A map that the process shares gives what it gives now, in a DataLoader too.
    if (kind, num_workers) != ("dataset", 0)
]


@pytest.mark.parametrize(("kind", "made_by", "num_workers"), MID_PASS)
@pytest.mark.sampled(4)
def test_the_middle_of_a_pass_is_entered_as_it_was_begun(kind: str, made_by: Any, num_workers: int) -> None:
    """Whatever epoch the program has set since then, or sets in the process that resumes: it is for the next pass."""
    with SinkLoader(KINDS[kind](made_by, num_workers=num_workers)) as loader:
        told(loader.loader).set_epoch(4)
        made = []
        for batch in loader:
            made.append(batch.tolist())
            if len(made) == 2:
                state = loader.state_dict()
        told(loader.loader).set_epoch(6)
        following = [batch.tolist() for batch in loader]
    with SinkLoader(KINDS[kind](made_by, num_workers=num_workers)) as loader:
        told(loader.loader).set_epoch(6)
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == made[2:]
        assert [batch.tolist() for batch in loader] == following
        assert [*epochs_of(loader.loader).values()] == [6]


def test_a_function_that_reads_over_and_over_numbers_the_passes() -> None:
    """Nobody else can tell where one ends."""
    loader = KINDS["sampler"](DataLoader)
    loader.sampler.set_epoch(3)
    seen: list[Any] = []
    step = data_sink(lambda batch: seen.append(batch.tolist()), loader)
    for _ in range(10):
        step()
    plain = KINDS["sampler"](DataLoader)
    expected = []
    for epoch in (3, 4, 5):
        plain.sampler.set_epoch(epoch)
        expected += [batch.tolist() for batch in plain]
    assert seen == expected[:10]


@dataclass
class Silent:
    """Shows no epoch, as timm's streams; and what it was told. Equal to others, and without a hash."""

    told: list[int] = field(default_factory=list)

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


class Holder:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def test_what_shows_no_epoch_counts_from_0() -> None:
    silent, other = Holder(dataset=Silent()), Holder(dataset=Silent())
    for _ in range(3):
        set_next_epochs(silent, epochs_of(silent))
    set_next_epochs(other, epochs_of(other))
    assert (silent.dataset.told, other.dataset.told) == ([1, 2, 3], [1])
    assert (epochs_of(silent), epochs_of(other)) == ({"dataset": 3}, {"dataset": 1})
    del silent.dataset
    assert epochs_of(Holder(dataset=Silent())) == {}


@dataclass
class Misleading:
    """Shows a number that is not what it was told."""

    told: list[int] = field(default_factory=list)
    epoch: int = 0
    step: int = 0
    base: int = 0

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)
        self.epoch = self.base + epoch * self.step


@pytest.mark.parametrize(
    ("options", "told"),
    [
        pytest.param({}, [1, 2, 3], id="it stays 0"),
        pytest.param({"epoch": 100, "base": 100, "step": 1}, [101, 1, 2, 3], id="from a base, with a correction"),
        pytest.param({"epoch": 7, "base": 7, "step": 0}, [8, 1, 2, 3], id="it stays 7, with a correction"),
        pytest.param({"step": 10}, [1, 2, 3], id="a multiple"),
        pytest.param({"step": 1}, [1, 2, 3], id="an epoch"),
    ],
)
@pytest.mark.sampled(2)
def test_a_number_that_is_not_what_was_told_is_no_epoch(options: dict[str, int], told: list[int]) -> None:
    loader = Holder(sampler=Misleading(**options))
    for _ in range(3):
        set_next_epochs(loader, epochs_of(loader))
    assert loader.sampler.told == told
    assert epochs_of(loader) == {"sampler": 3}


def test_a_position_is_entered_by_what_shows_another_number() -> None:
    loader = Holder(sampler=Misleading(epoch=100, base=100, step=1))
    with at_epochs(loader, {"sampler": 2}):
        assert loader.sampler.epoch == 102
    assert (loader.sampler.epoch, epochs_of(loader)) == (102, {"sampler": 2}), "where it stood before is not known"
    set_next_epochs(loader, {"sampler": 2})
    assert loader.sampler.epoch == 103


def test_iterations_are_no_epochs() -> None:
    """A sampler that counts its draws; the loaders of Accelerate, which number their passes so, are tested elsewhere."""
    sampler = Silent()
    sampler.iteration = 0  # type: ignore[attr-defined]
    loader = Holder(sampler=sampler)
    for _ in range(3):
        began = epochs_of(loader)
        sampler.iteration += 8  # type: ignore[attr-defined]
        set_next_epochs(loader, began)
    assert sampler.told == [1, 2, 3]


def test_parts_are_found_where_libraries_put_them() -> None:
    sampler, stream = distributed(), ShuffledStream()
    loader = Holder(batch_sampler=Holder(batch_sampler=Holder(sampler=sampler)), dataset=Holder(dataset=stream))
    assert owners_of(loader) == {"batch_sampler.batch_sampler.sampler": sampler, "dataset.dataset": stream}
    loader = DataLoader(range(COUNT), BATCH, sampler=sampler)
    assert owners_of(loader) == {"sampler": sampler}, "and not once more, in the batch sampler"


def test_what_goes_on_by_itself_is_left_alone() -> None:
    sampler = distributed()
    loader = Holder(sampler=sampler)
    began = epochs_of(loader)
    sampler.set_epoch(1)
    set_next_epochs(loader, began)
    assert sampler.epoch == 1


class OfSteps(Shuffled):
    def set_epoch(self, epoch: int, step: int) -> None:  # type: ignore[override]
        raise AssertionError("it was called without a step")


class WithDefault(Shuffled):
    def set_epoch(self, epoch: int, step: int = 0) -> None:
        self.epoch = epoch


@pytest.mark.parametrize(("kind", "highest"), [(OfSteps, 11), (WithDefault, 111)])
def test_a_method_of_this_name_that_takes_more_is_left_to_the_program(kind: type, highest: int) -> None:
    seen: list[int] = []
    loader = DataLoader(kind(), batch_size=BATCH, collate_fn=lambda samples: [samples])
    step = data_sink(seen.extend, loader)
    for _ in range(2 * len(loader)):
        step()
    step.close()
    assert max(seen) == highest
