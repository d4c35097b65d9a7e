"""Whole pipelines on the CPU path: the same bits as stock torchvision."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import default_collate

import torch_sink
from image.cases import COLOR, CORE, GRAY, RESIZES, gray_images, images_of_other_modes, rgb_images
from image.check import check_pipeline
from image.smooth_cases import BLUR, RANDOM_ERASE, WARPS
from image.uint8_cases import UINT8_COLOR, UINT8_GEOMETRY, color_images

pytestmark = pytest.mark.halved


@pytest.mark.parametrize("name", [*CORE, *COLOR])
@pytest.mark.sampled(32)
def test_rgb(name: str) -> None:
    pipeline = {**CORE, **COLOR}[name]()
    check_pipeline(pipeline, rgb_images(), seed=1)


@pytest.mark.parametrize("name", BLUR)
def test_smooth(name: str) -> None:
    check_pipeline(BLUR[name](), rgb_images(), seed=1)


@pytest.mark.parametrize("name", WARPS)
def test_warps_of_tensors(name: str) -> None:
    check_pipeline(WARPS[name](), rgb_images(), seed=1)


@pytest.mark.parametrize("name", RANDOM_ERASE)
def test_random_erase(name: str) -> None:
    check_pipeline(RANDOM_ERASE[name](), rgb_images(), seed=1)


@pytest.mark.parametrize("name", ["v1 blur", "blur of tensors, gray"])
def test_smooth_gray(name: str) -> None:
    check_pipeline(BLUR[name](), gray_images(), seed=2)


@pytest.mark.parametrize("name", UINT8_COLOR)
def test_color_of_uint8_tensors(name: str) -> None:
    check_pipeline(UINT8_COLOR[name](), [*color_images(), *rgb_images()[2:4]], seed=1)


@pytest.mark.parametrize("name", UINT8_GEOMETRY)
def test_geometry_of_uint8_tensors(name: str) -> None:
    check_pipeline(UINT8_GEOMETRY[name](), rgb_images(), seed=1)


@pytest.mark.parametrize("name", RESIZES)
def test_resize(name: str) -> None:
    check_pipeline(RESIZES[name](), rgb_images(), seed=2)


@pytest.mark.parametrize("name", GRAY)
def test_gray(name: str) -> None:
    check_pipeline(GRAY[name](), gray_images(), seed=3)


@pytest.mark.parametrize("name", ["v1 imagenet train", "v2 imagenet eval", "jitter"])
def test_other_modes(name: str) -> None:
    check_pipeline({**CORE, **COLOR}[name](), images_of_other_modes(), seed=4)


def test_other_output_dtypes() -> None:
    """The SinkLoader may ask for them: rounded once, from what stock code makes."""
    check_pipeline(
        CORE["v1 imagenet train"](), rgb_images()[:3], seed=5, dtypes=(torch.float32, torch.float16, torch.bfloat16)
    )


def test_a_batch_that_only_records_can_be_printed() -> None:
    with torch_sink.image_backend("device", device="meta"):
        batch = default_collate([CORE["v1 imagenet train"]()(rgb_images()[0]())])
    assert repr(batch) == "LazyBatch(shape=(1, 3, 24, 24), dtype=torch.float32, recorded only)"
