"""Pillow's kernels of 3 x 3 and 5 x 5 weights: the kernels add their floats up in Pillow's order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from image.check import device_in_use, lazy_batch
from PIL import Image, ImageFilter
from torchvision.transforms import functional as F

import torch_sink

NAMED = {
    name: getattr(ImageFilter, name)
    for name in (
        *("BLUR", "CONTOUR", "DETAIL", "EDGE_ENHANCE", "EDGE_ENHANCE_MORE"),
        *("EMBOSS", "FIND_EDGES", "SHARPEN", "SMOOTH", "SMOOTH_MORE"),
    )
}
# Sums that come to lie on a half, whose rounding depends on the order of the additions.
UNEVEN = ("DETAIL", "SMOOTH_MORE")


def noise(seed: int, mode: str, width: int, height: int) -> Image.Image:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def check(images: Sequence[Image.Image], filters: Sequence[Any]) -> None:
    """All in one batch."""
    expected = torch.stack([F.pil_to_tensor(image.filter(each)) for image, each in zip(images, filters, strict=True)])
    with torch_sink.image_backend("device", device=device_in_use(), strict=True):
        recorded = [F.hflip(F.hflip(image)) for image in images]
        made = lazy_batch([F.pil_to_tensor(image.filter(each)) for image, each in zip(recorded, filters, strict=True)])
        different = (made.to(device_in_use()).cpu() != expected).flatten(1).sum(1)
    assert not different.any(), f"{different.tolist()} of {expected[0].numel()} values differ"


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_named_kernels(mode: str) -> None:
    check([noise(seed, mode, 41, 13) for seed in range(len(NAMED))], list(NAMED.values()))


def drawn(chance: random.Random) -> ImageFilter.Kernel:
    """Weights of any size and sign, whole or not; Pillow's own scale, a negative one, or one that makes sums large."""
    side = chance.choice((3, 5))
    size = 10 ** chance.uniform(-2, 2)
    weights: list[float] = [chance.gauss(0, size) for _ in range(side**2)]
    if chance.random() < 0.4:
        weights = [chance.randint(-4, 9) for _ in range(side**2)]
    scale = chance.choice((None, chance.uniform(0.3, 2) * max(map(abs, weights)), -7, 1e-3))
    return ImageFilter.Kernel((side, side), weights, scale if scale or sum(weights) else 3, chance.gauss(0, 90))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_random_kernels(mode: str, seed: int) -> None:
    chance = random.Random(seed)
    width, height = chance.randint(5, 50), chance.randint(5, 30)
    check([noise(50 * seed + each, mode, width, height) for each in range(8)], [drawn(chance) for _ in range(8)])


@pytest.mark.parametrize("size", [(1, 1), (2, 9), (9, 2), (3, 3), (3, 7), (4, 4), (5, 5), (7, 5)], ids=str)
def test_small_images(size: tuple[int, int]) -> None:
    """Those smaller than the kernel stay as they are; of one as large, one pixel changes."""
    check([noise(seed, "RGB", *size) for seed in range(2)], [ImageFilter.SHARPEN, ImageFilter.SMOOTH_MORE])


def summed(image: Image.Image, kernel: Any, *, upwards: bool = True, fused: bool = False) -> np.ndarray:
    """What Pillow makes of the inner pixels, line by line; or in another order, or with one rounding instead of two."""
    (side, _), scale, offset, weights = kernel.filterargs
    pixels = np.asarray(image, np.float32)
    square = (np.array(weights, np.float32) / np.float32(scale)).reshape(side, side)
    height, width = (length - side + 1 for length in pixels.shape)
    total = np.full((height, width), offset + 0.5, np.float32)
    for number in range(side) if upwards else reversed(range(side)):
        top = side - 1 - number
        line = np.zeros_like(total)
        for left, weight in enumerate(square[number]):
            values = pixels[top : top + height, left : left + width]
            exact = values.astype(np.float64) * weight + line
            line = exact.astype(np.float32) if fused else line + values * weight
        total += line
    return np.clip(total, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("name", UNEVEN)
def test_the_order_of_the_sums_can_be_seen(name: str) -> None:
    """The images of these tests have pixels at which another order, or a fused multiplication, gives other bytes."""
    image, reach = noise(1, "L", 410, 130), NAMED[name].filterargs[0][0] // 2
    inner = np.asarray(image.filter(NAMED[name]))[reach:-reach, reach:-reach]
    assert np.array_equal(summed(image, NAMED[name]), inner)
    assert not np.array_equal(summed(image, NAMED[name], upwards=False), inner)
    assert not np.array_equal(summed(image, NAMED[name], fused=True), inner)
    check([image], [NAMED[name]])
