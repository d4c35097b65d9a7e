"""Stacks of views, through the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from image.test_stacks import TRANSFORMS, check_transform, folder  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(folder: Path, name: str) -> None:  # noqa: F811
    check_transform(folder, name, workers=1)
