"""A SinkLoader gives what the plain loop gives: the same batches, the same global random draws, in the same order."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved


class Augmented(Dataset):
    """Draws a data-dependent number of values from the global generators of torch, numpy and random."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        count = int(torch.randint(1, 5, ()))
        return torch.rand(count).sum() + random.random() + numpy.random.rand(), index


def make_loader(num_workers: int, seeded: bool, **options: object) -> DataLoader:
    torch.manual_seed(1)
    numpy.random.seed(1)
    random.seed(1)
    generator = torch.Generator().manual_seed(3) if seeded else None
    return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=num_workers, generator=generator, **options)


def train(loader: object, epochs: int = 3) -> list[tuple[torch.Tensor, ...]]:
    """Each batch, with what a training step would draw after it."""
    return [(*batch, torch.rand(2)) for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "unseeded"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_and_draws_equal_the_plain_loop(num_workers: int, seeded: bool) -> None:
    expected = train(make_loader(num_workers, seeded))
    with SinkLoader(make_loader(num_workers, seeded)) as loader:
        actual = train(loader)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_persistent_workers_equal_the_plain_loop() -> None:
    expected = train(make_loader(2, True, persistent_workers=True))
    with SinkLoader(make_loader(2, True, persistent_workers=True)) as loader:
        actual = train(loader)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
