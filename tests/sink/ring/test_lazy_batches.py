"""Lazy leaves are executed once, into the slot, in the format asked for; lost samples are lost from all leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from sink.ring.lazy_leaf import LazyNumbers
from torch_sink.errors import DecodeError
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved


def shown(images: torch.Tensor) -> list[int]:
    assert type(images) is torch.Tensor
    assert images.shape[1:] == (1, 2, 2)
    assert (images == images[:, :1, :1, :1]).all()
    return images[:, 0, 0, 0].int().tolist()


def only(batches: Any) -> Any:
    (batch,) = list(batches)
    return batch


def test_executed_in_the_format_asked_for(place: str) -> None:
    loader = SinkLoader([LazyNumbers([1, 2, 3])], dtype=torch.bfloat16, memory_format=torch.channels_last)
    images = only(loader)
    assert shown(images) == [1, 2, 3]
    assert images.dtype == torch.bfloat16


def test_good_batches_are_not_touched(place: str) -> None:
    loader = SinkLoader([{"x": LazyNumbers([4, 5]), "y": torch.tensor([6, 7])}], on_decode_error="skip")
    batch = only(loader)
    assert (shown(batch["x"]), batch["y"].tolist()) == ([4, 5], [6, 7])
    assert (loader.stats().skipped, loader.stats().replaced) == (0, 0)


def test_skip_drops_the_sample_from_every_leaf(place: str) -> None:
    batch = (LazyNumbers([1, -2, 3]), torch.tensor([10, 20, 30]), ["a", "b", "c"], {"id": (7, 8, 9)}, 5, "name")
    loader = SinkLoader([batch], on_decode_error="skip")
    images, numbers, names, more, scalar, text = only(loader)
    assert shown(images) == [1, 3]
    assert numbers.tolist() == [10, 30]
    assert (names, more, scalar, text) == (["a", "c"], {"id": (7, 9)}, 5, "name")
    assert (loader.stats().skipped, loader.stats().replaced) == (1, 0)


def test_replace_repeats_the_next_good_sample(place: str) -> None:
    loader = SinkLoader([[LazyNumbers([1, -2, 3, -4]), torch.tensor([10, 20, 30, 40])]], on_decode_error="replace")
    images, numbers = only(loader)
    assert (shown(images), numbers.tolist()) == ([1, 3, 3, 1], [10, 30, 30, 10])
    assert (loader.stats().skipped, loader.stats().replaced) == (0, 2)


def test_structure_of_the_size_of_the_batch_is_not_taken_for_samples(place: str) -> None:
    """Two leaves and a batch of two: the outer list is structure, as default_collate made it."""
    batch = [LazyNumbers([-1, 2]), [torch.tensor([10, 20]), torch.tensor([30, 40])]]
    images, (left, right) = only(SinkLoader([batch], on_decode_error="skip"))
    assert (shown(images), left.tolist(), right.tolist()) == ([2], [20], [40])


@pytest.mark.parametrize(
    ("policy", "expected"), [("skip", [[3], [7], [30]]), ("replace", [[3] * 3, [7] * 3, [30] * 3])]
)
def test_two_lazy_leaves_lose_the_same_samples(place: str, policy: str, expected: list[list[int]]) -> None:
    batch = {"a": LazyNumbers([1, -2, 3]), "b": LazyNumbers([-5, 6, 7]), "y": torch.tensor([10, 20, 30])}
    out = only(SinkLoader([batch], on_decode_error=policy))
    assert [shown(out["a"]), shown(out["b"]), out["y"].tolist()] == expected


def test_one_leaf_at_two_places_is_executed_once(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    execute = LazyNumbers.__torch_sink_execute__
    monkeypatch.setattr(
        LazyNumbers, "__torch_sink_execute__", lambda self, *a, **k: calls.append(1) or execute(self, *a, **k)
    )
    leaf = LazyNumbers([1, 2])
    first, second = only(SinkLoader([(leaf, leaf)]))
    assert (shown(first), shown(second), len(calls)) == ([1, 2], [1, 2], 1)


class Images(Dataset):
    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        return -index if index == self.bad else index


def collate(samples: list[int]) -> tuple[LazyNumbers, torch.Tensor]:
    return LazyNumbers(samples), torch.tensor(samples).abs()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.sampled(2)
def test_decode_errors_come_in_order_and_the_rest_follows(place: str, num_workers: int) -> None:
    source = DataLoader(Images(bad=9), batch_size=4, num_workers=num_workers, collate_fn=collate)
    with SinkLoader(source) as loader:
        batches = iter(loader)
        for expected in ([0, 1, 2, 3], [4, 5, 6, 7]):
            images, numbers = next(batches)
            assert shown(images) == numbers.tolist() == expected
        with pytest.raises(DecodeError, match=r"number-9.jpg \(image 1 of its batch\)"):
            next(batches)
        assert [shown(images) for images, _ in batches] == [[12, 13, 14, 15]]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("policy", ["skip", "replace"])
@pytest.mark.sampled(4)
def test_policies_with_workers(place: str, num_workers: int, policy: str) -> None:
    source = DataLoader(Images(bad=9), batch_size=4, num_workers=num_workers, collate_fn=collate)
    with SinkLoader(source, on_decode_error=policy) as loader:
        batches = [(shown(images), numbers.tolist()) for images, numbers in loader]
        stats = loader.stats()
    third = [8, 10, 11] if policy == "skip" else [8, 10, 10, 11]
    assert batches == [(rows, rows) for rows in ([0, 1, 2, 3], [4, 5, 6, 7], third, [12, 13, 14, 15])]
    assert (stats.skipped, stats.replaced) == ((1, 0) if policy == "skip" else (0, 1))
