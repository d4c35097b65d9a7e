"""A pass that is left in the middle, with workers that are kept: the next ones draw what they draw in the plain loop."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torch_sink.sink import SinkLoader

# Three of them, on a machine with two cores.
pytestmark = [
    pytest.mark.halved,
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes"),
]
STOPS = (3, None, 1, 2, None, 6)  # batches of each pass; None for all


class Drawing(Dataset):
    def __init__(self, samples: int, broken: int | None = None) -> None:
        self.samples, self.broken = samples, broken

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = torch.rand(int(torch.randint(1, 4, ()))).sum() + random.random() + numpy.random.rand()
        if index == self.broken:
            raise ValueError(f"sample {index} is broken")
        return torch.stack([torch.tensor(float(index)), drawn])


def make(dataset: Dataset, **options: Any) -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    options = {"num_workers": 2, "shuffle": True, "generator": generator, "persistent_workers": True, **options}
    return DataLoader(dataset, 2, **options)


def read(loader: Any, stops: tuple[int | None, ...] = STOPS, pause: float = 0.0) -> list[Any]:
    """The batches of passes that are left after so many."""
    torch.manual_seed(1)
    seen: list[Any] = []
    for stop in stops:
        batches, number = iter(loader), 0
        while number != stop:
            try:
                batch = next(batches)
            except StopIteration:
                break
            except ValueError as error:
                seen.append("broken" in str(error))
            else:
                seen.append(batch.tolist())
            number += 1
            time.sleep(pause)
    return seen


def check(make_loader: Callable[[], DataLoader], pause: float = 0.0, **options: Any) -> None:
    expected = read(make_loader())
    with SinkLoader(make_loader(), **options) as loader:
        assert read(loader, pause=pause) == expected


@pytest.mark.parametrize("pause", [0.0, 0.02])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 1},
        {"num_workers": 3, "prefetch_factor": 1},
        {"num_workers": 3, "prefetch_factor": 4},
        {"generator": None},
        {"multiprocessing_context": "forkserver"},
    ],
    ids=lambda options: " ".join(map(str, options)) or "default",
)
def test_the_next_pass_draws_what_a_plain_loader_s_draws(options: dict[str, Any], pause: float) -> None:
    check(lambda: make(Drawing(31), **options), pause)


def test_on_a_device(on_a_ring: None) -> None:
    check(lambda: make(Drawing(31)), 0.01)


@pytest.mark.parametrize("slots", [1, 12])
def test_however_many_batches_wait(slots: int) -> None:
    check(lambda: make(Drawing(61)), 0.01, slots=slots)


@pytest.mark.parametrize("samples", [2, 3, 5])
def test_fewer_batches_than_workers(samples: int) -> None:
    check(lambda: make(Drawing(samples), num_workers=3), 0.01)


def test_errors_count_as_batches() -> None:
    check(lambda: make(Drawing(31, broken=6), shuffle=False), 0.01)


def test_a_pass_that_was_begun_early_draws_nothing() -> None:
    """Whether it was, depends on who was faster."""
    options = {"num_workers": 2}
    expected = read(make(Drawing(9), **options), (None, 2, None, 3, 4, None))
    with SinkLoader(make(Drawing(9), **options), prefetch_next_epoch=True) as loader:
        assert read(loader, (None, 2, None, 3, 4, None), pause=0.03) == expected


def test_a_restart_before_the_first_batch() -> None:
    expected = read(make(Drawing(31)), (0, 2, 0, None))
    with SinkLoader(make(Drawing(31))) as loader:
        assert read(loader, (0, 2, 0, None), pause=0.01) == expected


@pytest.mark.parametrize("position", [1, 2, 9])
def test_a_resumed_pass_goes_on_exactly_after_one_that_was_left(position: int) -> None:
    with SinkLoader(make(Drawing(31))) as loader:
        read(loader, (3,), pause=0.02)
        batches = iter(loader)
        for _ in range(position):
            next(batches)
        state = loader.state_dict()
        expected = [batch.tolist() for batch in (*batches, *loader)]
    assert state["not_covered"] == []
    with SinkLoader(make(Drawing(31))) as resumed:
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in (*resumed, *resumed)] == expected


@pytest.mark.parametrize("position", [1, 4])
def test_a_resumed_pass_that_is_left(position: int) -> None:
    """As in the run that was not interrupted."""
    stops = (position + 3, None)
    expected = read(make(Drawing(31)), stops)
    with SinkLoader(make(Drawing(31))) as loader:
        before = read(loader, (position,))
        state = loader.state_dict()
    with SinkLoader(make(Drawing(31))) as resumed:
        resumed.load_state_dict(state)
        assert [*before, *read(resumed, (3, None), pause=0.02)] == expected


def test_workers_that_are_new_after_an_interrupt_go_back_to_nothing_older() -> None:
    """Ctrl-C in the middle of a fetch: the pass goes on with new workers."""
    expected = read(make(Drawing(31)), (5, None, 2, None))
    with SinkLoader(make(Drawing(31))) as loader:
        torch.manual_seed(1)
        batches = iter(loader)
        seen = [next(batches).tolist() for _ in range(2)]
        loader._traversal.was_interrupted = True
        seen += [next(batches).tolist() for _ in range(3)]
        assert [*seen, *read(loader, (None, 2, None), pause=0.01)] == expected


def test_passes_without_batches_in_between() -> None:
    """Workers that got nothing to do still go back to where the plain loader's stand."""

    def lists(loader: Any) -> list[Any]:
        torch.manual_seed(1)
        seen = []
        for indices in (range(20), range(0), range(1), range(20)):
            loader.batch_sampler[:] = [[index] for index in indices]
            for number, batch in enumerate(loader):
                seen.append(batch.tolist())
                if number == 4:
                    time.sleep(0.05)
                    break
            iter(loader)  # nobody reads it
        return seen

    def plain() -> DataLoader:
        generator = torch.Generator().manual_seed(3)
        options = {"batch_sampler": [], "num_workers": 2, "persistent_workers": True, "generator": generator}
        return DataLoader(Drawing(20), **options)

    expected = lists(plain())
    with SinkLoader(plain()) as loader:
        assert lists(loader) == expected
