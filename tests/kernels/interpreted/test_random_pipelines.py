"""Random pipelines through the kernels: stock torchvision's values, errors, warnings and draws."""

from __future__ import annotations

from pathlib import Path

import pytest
from image.random_pipelines import compare

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("first", range(200, 220, 4))
def test_scenarios(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 4):
        compare(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20_000, 20_300, 20))
def test_many_scenarios(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 20):
        compare(seed, tmp_path)
