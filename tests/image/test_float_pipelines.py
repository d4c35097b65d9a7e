"""Pipelines on float32 tensors, on the CPU path: the same bits as stock torchvision."""

from __future__ import annotations

import pytest

from image.cases import rgb_images
from image.cases_float import FLOAT
from image.check import check_pipeline


@pytest.mark.parametrize("name", FLOAT)
def test_rgb(name: str) -> None:
    pipeline, promise = FLOAT[name]
    check_pipeline(pipeline(), _wide_images(), seed=1, promise=promise)


def _wide_images():
    # torch's own antialiased resize is wrong on tensors one pixel wide: they run in stock code.
    return [image for image in rgb_images() if image().width > 1]
