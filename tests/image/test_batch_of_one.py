"""`preprocess(image)[None]`, as programs that predict write it: a batch of one, with stock code's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchvision.transforms import functional as F

import torch_sink
from image.check import INTERPRETED, assert_same_bits
from image.test_lazy_tensor import KINDS, OPEN
from torch_sink.image import state
from torch_sink.image.batch import LazyBatch

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
def test_batch_of_one(kind: str, name: str, write: str, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made at once, as without a device; or waiting for one, and then read on the CPU."""

    def made() -> tuple[Any, Any, Any]:
        image = KINDS[kind](OPEN())
        batch = BATCHES[name](image)
        reports = torch_sink.fallback_report()
        WRITES[write](image, batch)
        return batch, batch.clone(), (image.clone(), reports)

    _, expected, (image, _) = made()
    with torch_sink.image_backend("device", device="cpu"):
        if waits:
            monkeypatch.setattr(type(state.settled()), "executes_at_once", False)
        batch, actual, (ours, reports) = made()
    assert isinstance(batch, LazyBatch) == (waits or INTERPRETED)
    assert not reports
    assert_same_bits(actual, expected)
    assert_same_bits(ours, image)
