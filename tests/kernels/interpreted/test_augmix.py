"""AugMix through the kernels: the same bits as stock torchvision."""

from __future__ import annotations

import pytest
from image.augmix_cases import INPUTS, WAYS, images
from image.cases import gray_images
from image.check import check_pipeline

# The others run on a device, and with `-m slow`.
QUICK = ("v1, resized", "v2, cropped alone", "v2, histograms shared by branches", "v2, floats after it")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WAYS]
)
def test_in_pipelines(name: str) -> None:
    check_pipeline(WAYS[name](), images(2), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_more_images(name: str) -> None:
    check_pipeline(WAYS[name](), images(16), seed=2)


def test_gray() -> None:
    check_pipeline(INPUTS["v1 tensors"]({"severity": 10, "mixture_width": 2}), gray_images()[:2], seed=3)
