"""`preprocess(image)[None]`, as programs that predict write it: a batch of one, with stock code's values."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.check import INTERPRETED, assert_same_bits, device_in_use
from image.handles.test_lazy_tensor import KINDS, OPEN
from torch_sink.image.core import settings
from torch_sink.image.run.batch import LazyBatch

pytestmark = pytest.mark.halved

BATCHES: dict[str, Callable[[Any], Any]] = {
    "None": lambda image: image[None],
    "unsqueeze": lambda image: image.unsqueeze(0),
    "keyword": lambda image: image.unsqueeze(dim=0),
    "function": lambda image: torch.unsqueeze(image, 0),
}


def written(image: Any, batch: Any) -> None:
    F.normalize(image, [0.5], [0.25], inplace=True)


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda image, batch: None,
    "image": written,
    "batch": lambda image, batch: batch.mul_(3),
    "both": lambda image, batch: (batch.add_(1), image.mul_(2)),
}


@pytest.mark.parametrize("kind", ["to_tensor", "to_dtype"])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.sampled(32)
def test_batch_of_one(kind: str, name: str, write: str, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made at once, as without a device; or waiting for one, and then read on the CPU."""

    def made() -> tuple[Any, Any, Any]:
        image = KINDS[kind](OPEN())
        batch = BATCHES[name](image)
        waited, reports = type(batch) is LazyBatch, torch_sink.fallback_report()
        WRITES[write](image, batch)
        return waited, batch.clone(), (image.clone(), reports)

    _, expected, (image, _) = made()
    with torch_sink.image_backend("device", device="cpu"):
        if waits:
            monkeypatch.setattr(type(settings.settled()), "executes_at_once", False)
        waited, actual, (ours, reports) = made()
    assert waited == (waits or INTERPRETED)
    assert not reports
    assert_same_bits(actual, expected)
    assert_same_bits(ours, image)


USES: dict[str, Callable[[Any, Any], Any]] = {
    "printed": lambda image, batch: repr(batch),
    "pickled": lambda image, batch: pickle.loads(pickle.dumps(batch)).clone(),
    "mixed": lambda image, batch: v2.MixUp(num_classes=3)(batch, torch.tensor([1]))[0].clone(),
    "viewed again": lambda image, batch: image[None].clone(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("written_to", ["image", "batch"])
@pytest.mark.parametrize("waits", [False, True])
def test_used_after_a_write(use: str, written_to: str, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> Any:
        image = KINDS["to_tensor"](OPEN())
        batch = image[None]
        WRITES[written_to](image, batch)
        torch.manual_seed(0)
        return USES[use](image, batch)

    expected = made()
    with torch_sink.image_backend("device", device="cpu"):
        if waits:
            monkeypatch.setattr(type(settings.settled()), "executes_at_once", False)
        actual = made()
    assert actual == expected if isinstance(expected, str) else torch.equal(actual, expected)


def test_arguments_by_name() -> None:
    calls = [
        lambda x: torch.unsqueeze(input=x, dim=0),
        lambda x: torch.mul(input=x, other=3),
        lambda x: torch.sub(input=x, other=3),
    ]
    for call in calls:
        expected = call(KINDS["to_tensor"](OPEN()))
        with torch_sink.image_backend("device", device="cpu"):
            assert torch.equal(call(KINDS["to_tensor"](OPEN())), expected)


MOVES: dict[str, Callable[[Any, torch.device], Any]] = {
    "to": lambda image, device: image.to(device, non_blocking=True),
    "to, by name": lambda image, device: image.to(device=device, copy=True),
    "to, another dtype": lambda image, device: image.to(device, torch.float16),
    "list": lambda image, device: next(iter(image.to(device) for image in [image])),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("move", MOVES)
def test_one_image_is_moved(kind: str, move: str) -> None:
    """Images of different sizes stay a list: each is made where it is moved to, and nothing falls back."""
    device = torch.device(device_in_use() if INTERPRETED else "meta")
    expected = MOVES[move](KINDS[kind](OPEN()), device)
    with torch_sink.image_backend("device", device=device, strict=True):
        image = KINDS[kind](OPEN())
        assert image.pin_memory() is image
        moved = MOVES[move](image, device)
    assert (type(moved), moved.shape, moved.dtype) == (type(expected), expected.shape, expected.dtype)
    assert moved.device == expected.device
    if INTERPRETED:
        assert torch.equal(moved.cpu(), expected.cpu())


def test_one_image_that_stays_on_the_cpu_is_read_there() -> None:
    expected = KINDS["to_tensor"](OPEN())
    with torch_sink.image_backend("device", device="cpu"):
        assert_same_bits(KINDS["to_tensor"](OPEN()).to("cpu").clone(), expected)
        with pytest.raises(RuntimeError, match="rank 4"):
            KINDS["to_tensor"](OPEN()).to("meta", memory_format=torch.channels_last)


def test_an_image_that_is_read_beside_its_batch_counts_alone() -> None:
    with torch_sink.image_backend("device", device="meta"):
        image = KINDS["to_tensor"](OPEN())
        batch = image[None]
        assert type(batch) is LazyBatch
        image.sum()
        assert [operation for operation, _ in torch_sink.fallback_report().counts] == ["torch: sum"]
