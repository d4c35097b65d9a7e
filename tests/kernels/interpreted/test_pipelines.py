"""Whole pipelines through the kernels, common, seldom and random ones: the same bits as stock torchvision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from image.cases import (
    COLOR,
    CORE,
    GRAY,
    RESIZES,
    encoded,
    gray_images,
    images_of_other_modes,
    opener,
    rgb_images,
    some_rgb_images,
)
from image.check import assert_same_bits, check_pipeline, device_in_use
from image.handles.test_palettes import test_tensors as test_palettes  # noqa: F401
from image.operations.test_mixes import batches as mixed_batches
from image.operations.test_tensor_methods import BATCHES, RECORDED, check_batch
from image.random_pipelines import compare
from image.uncommon_cases import UNCOMMON

import torch_sink

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("name", [*CORE, *COLOR])
def test_rgb(name: str) -> None:
    check_pipeline({**CORE, **COLOR}[name](), some_rgb_images(name, 3), seed=1)


@pytest.mark.parametrize("name", RESIZES)
def test_resize(name: str) -> None:
    check_pipeline(RESIZES[name](), some_rgb_images(name, 2), seed=2)


@pytest.mark.parametrize("name", GRAY)
def test_gray(name: str) -> None:
    check_pipeline(GRAY[name](), gray_images(), seed=3)


@pytest.mark.parametrize("name", ["v1 imagenet train", "v2 imagenet eval"])
def test_other_modes(name: str) -> None:
    check_pipeline(CORE[name](), images_of_other_modes(), seed=4)


def test_float_outputs_and_one_by_one() -> None:
    check_pipeline(CORE["v1 imagenet train"](), rgb_images()[:4], seed=5, dtypes=FLOATS)


def test_uint8_outputs_and_one_by_one() -> None:
    check_pipeline(CORE["v2 uint8"](), rgb_images()[2:], seed=6, dtypes=[torch.uint8])


def test_erased_outputs_and_one_by_one() -> None:
    check_pipeline(COLOR["erase"](), rgb_images()[:2], seed=7, dtypes=FLOATS)


def test_gray_outputs_and_one_by_one() -> None:
    check_pipeline(GRAY["train"](), gray_images(), seed=7, dtypes=[torch.bfloat16])


@pytest.mark.parametrize("name", ["v1 imagenet train", "v2 tensor first", "jitter"])
def test_photographs(name: str) -> None:
    large = [opener(encoded(500, 375, 1, quality=90)), opener(encoded(333, 517, 2, quality=90))]
    check_pipeline({**CORE, **COLOR}[name](), large, seed=8)


def test_mixes() -> None:
    expected = mixed_batches(1)
    with torch_sink.image_backend("device", device=device_in_use(), strict=True):
        made = [(images.to(device_in_use()).cpu(), labels) for images, labels in mixed_batches(1)]
    for (images, labels), (stock_images, stock_labels) in zip(made, expected, strict=True):
        assert_same_bits(images, stock_images)
        assert torch.equal(labels, stock_labels)


@pytest.mark.parametrize("name", UNCOMMON)
def test_uncommon(name: str) -> None:
    check_pipeline(UNCOMMON[name](), some_rgb_images(name, 2), seed=3)


@pytest.mark.parametrize(("kind", "name"), [(RECORDED[name][0][0], name) for name in BATCHES])
def test_tensor_methods(kind: str, name: str) -> None:
    """What programs do to images with tensors' own methods."""
    check_batch(kind, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(200, 220, 4))
def test_random(first: int, tmp_path: Path) -> None:
    """Values, errors, warnings and draws are those of stock torchvision."""
    for seed in range(first, first + 4):
        compare(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(20_000, 20_300, 20))
def test_many_random(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 20):
        compare(seed, tmp_path)
