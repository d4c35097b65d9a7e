"""These tests run in a process with Triton's interpreter, and on the device of a machine that has one."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from image.check import INTERPRETED, kernels_on

from kernels import quick_interpreter
from kernels.releases import is_oldest_torch

# An interpreted kernel is slow, and so is one that is compiled first. The oldest supported release of torch runs one half
# of the cases of a long list, all others the other half; `-m slow` runs the rest, and a device runs all.
LONG_LISTS = (
    "test_batches.py",
    "test_pipelines.py",
    "test_uint8.py",
    "test_smooth.py",
    "test_stacks.py",
    "test_float_pipelines.py",
    "test_jpeg_batches.py",
)


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter of Triton 3.6 turns arrays of one element into numbers, which NumPy 2 warns about.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")
    if INTERPRETED:
        quick_interpreter.install(check_overflow="not slow" not in config.getoption("markexpr"))


def pytest_itemcollected(item: pytest.Item) -> None:
    if not INTERPRETED:
        item.add_marker("cuda")
    if not INTERPRETED and "HALF_OF_LONG_LISTS" not in os.environ:
        return
    in_long_list = item.path.name in LONG_LISTS and hasattr(item, "callspec")
    if in_long_list and zlib.crc32(item.name.encode()) % 2 != is_oldest_torch():
        item.add_marker("slow")


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    if INTERPRETED:
        # A device says nothing where it divides by 0, or makes an integer of NaN.
        with np.errstate(divide="ignore", invalid="ignore"):
            yield
        return
    with kernels_on("cuda"):
        yield
