"""The calls of one image -> its plan: its atoms, its stages, and the view through which the first of them reads it.

A stage is at most one gather at its head, then any maps and point operations; it ends before the next gather or
statistic. Maps at the very start become the view. What depends only on the kinds of the atoms is cached for each
sequence of kinds, and images of one size with equal calls share one plan. `Rows` makes a batch's tables from plans.
"""

from __future__ import annotations

import functools
import itertools
import struct
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from torch_sink.image.core.lowering import (
    ATOM,
    ATOM_BYTES,
    KIND_MASK,
    OUTPUT_HEIGHT,
    LoweredImage,
    ResizeWeights,
    lower,
)
from torch_sink.image.core.ops import Op, TensorArgument
from torch_sink.image.operations.resize_tables import SUPPORT
from torch_sink.triton_kernels import rows
from torch_sink.triton_kernels.rows import FIRST_OUTPUT, LAST_INPUT, MIRRORS, Kind

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
    image = _IMAGE.pack(len(codes), len(stages), lowered.channels, *x, *y, fill, *shown, height, width)
    # Loops, since each comprehension would be a call: no two images of a random crop share a plan.
    tables: list[tuple[int, int, tuple[np.ndarray, ...]]] = []
    for at, found in lowered.tables.items():
        tables.append((1 + at, rows.PASTED if codes[at] & KIND_MASK == Kind.PASTE else rows.TABLE, found))
    arguments: list[Any] = []
    for op in calls:
        for argument in op.args:
            if type(argument) is TensorArgument:
                arguments.append(argument)
    resizes: list[tuple[int, ResizeWeights]] = []
    for at, weights in lowered.weights.items():
        resizes.append((1 + at, weights))
    needed: list[tuple[int, int, int]] = []
    for at, down in downs:
        needed.append((at, *_needed_rows(lowered, down)))
    return ImagePlan(calls, image, bytes(lowered.atoms), table, needed, tables, resizes, arguments)


def _needed_rows(lowered: LoweredImage, down: int) -> tuple[int, int]:
    """Input rows [begin, end) that a RESAMPLE_Y or FILTER_Y, an atom of `lowered`, reads for the rows it makes."""
    atom, weights = ATOM.unpack_from(lowered.atoms, ATOM_BYTES * down), lowered.weights.get(down)
    height, first = atom[LAST_INPUT] + 1, atom[FIRST_OUTPUT]
    last = first + atom[OUTPUT_HEIGHT] - 1
    if weights is not None:
        scale = weights.in_size / weights.out_size
        support = SUPPORT[weights.resample] * (scale if scale > 1.0 else 1.0)
        # Ranges that are rounded in float32 may hold one row more.
        more = int(atom[0] == Kind.FILTER_Y)
        begin = max(int((first + 0.5) * scale - support + 0.5), 0) - more
        end = min(int((last + 0.5) * scale + support + 0.5), weights.in_size) + more
        return max(begin, 0), min(end, height)
    if atom[0] == Kind.FILTER_Y and atom[MIRRORS]:
        return 0, height
    starts, taps = lowered.tables[down]
    return max(int(starts[first]), 0), min(int(starts[last]) + len(taps), height)


# --- stages

_ACROSS = (Kind.RESAMPLE_X, Kind.FILTER_X)
_DOWN = (Kind.RESAMPLE_Y, Kind.FILTER_Y)


class Stage(NamedTuple):
    """One stage, as far as the kinds of its atoms determine it; numbers of atoms are positions in the image.

    Attributes:
        values: the VALUES atom by which the head reads bytes as floats, or -1.
        head: the gather, or -1.
        begin, end: the atoms after the head.
        source_kind: kind of the values that it reads: BYTES, FLOATS or VALUED.
        target_kind: kind of the values that it leaves in the workspace: BYTES or FLOATS.
        top: the largest value where the atoms after the head begin: 255 for bytes, 1 for floats.
        measured: how many channels of its input need a statistic first.
        is_heavy: it needs the heavy variant of the kernel, wherever it writes.
        down: for a horizontal pass, the vertical pass that follows; only the rows which that reads are made; or -1.
    """

    values: int = -1
    head: int = -1
    begin: int = 0
    end: int = 0
    source_kind: int = rows.BYTES
    target_kind: int = rows.BYTES
    top: int = 255
    measured: int = 0
    is_heavy: bool = False
    down: int = -1


STAGE_COLUMNS = len(Stage._fields)


# Stages of an image; the bytes of their fields, int64 [stages, STAGE_COLUMNS]; and for each stage that makes only the
# rows that the next one reads, its number and the head of the next.
Structure = tuple[tuple[Stage, ...], bytes, tuple[tuple[int, int], ...]]


@functools.lru_cache(maxsize=4096)
def structure_of(codes: tuple[int, ...], leading: int) -> Structure:
    """The stages of atoms of these codes; the first `leading` atoms are in the view of the first stage."""
    stages = stages_of(codes, leading)
    table = array("q", itertools.chain.from_iterable(stages)).tobytes()
    return stages, table, tuple((at, stage.down) for at, stage in enumerate(stages) if stage.down >= 0)


