"""Values kept between two bounds: recorded with stock code's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

import torch_sink
from image.cases import SIZE, encoded, opener
from image.check import check_pipeline

TO_FLOAT = v1.Compose([v1.Resize(SIZE), v1.ToTensor()])
RECORDED: dict[str, Callable[[Any], Any]] = {
    "method": lambda x: x.clamp(0.2, 0.7),
    "function, one bound": lambda x: torch.clamp(x, max=0.4),
    "clip, the other bound": lambda x: torch.clip(x, 0.3),
    "in place": lambda x: x.clamp_(0, 0.5).clip_(0.1),
    "behind arithmetic": lambda x: (x * 2 - 0.3).clamp(0, 1),
    "behind a bicubic resize": lambda x: v1.functional.resize(x, [9, 11], InterpolationMode.BICUBIC).clamp(0, 1),
    "a hue behind it": lambda x: v1.functional.adjust_hue(
        v1.functional.resize(x, [9, 11], InterpolationMode.BICUBIC).clamp(0.0, 1.0), 0.2
    ),
    "bounds in the wrong order": lambda x: v1.functional.adjust_sharpness(x, 2.0).clamp(0.7, 0.2),
}
ON_BYTES: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda x: x.clamp(60, 190),
    "bytes, one bound": lambda x: torch.clamp(v2.functional.invert(x), max=99),
}
IN_STOCK_CODE: dict[str, Callable[[Any], Any]] = {
    "tensors": lambda x: x.clamp(torch.tensor(0.2), torch.tensor(0.7)),
    "nan": lambda x: x.clamp(float("nan"), 1),
    "half precision": lambda x: x.half().clamp(0.2, 0.7),
}


@pytest.mark.parametrize("name", RECORDED)
def test_floats(name: str) -> None:
    check_pipeline(v1.Compose([TO_FLOAT, RECORDED[name]]), [opener(encoded(61, 47, 1))])


@pytest.mark.parametrize("name", ON_BYTES)
def test_bytes(name: str) -> None:
    check_pipeline(v1.Compose([v1.Resize(SIZE), v1.PILToTensor(), ON_BYTES[name]]), [opener(encoded(61, 47, 1))])


@pytest.mark.parametrize("name", IN_STOCK_CODE)
def test_what_is_not_supported_falls_back(name: str) -> None:
    expected = IN_STOCK_CODE[name](TO_FLOAT(opener(encoded(61, 47, 1))()))
    with torch_sink.image_backend("device", device="cpu"):
        made = IN_STOCK_CODE[name](TO_FLOAT(opener(encoded(61, 47, 1))()))
        assert torch_sink.fallback_report()
    assert torch.equal(made.nan_to_num(-1), expected.nan_to_num(-1))
