"""uint8 tensors, also those that torchvision decodes, through the kernels: the same bits as stock torchvision."""

from __future__ import annotations

from pathlib import Path

import pytest
from image.cases import gray_images, some_rgb_images
from image.check import check_pipeline
from image.decode.test_tensor_files import check_pipeline as check_files
from image.decode.test_tensor_files import folder, test_turned_images_in_a_batch  # noqa: F401
from image.uint8_cases import UINT8_COLOR, UINT8_GEOMETRY, color_images

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning"),
]


@pytest.mark.parametrize("name", UINT8_COLOR)
def test_color(name: str) -> None:
    check_pipeline(UINT8_COLOR[name](), color_images(), seed=1)


@pytest.mark.parametrize("name", UINT8_GEOMETRY)
def test_geometry(name: str) -> None:
    check_pipeline(UINT8_GEOMETRY[name](), some_rgb_images(name, 2), seed=1)


@pytest.mark.parametrize("name", ["v1 contrast", "v2 contrast", "v2 gray, and colors again"])
def test_gray(name: str) -> None:
    check_pipeline(UINT8_COLOR[name](), gray_images()[:2], seed=2)


# The others have calls whose results on uint8 tensors depend on the processor.
@pytest.mark.parametrize("name", ["v1, evaluation", "to a Pillow image and back"])
def test_files(folder: Path, name: str) -> None:  # noqa: F811
    check_files(folder, name, 1)
