"""Blur through the kernels, as close to stock torchvision as promised."""

from __future__ import annotations

import pytest
from image.cases import some_rgb_images
from image.check import check_pipeline
from image.smooth_cases import BLUR


@pytest.mark.parametrize("name", BLUR)
def test_rgb(name: str) -> None:
    make, promise = BLUR[name]
    check_pipeline(make(), some_rgb_images(name, 2), seed=1, promise=promise)
