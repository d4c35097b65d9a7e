"""Which row of a table each lane, or each tile, belongs to.

Lanes are numbered through all segments, tiles through all images, and a program works on some of them without regard
to where rows begin. A row of the table says which of them is its first, and how many it has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..options import compiler_options

NO_OWNER = tl.constexpr(-1)
BLOCK = 1024


@triton.jit(do_not_specialize=["columns", "first_column"])
def assign_kernel(table, owners, columns, first_column, BLOCK: tl.constexpr):
    """Tells everyone that belongs to one row, a program a row.

    Args:
        table: int32 [rows, columns].
        owners: int32 [lanes or tiles], NO_OWNER before; it stays where no row is in need.
        first_column: of the first that belongs to a row; the column after it says how many do.
    """
    number = tl.program_id(0)
    row = table + number * columns + first_column
    first, count = tl.load(row), tl.load(row + 1)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(owners + first + at, number + tl.zeros_like(at), mask=at < count)


def assign_owners(table: torch.Tensor, owners: torch.Tensor, first: tl.constexpr) -> None:
    """Fills in `owners`; the arguments are those of `assign_kernel`."""
    owners.fill_(NO_OWNER.value)
    columns = table.shape[1]
    assign_kernel[(len(table),)](table, owners, columns, first.value, BLOCK=BLOCK, **compiler_options(warps=1))
