"""Factors of adjustments that float32 does not hold: what stock code returns or raises."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate
from torchvision.transforms import functional as v1
from torchvision.transforms.v2 import functional as v2

import torch_sink
from image.check import assert_same_bits
from torch_sink.cli.photos import make_photo

NAMES = ("adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_sharpness")


def outcome(functional: Any, name: str, convert: str, factor: float) -> Any:
    """The tensor of a batch of two, or the error's type."""
    image = getattr(v1, convert)(v1.hflip(make_photo(16, 12, 1)))
    try:
        made = getattr(functional, name)(image, factor)
        return default_collate([made, made]).to("cpu").clone()
    except Exception as error:
        return type(error)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("factor", [-0.0, 1e38, 3.4028235e38, 1e39, math.inf, math.nan, -1.0])
@pytest.mark.parametrize("convert", ["pil_to_tensor", "to_tensor"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("functional", [v1, v2], ids=["v1", "v2"])
@pytest.mark.sampled(100)
def test_are_stock_codes(functional: Any, name: str, convert: str, factor: float) -> None:
    stock = outcome(functional, name, convert, factor)
    with torch_sink.image_backend("device", device="cpu"):
        ours = outcome(functional, name, convert, factor)
    if isinstance(stock, torch.Tensor):
        assert_same_bits(ours, stock)
    else:
        assert ours is stock


@pytest.mark.parametrize(("factor", "is_recorded"), [(0.0, True), (1e38, True), (1e39, False), (math.inf, False)])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_recorded(name: str, factor: float, is_recorded: bool) -> None:
    with torch_sink.image_backend("device", device="meta"):
        made = getattr(v1, name)(v1.to_tensor(v1.hflip(make_photo(16, 12, 1))), factor)
        assert getattr(made, "is_recording", False) == is_recorded
