"""Functions of single values through the kernels: the tables that stock code makes, and batches of masks and numbers."""

from __future__ import annotations

import pytest
from image.operations.test_pointwise import RECORDED, check
from image.operations.test_pointwise import test_floats_that_no_table_holds as test_cut_off  # noqa: F401
from image.operations.test_pointwise import test_limits_that_are_drawn as test_limits  # noqa: F401

CALLS = {
    "clamp": "normalized", "clamp, tensors": "v1", "clamp of itself": "half", "clamped, then more": "gray",
    "bytes in place": "bytes of v2", "between bytes": "bytes", "bytes to pixels": "v2", "a mask": "bytes",
    "a whole number": "v1", "masks": "v2", "where, a method": "normalized", "written by a mask": "gray",
    "turned and transposed": "bytes", "turned and transposed, floats": "normalized", "a clone": "v1",
    "a mask moves": "v2",
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    check(CALLS[name], RECORDED[name.partition(", floats")[0]][1], True)
