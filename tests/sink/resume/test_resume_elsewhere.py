"""A state meets a loader that is not the one it was taken from, or that keeps no order."""

from __future__ import annotations

import itertools
import multiprocessing
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved


def state_after(count: int, size: int = 40, **options: Any) -> dict[str, Any]:
    with SinkLoader(DataLoader(range(size), **options)) as loader:
        for _ in itertools.islice(loader, count):
            pass
        return loader.state_dict()


@pytest.mark.parametrize(("size", "batch_size"), [(40, 8), (48, 4), (12, 4)])
def test_in_the_middle_of_a_pass_it_must_be_cut_alike(size: int, batch_size: int) -> None:
    state = state_after(9, batch_size=4)
    with SinkLoader(DataLoader(range(size), batch_size=batch_size)) as loader:
        with pytest.raises(ValueError, match=f"40 samples in batches of 4, after batch 9; .*{size}.* {batch_size}, so"):
            loader.load_state_dict(state)
        assert len(list(loader)) == size // batch_size  # nothing was changed


def test_between_passes_it_need_not() -> None:
    state = state_after(11, batch_size=4)
    assert (state["pass_number"], state["batch_in_pass"]) == (1, 0)
    with SinkLoader(DataLoader(range(48), batch_size=8)) as loader:
        loader.load_state_dict(state)
        assert [batch.tolist()[0] for batch in loader] == list(range(0, 48, 8))


class SecondWorkerFirst(Dataset):
    """The first worker begins when the second one has come to its second batch."""

    def __init__(self) -> None:
        self.began, self.made = multiprocessing.Event(), 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        self.made += 1
        if get_worker_info().id == 0:
            assert self.began.wait(60)
        elif self.made == 5:
            self.began.set()
        return index


def test_batches_that_come_in_any_order_are_not_taken_for_placeholders() -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "in_order": False}
    state = state_after(3, **options)
    with SinkLoader(DataLoader(SecondWorkerFirst(), **options)) as loader:
        loader.load_state_dict(state)
        rest = torch.cat(list(loader))
    assert sorted(rest.tolist()) == list(range(12, 40))


def test_the_state_loaded_last_counts() -> None:
    def make() -> SinkLoader:
        generator = torch.Generator().manual_seed(3)
        return SinkLoader(DataLoader(range(12), batch_size=4, shuffle=True, num_workers=2, generator=generator))

    with make() as loader:
        states, batches = [loader.state_dict()], []
        for _ in range(2):
            for batch in loader:
                batches.append(batch.tolist())
                states.append(loader.state_dict())
    with make() as loader:
        for number in (5, 0, 3, 1):
            loader.load_state_dict(states[4])
            loader.load_state_dict(states[number])
            loader.load_state_dict(loader.state_dict())
            rest = batches[number : 3 if number < 3 else 6]
            assert [batch.tolist() for batch in loader] == rest
