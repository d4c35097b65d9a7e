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


@triton.jit
def assign_kernel(table, owners, COLUMNS: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Tells everyone that belongs to one row, a program a row.

    Args:
        table: int32 [rows, COLUMNS].
        owners: int32 [lanes or tiles], NO_OWNER before; it stays where no row is in need.
        FIRST: column of the first that belongs to a row.
        COUNT: column of how many do.
    """
    number = tl.program_id(0)
    first = tl.load(table + number * COLUMNS + FIRST)
    count = tl.load(table + number * COLUMNS + COUNT)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(owners + first + at, number + tl.zeros_like(at), mask=at < count)


def assign_owners(table: torch.Tensor, owners: torch.Tensor, *, first: tl.constexpr, count: tl.constexpr) -> None:
    """Fills in `owners`; the arguments are those of `assign_kernel`."""
    owners.fill_(NO_OWNER.value)
    columns = table.shape[1]
    assign_kernel[(len(table),)](
        table,
        owners,
        COLUMNS=columns,
        FIRST=first.value,
        COUNT=count.value,
        BLOCK=BLOCK,
        **compiler_options(warps=1),
    )
