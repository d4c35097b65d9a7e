"""Pipelines on float32 tensors, on the CPU path: the same bits as stock torchvision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchvision import transforms as v1
from torchvision.transforms import functional as F1
from torchvision.transforms.v2 import functional as F2

import torch_sink
from image.cases import rgb_images
from image.cases_float import FLOAT
from image.check import Opener, check_pipeline


def wide_images() -> list[Opener]:
    """torch's own antialiased resize is wrong on some tensors one pixel wide: those run in stock code."""
    return [image for image in rgb_images() if image().width > 1]


@pytest.mark.parametrize("name", FLOAT)
def test_rgb(name: str) -> None:
    pipeline, promise = FLOAT[name]
    check_pipeline(pipeline(), wide_images(), seed=1, promise=promise)


UNRECORDED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a threshold after a contrast": lambda image: F1.solarize(F1.adjust_contrast(image, 0.5), 0.3),
    "levels after a gamma": lambda image: F2.posterize(F2.adjust_gamma(image, 0.5), 3),
    "a histogram after a contrast": lambda image: F2.equalize(F2.adjust_contrast(image, 0.5)),
    "bytes after a contrast": lambda image: F2.to_dtype(F2.adjust_contrast(image, 0.5), torch.uint8, scale=True),
    "bytes of half precision": lambda image: F2.to_dtype(F2.to_dtype(image, torch.float16), torch.uint8, scale=True),
    "half precision, normalized": lambda image: F1.normalize(
        F1.convert_image_dtype(image, torch.float16), [0.5], [0.3]
    ),
    "a hue of normalized values": lambda image: F1.adjust_hue(F1.normalize(image, [0.5], [0.5]), 0.2),
    "a gamma after a resize": lambda image: F1.adjust_gamma(F1.resize(image, [9, 8]), 2.0),
    "one pixel wide": v1.Resize((9, 1)),
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_what_the_kernels_cannot_promise_runs_in_stock_code(name: str) -> None:
    image = rgb_images()[0]
    expected = UNRECORDED[name](F1.to_tensor(image()))
    with torch_sink.image_backend("device", device="cpu"):
        made = UNRECORDED[name](F1.to_tensor(image()))
        assert torch_sink.fallback_report()
        assert torch.equal(made, expected)
