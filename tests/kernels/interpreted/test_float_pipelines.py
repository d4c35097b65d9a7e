"""Pipelines on float32 tensors through the kernels: the same bits as stock torchvision, or as close as promised."""

from __future__ import annotations

import pytest
from image.cases import rgb_images
from image.cases_float import FLOAT
from image.check import check_pipeline


@pytest.mark.parametrize("name", FLOAT)
def test_rgb(name: str) -> None:
    pipeline, promise = FLOAT[name]
    check_pipeline(pipeline(), [rgb_images()[at] for at in (0, 1, 3)], seed=1, promise=promise)
