"""Blur and warps of tensors through the kernels, as close to stock torchvision as promised."""

from __future__ import annotations

import pytest
import torch
from image.cases import some_rgb_images
from image.check import check_pipeline
from image.operations.test_tensor_arguments import *  # noqa: F403
from image.smooth_cases import BLUR, RANDOM_ERASE, WARPS


@pytest.mark.parametrize("name", RANDOM_ERASE)
def test_random_erase(name: str) -> None:
    dtypes = [torch.float16, torch.bfloat16] if name == "v1" else []
    check_pipeline(RANDOM_ERASE[name](), some_rgb_images(name, 1), seed=1, dtypes=dtypes)


@pytest.mark.parametrize("name", WARPS)
def test_warps(name: str) -> None:
    check_pipeline(WARPS[name](), some_rgb_images(name, 1), seed=1)


@pytest.mark.parametrize("name", BLUR)
def test_blur(name: str) -> None:
    check_pipeline(BLUR[name](), some_rgb_images(name, 1), seed=1)
