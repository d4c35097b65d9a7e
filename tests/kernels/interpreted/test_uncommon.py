"""What is seldom asked for, through the kernels: the same bits as stock torchvision."""

from __future__ import annotations

import pytest
from image.cases import some_rgb_images
from image.check import check_pipeline
from image.uncommon_cases import UNCOMMON


@pytest.mark.parametrize("name", UNCOMMON)
def test_rgb(name: str) -> None:
    check_pipeline(UNCOMMON[name](), some_rgb_images(name, 2), seed=3)
