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

# An interpreted kernel is slow, and so is one that is compiled first. Of the cases of a parametrized test in these files
# the oldest supported release of torch runs one quarter, all others another; `-m slow` runs the rest, and a device runs
# all. Other tests run interpreted on the oldest release or on the others.
LONG_FILES = (
    "test_batches.py",
    "test_pipelines.py",
    "test_uint8.py",
    "test_smooth.py",
    "test_stacks.py",
    "test_float_pipelines.py",
    "test_jpeg.py",
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
    if not INTERPRETED and "QUARTER_OF_LONG_FILES" not in os.environ:
        return
    if item.path.name not in LONG_FILES:
        return
    drawn = zlib.crc32(item.name.encode())
    if not hasattr(item, "callspec"):
        item.add_marker("once" if drawn % 2 else "once_on_oldest")
    elif drawn % 4 != is_oldest_torch():
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
