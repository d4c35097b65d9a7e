"""Pipelines on float32 tensors through the kernels: the same bits as stock torchvision, or as close as promised."""

from __future__ import annotations

import pytest
from image.cases import rgb_images
from image.cases_float import FLOAT
from image.check import check_pipeline


@pytest.mark.parametrize("name", FLOAT)
def test_rgb(name: str) -> None:
    pipeline, promise = FLOAT[name]
    # Two images: an interpreted kernel pays for each.
    check_pipeline(pipeline(), rgb_images()[:2], seed=1, promise=promise)