def stages_of(codes: tuple[int, ...], leading: int) -> tuple[Stage, ...]:
    """Splits atoms of these codes into stages; the first `leading` ones belong to none."""
    kinds = _kinds(codes)
    split = _split(kinds, leading)
    stages, in_floats, source_kind = [], False, rows.BYTES
    for number, (values, head, begin, end) in enumerate(split):
        begins_in_floats = in_floats = in_floats or values >= 0
        in_floats = in_floats or Kind.VALUES in kinds[begin:end]
        target_kind = rows.FLOATS if in_floats or (head >= 0 and kinds[head] == Kind.FILTER_X) else rows.BYTES
        measured = 0
        if begin < end and kinds[begin].role == "statistic":
            measured = 1 if kinds[begin] in (Kind.CONTRAST, Kind.BLEND_MEAN) else 3
        used = [*range(begin, end), *([head] if head >= 0 else [])]
        source_kind = rows.VALUED if values >= 0 else source_kind
        # What computes as torchvision does for tensors; statistics do so in both variants of the kernel.
        of_tensors = [codes[at] > KIND_MASK and kinds[at].role != "statistic" for at in used]
        is_heavy = any(kinds[at].is_heavy for at in used) or any(of_tensors)
        is_heavy = is_heavy or begins_in_floats or source_kind != rows.BYTES
        down = -1
        if head >= 0 and begin == end and kinds[head] in _ACROSS and number + 1 < len(split):
            following = split[number + 1][1]
            down = following if following >= 0 and kinds[following] in _DOWN else -1
        top = 1 if begins_in_floats else 255
        stages.append(Stage(values, head, begin, end, source_kind, target_kind, top, measured, is_heavy, down))
        source_kind = target_kind
    return tuple(stages)


def _split(kinds: Sequence[Kind], leading: int) -> list[tuple[int, int, int, int]]:
    """`values`, `head`, `begin` and `end` of each stage."""
    reads_values = kinds[leading : leading + 1] == (Kind.VALUES,) and _begins_with_gather(kinds[leading + 1 :])
    first = leading + reads_values
    split = [(leading if reads_values else -1, -1, first, first)]
    for at in range(first, len(kinds)):
        values, head, begin, end = split[-1]
        pastes_again = kinds[at] == Kind.PASTE and Kind.PASTE in kinds[begin:end]
        if kinds[at].role == "statistic" or pastes_again:
            split.append((-1, -1, at, at + 1))
        elif kinds[at].role == "gather" and head < 0 and begin == end:
            split[-1] = values, at, at + 1, at + 1
        elif kinds[at].role == "gather":
            split.append((-1, at, at + 1, at + 1))
        else:
            split[-1] = values, head, begin, at + 1
    return split


def _kinds(codes: tuple[int, ...]) -> tuple[Kind, ...]:
    return tuple(Kind(code & KIND_MASK) for code in codes)


def _begins_with_gather(kinds: Sequence[Kind]) -> bool:
    return bool(kinds) and kinds[0].role == "gather"


# --- the view of the first stage

# On one axis: input position = step * position + offset where begin <= position < end.
Axis = tuple[int, int, int, int]


class View(NamedTuple):
    """The flips and shifts through which a stage reads its input.

    Attributes:
        x, y: horizontal and vertical axis.
        size: (height, width) of what it shows.
        fill: row of the atom that holds the color outside the input; 0 where the view stays inside.
    """

    x: Axis
    y: Axis
    size: tuple[int, int]
    fill: int = 0


def view_through(size: tuple[int, int], codes: tuple[int, ...], atoms: bytearray) -> tuple[View, int]:
    """The view that the first maps of an image make; returns it, and how many maps it took in.

    It takes in a map that leaves the image only where a head follows: elsewhere the tail fills at less cost.

    Args:
        size: height and width of the decoded image.
        codes: of its atoms.
        atoms: their rows, numbered from 1.
    """
    maps, may_leave = _beginning(codes)
    x, y, fill = (1, 0, 0, size[1]), (1, 0, 0, size[0]), 0
    for at in range(maps):
        kind, left, top, old_width, old_height, *_, height, width = ATOM.unpack_from(atoms, ATOM_BYTES * at)
        if kind == _FLIP:
            x = _flipped(x, old_width) if left else x
            y = _flipped(y, old_height) if top else y
        elif kind == _SHIFT:
            if left < 0 or top < 0 or left + width > old_width or top + height > old_height:
                row = 1 + at
                if not may_leave or (fill and _fill_of(atoms, fill) != _fill_of(atoms, row)):
                    return View(x, y, size, fill), at
                fill = row
            x = x[0], x[1] + x[0] * left, max(x[2], 0) - left, min(x[3], old_width) - left
            y = y[0], y[1] + y[0] * top, max(y[2], 0) - top, min(y[3], old_height) - top
        else:
            return View(x, y, size, fill), at
        size = height, width
    return View(x, y, size, fill), maps


_SHIFT, _FLIP = int(Kind.SHIFT), int(Kind.FLIP)


def _fill_of(atoms: bytearray, row: int) -> bytearray:
    begin = ATOM_BYTES * (row - 1) + 4 * rows.FILL
    return atoms[begin : begin + 12]


@functools.lru_cache(maxsize=4096)
def _beginning(codes: tuple[int, ...]) -> tuple[int, bool]:
    """How many maps an image begins with, and whether a head follows them."""
    kinds = _kinds(codes)
    maps = next((at for at, kind in enumerate(kinds) if kind.role != "map"), len(kinds))
    return maps, _begins_with_gather(kinds[maps + (kinds[maps : maps + 1] == (Kind.VALUES,)) :])


def _flipped(axis: Axis, size: int) -> Axis:
    step, offset, begin, end = axis
    return -step, offset + step * (size - 1), size - end, size - begin
