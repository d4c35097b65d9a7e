"""uint8 tensors through the kernels: the same bits as stock torchvision."""

from __future__ import annotations

import pytest
from image.cases import gray_images, some_rgb_images
from image.check import check_pipeline
from image.uint8_cases import UINT8_COLOR, UINT8_GEOMETRY, color_images


@pytest.mark.parametrize("name", UINT8_COLOR)
def test_color(name: str) -> None:
    check_pipeline(UINT8_COLOR[name](), color_images(), seed=1)


@pytest.mark.parametrize("name", UINT8_GEOMETRY)
def test_geometry(name: str) -> None:
    check_pipeline(UINT8_GEOMETRY[name](), some_rgb_images(name, 2), seed=1)


@pytest.mark.parametrize("name", ["v1 contrast", "v2 contrast", "v2 gray, and colors again"])
def test_gray(name: str) -> None:
    check_pipeline(UINT8_COLOR[name](), gray_images()[:2], seed=2)
