"""What a program changes between two passes is seen in the next one, as without a SinkLoader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, TensorDataset, WeightedRandomSampler

from sink.conftest import wait_for
from torch_sink import SinkLoader

pytestmark = pytest.mark.halved

COUNT, BATCH, PASSES = 12, 4, 3
Change = Callable[[Any, int], object]


class Drawing(Dataset):
    """Sample i is i, a draw, and what the attributes make of them."""

    def __init__(self) -> None:
        self.size, self.transform, self.weights = 1, torch.clone, torch.ones(1)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.stack([torch.tensor(float(index)), torch.rand(())])
        return self.transform(sample * self.weights).repeat(self.size)


def negative(samples: list[torch.Tensor]) -> torch.Tensor:
    return -torch.stack(samples)


def add_one(weights: torch.Tensor) -> None:
    with torch.no_grad():
        weights += 1


def shorten(sampler: Any, epoch: int) -> None:
    sampler.num_samples = COUNT - 2 * epoch
    sampler.weights[:4] = 0.0


# What is done before each pass.
CHANGES: dict[str, Change] = {
    "size": lambda loader, epoch: setattr(loader.dataset, "size", 1 + epoch),
    "transform": lambda loader, epoch: setattr(loader.dataset, "transform", [torch.neg, torch.exp, torch.abs][epoch]),
    "weights": lambda loader, epoch: add_one(loader.dataset.weights),
    "sampler": lambda loader, epoch: shorten(loader.sampler, epoch),
    "batch sampler": lambda loader, epoch: setattr(loader.batch_sampler, "batch_size", 2 + epoch),
    "another batch sampler": lambda loader, epoch: object.__setattr__(
        loader, "batch_sampler", BatchSampler(range(4 + epoch), 2, drop_last=False)
    ),
    "generator": lambda loader, epoch: loader.generator.manual_seed(epoch % 2),
    "collate": lambda loader, epoch: setattr(loader, "collate_fn", negative if epoch == 1 else torch.stack),
}


def make(**options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    sampler = WeightedRandomSampler(torch.ones(COUNT), COUNT, generator=generator)
    return DataLoader(Drawing(), BATCH, sampler=sampler, generator=generator, **options)


def passes(loader: DataLoader[Any], used: Any, change: Change, *, is_slow: bool = False) -> list[Any]:
    """The batches of some passes; a slow step lasts until the workers have made the whole pass."""
    made = []
    for epoch in range(PASSES):
        change(loader, epoch)
        made.append([])
        for batch in used:
            made[-1].append(batch.tolist())
            if is_slow:
                wait_for(used._producer, lambda: used._producer.current is None)
    return made


FORKED = [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.mark.parametrize("options", [{}, *FORKED], ids=["no workers", "fresh", "persistent"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.sampled(12)
def test_a_pass_begins_when_it_is_asked_for(change: str, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    plain, wrapped = make(**options), make(**options)
    expected = passes(plain, plain, CHANGES[change])
    torch.manual_seed(3)
    with SinkLoader(wrapped, slots=8) as loader:
        assert passes(wrapped, loader, CHANGES[change], is_slow=bool(options)) == expected
    assert torch.equal(wrapped.generator.get_state(), plain.generator.get_state())


@pytest.mark.once
def test_workers_that_are_no_forks_get_the_dataset_of_now() -> None:
    options = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    plain, wrapped = make(), make(**options)
    sizes = [[len(row[0]) for row in one] for one in passes(plain, plain, CHANGES["size"])]
    with SinkLoader(wrapped, slots=8) as loader:
        made = passes(wrapped, loader, CHANGES["size"], is_slow=True)
    assert [[len(row[0]) for row in one] for one in made] == sizes


def test_a_pass_that_ends_inside_an_epoch_is_followed_when_the_next_batch_is_asked_for() -> None:
    """Epochs of two batches, of passes of three: a change between two epochs counts from the next pass on."""
    plain, wrapped = make(num_workers=1), make(num_workers=1)
    expected = []
    for epoch in range(2):
        plain.dataset.size = 1 + epoch
        expected += [batch.tolist() for batch in plain]
    made = []
    with SinkLoader(wrapped, batches_per_epoch=2, slots=8) as loader:
        for epoch in range(3):
            wrapped.dataset.size = 1 + epoch
            for batch in loader:
                made.append(batch.tolist())
                wait_for(loader._producer, lambda: loader._producer.current is None)
    assert made == expected


@pytest.mark.parametrize("seeded", [True, False])
def test_with_prefetch_next_epoch_a_change_arrives_one_pass_late(seeded: bool) -> None:
    """Not if the order of random draws forbids to begin early."""
    wrapped = make(num_workers=1)
    if not seeded:
        wrapped.generator = wrapped.sampler.generator = None
    with SinkLoader(wrapped, slots=8, prefetch_next_epoch=True) as loader:
        made = passes(wrapped, loader, CHANGES["size"], is_slow=True)
    assert [len(one[0][0]) for one in made] == ([2, 2, 4] if seeded else [2, 4, 6])


def test_prefetch_next_epoch_without_effect_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    data = TensorDataset(torch.arange(9))
    seeded = {"generator": torch.Generator()}
    for options, reasons in (
        ({"num_workers": 1, **seeded}, []),
        ({"shuffle": True}, ["has no worker processes: pass DataLoader", "global generator: pass DataLoader"]),
        ({"num_workers": 1, "shuffle": True}, ["global generator: pass DataLoader"]),
        ({"sampler": DistributedSampler(data, 1, 0), "num_workers": 1, **seeded}, ["has set_epoch"]),
    ):
        caplog.clear()
        with SinkLoader(DataLoader(data, 3, **options), prefetch_next_epoch=True) as loader:
            for _ in range(2):
                assert len(list(loader)) == 3
        assert len(caplog.messages) == bool(reasons)
        assert caplog.text.count("; and ") == max(len(reasons) - 1, 0)
        assert all(reason in caplog.text for reason in reasons)


@pytest.mark.parametrize("positions", [(0, 4), pytest.param((2, 3, 6), marks=pytest.mark.slow)])
def test_with_prefetch_next_epoch_equal_batches_come_and_a_run_resumes_exactly(positions: tuple[int, ...]) -> None:
    plain = make(num_workers=2)
    expected = [batch.tolist() for _ in range(4) for batch in plain]
    with SinkLoader(make(num_workers=2), slots=8, prefetch_next_epoch=True) as loader:
        states, made = [loader.state_dict()], []
        for _ in range(4):
            for batch in loader:
                made.append(batch.tolist())
                wait_for(loader._producer, lambda: loader._producer.current is None)
                states.append(loader.state_dict())
    assert made == expected
    for position in positions:
        with SinkLoader(make(num_workers=2), prefetch_next_epoch=position % 2 == 0) as loader:
            loader.load_state_dict(states[position])
            assert [batch.tolist() for _ in range(2) for batch in loader] == expected[position:][: len_of(position)]


def len_of(position: int) -> int:
    """Batches of the rest of a pass, and of the next one."""
    return (-position % 3 or 3) + 3
