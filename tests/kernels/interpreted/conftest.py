"""These tests run in a process with Triton's interpreter, and on the device of a machine that has one."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from image.check import INTERPRETED, kernels_on

from kernels import quick_interpreter

# An interpreted kernel is slow. Each release of torch runs every third case of a long list, another third than other
# releases; `-m slow` runs the rest, and a device runs all.
LONG_LISTS = (
    "test_batches.py",
    "test_pipelines.py",
    "test_uint8.py",
    "test_smooth.py",
    "test_float_pipelines.py",
)
THIRDS = 3


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter of Triton 3.6 turns arrays of one element into numbers, which NumPy 2 warns about.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")
    if INTERPRETED:
        quick_interpreter.install(check_overflow=config.getoption("markexpr") != "not slow")


def pytest_itemcollected(item: pytest.Item) -> None:
    if not INTERPRETED:
        item.add_marker("cuda")
    elif item.path.name in LONG_LISTS and hasattr(item, "callspec"):
        minor = int(torch.__version__.split(".")[1])
        if zlib.crc32(item.name.encode()) % THIRDS != minor % THIRDS:
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
