"""These tests run in a process with Triton's interpreter, and on the device of a machine that has one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from image.check import INTERPRETED, kernels_on


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter of Triton 3.6 turns arrays of one element into numbers, which NumPy 2 warns about.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")


def pytest_itemcollected(item: pytest.Item) -> None:
    if not INTERPRETED:
        item.add_marker("cuda")


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    if INTERPRETED:
        yield
        return
    with kernels_on("cuda"):
        yield
