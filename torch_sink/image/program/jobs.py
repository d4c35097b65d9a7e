"""The plan of one image: its atoms, its stages, and the view through which the first of them reads the image.

So images of one size with equal calls share one plan, which is cached. `Rows` makes the tables of a batch from plans.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torch_sink.image.core.lowering import KIND_MASK, LoweredImage, ResizeWeights, lower
from torch_sink.image.core.ops import Op, TensorArgument
from torch_sink.image.operations.resize_tables import needed_rows
from torch_sink.image.program.stages import structure_of, view_through
from torch_sink.triton_kernels import rows
from torch_sink.triton_kernels.rows import Kind

# Plans in the cache, some kilobytes each.
_MOST_KEPT = 1024


class ImagePlan(NamedTuple):
    """The plan of one image; a job makes a stage of it.

    Attributes:
        calls: the calls recorded on the image.
        image: int64 [IMAGE_COLUMNS], how many atoms and jobs it has, and how its first job reads it.
        atoms: int32 [atoms, ATOM_COLUMNS], numbered from 1; 0 stands for no atom.
        stages: int64 [jobs, STAGE_COLUMNS]; each job reads what the one before it wrote.
        needed: for each job that makes only the rows that the next one reads: its number, and the range of rows.
        tables: for each atom with tables of the host: its row, the first column that tells where they lie, the tables.
        resizes: for each resize: the row of its atom, and its weights.
        arguments: the tensors among the arguments of the calls.
    """

    calls: tuple[Op, ...]
    image: bytes
    atoms: bytes
    stages: bytes
    needed: Sequence[tuple[int, int, int]]
    tables: Sequence[tuple[int, int, tuple[np.ndarray, ...]]]
    resizes: Sequence[tuple[int, ResizeWeights]]
    arguments: Sequence[TensorArgument]


# Columns of `ImagePlan.image`: how many atoms and jobs it has, how many channels its last job writes, the view of its
# first job, that view's fill, and height and width of what the view shows and of the image.
ATOMS, JOBS, RESULT, VIEW, VIEW_FILL, SHOWN, IMAGE, IMAGE_COLUMNS = 0, 1, 2, 3, 11, 12, 14, 16
_IMAGE = struct.Struct(f"={IMAGE_COLUMNS}q")

_kept: dict[tuple[tuple[int, int], int, tuple[Op, ...]], ImagePlan] = {}


def plan_image(size: tuple[int, int], channels: int, calls: tuple[Op, ...]) -> ImagePlan:
    """Returns the plan of an image; equal images share one.

    Args:
        size: width and height of the decoded source, pixels.
        channels: 1 or 3.
        calls: the calls recorded on the image.
    """
    key = size, channels, calls
    plan = _kept.get(key)
    if plan is None:
        plan = _plan(size, lower(size, channels, calls), calls)
        if not plan.arguments:  # the cache would keep these tensors alive
            if len(_kept) >= _MOST_KEPT:
                _kept.clear()
            _kept[key] = plan
    return plan


def _plan(size: tuple[int, int], lowered: LoweredImage, calls: tuple[Op, ...]) -> ImagePlan:
    codes, (width, height) = tuple(lowered.codes), size
    (x, y, shown, fill), leading = view_through((height, width), codes, lowered.atoms)
    stages, table, downs = structure_of(codes, leading)
    counts = len(codes), len(stages), lowered.channels
    return ImagePlan(
        calls=calls,
        image=_IMAGE.pack(*counts, *x, *y, fill, *shown, height, width),
        atoms=bytes(lowered.atoms),
        stages=table,
        needed=[(at, *needed_rows(lowered, down)) for at, down in downs],
        tables=[
            (1 + at, rows.PASTED if codes[at] & KIND_MASK == Kind.PASTE else rows.TABLE, tables)
            for at, tables in lowered.tables.items()
        ],
        resizes=[(1 + at, weights) for at, weights in lowered.weights.items()],
        arguments=[argument for op in calls for argument in op.args if type(argument) is TensorArgument],
    )
