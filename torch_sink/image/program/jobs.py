"""The plan of one image: atoms, stages and runs, counted from the image's own beginning.

So images of one size with equal calls share one plan, which is cached. `Rows` makes the tables of a batch from plans.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torch_sink.image.core.lowering import ATOM_BYTES, KIND_MASK, OUTPUT_HEIGHT, LoweredImage, ResizeWeights, lower
from torch_sink.image.core.ops import Op, TensorArgument
from torch_sink.image.operations.resize_tables import needed_rows
from torch_sink.image.program.stages import Structure, View, structure, structure_of, view_through, whole_view
from torch_sink.triton_kernels import rows
from torch_sink.triton_kernels.rows import Kind

_STATISTICS = range(Kind.CONTRAST, Kind.RESAMPLE_X)
_COPY = structure_of((), 0)
# Plans in the cache, some kilobytes each.
_MOST_KEPT = 1024


class ImagePlan(NamedTuple):
    """The plan of one image.

    Attributes:
        calls: the calls recorded on the image.
        counts: how many atoms, jobs, runs, and launches it takes.
        atoms: int32 [atoms, ATOM_COLUMNS], numbered from 1; 0 stands for no atom.
        stages: int64 [jobs, STAGE_COLUMNS].
        runs: int64 [runs, RUN_COLUMNS]; in a run, each job reads what the one before it wrote.
        needed: for each job that makes only the rows that the next one reads: its number, and the range of rows.
        tables: for each atom with tables of the host: its row, the first column that tells where they lie, the tables.
        resizes: for each resize: the row of its atom, and its weights.
        branches: rows of the atoms that name the job at the end of a branch.
        arguments: the tensors among the arguments of the calls.
    """

    calls: tuple[Op, ...]
    counts: tuple[int, int, int, int]
    atoms: bytes
    stages: bytes
    runs: bytes
    needed: Sequence[tuple[int, int, int]]
    tables: Sequence[tuple[int, int, tuple[np.ndarray, ...]]]
    resizes: Sequence[tuple[int, ResizeWeights]]
    branches: Sequence[int]
    arguments: Sequence[TensorArgument]


# Columns of a run: how many jobs it has, the row before its first atom, the launch of its first job, the job whose
# output that one reads (-1: the image), how many channels its last job writes to the result (0: it writes to the
# workspace), the view of its first job, that view's fill, and height and width of what the view shows and of the image.
LENGTH, FIRST_ATOM, FIRST_LAUNCH, READ_JOB, RESULT, VIEW, VIEW_FILL, SHOWN, IMAGE = 0, 1, 2, 3, 4, 5, 13, 14, 16
RUN_COLUMNS = 18
_RUN = struct.Struct(f"={RUN_COLUMNS}q")

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
        plan = _Planner(size, lower(size, channels, calls), calls).plan
        if not plan.arguments:  # the cache would keep these tensors alive
            if len(_kept) >= _MOST_KEPT:
                _kept.clear()
            _kept[key] = plan
    return plan


# What a run reads: the job that wrote it (-1: the image itself), and the view through which it is read.
_Input = tuple[int, View]


class _Planner:
    """Makes the plan of one image, run by run.

    Args:
        size: width and height of the decoded image.
        lowered: the image, lowered from its calls.
        calls: what was recorded on the image.
    """

    def __init__(self, size: tuple[int, int], lowered: LoweredImage, calls: tuple[Op, ...]) -> None:
        self._size = size[1], size[0]
        self._atoms = bytearray(ATOM_BYTES)
        self._stages = self._runs = b""
        self._jobs = 0
        self._needed: list[tuple[int, int, int]] = []
        self._tables: list[tuple[int, int, tuple[np.ndarray, ...]]] = []
        self._resizes: list[tuple[int, ResizeWeights]] = []
        self._branches: list[int] = []
        _, launches = self._add(lowered, (-1, whole_view(self._size)), 0, lowered.channels)
        counts = len(self._atoms) // ATOM_BYTES - 1, self._jobs, len(self._runs) // _RUN.size, launches
        arguments = [argument for op in calls for argument in op.args if type(argument) is TensorArgument]
        self.plan = ImagePlan(
            calls, counts, bytes(self._atoms[ATOM_BYTES:]), self._stages, self._runs, self._needed, self._tables,
            self._resizes, self._branches, arguments,
        )  # fmt: skip

    def _add(self, lowered: LoweredImage, read: _Input, launch: int, result: int) -> tuple[_Input, int]:
        """Adds the image, or a branch of it.

        Args:
            lowered: its atoms.
            read: what its first stage reads.
            launch: number of the launch of its first stage.
            result: channels of the result that the last stage writes, or 0 for the workspace.

        Returns:
            What the last stage wrote, and the number of the launch after it.
        """
        codes, first = tuple(lowered.codes), len(self._atoms) // ATOM_BYTES
        self._atoms += lowered.atoms
        for at, tables in lowered.tables.items():
            column = rows.PASTED if codes[at] & KIND_MASK == Kind.PASTE else rows.TABLE
            self._tables.append((first + at, column, tables))
        for at, weights in lowered.weights.items():
            self._resizes.append((first + at, weights))
        job, view = read
        view, leading = view_through(view, codes, self._atoms, first)
        read, run = (job, view), structure_of(codes, leading)
        if job >= 0 and _begins_with_statistic(lowered):
            run = structure(run[0][1:])  # the input of a statistic lies in the workspace already
        for head in lowered.branches:
            stages, at = run[0], [stage.head for stage in run[0]].index(head)
            if at:
                read, launch = self._add_run(structure(stages[:at]), lowered, first, read, launch)
            read, launch = self._add_branches(lowered, head, first, read, launch)
            run = structure(stages[at:])
        return self._add_run(run, lowered, first, read, launch, result)

    def _add_branches(
        self, lowered: LoweredImage, head: int, first: int, read: _Input, launch: int
    ) -> tuple[_Input, int]:
        """Adds the branches of a MIX; returns its own input, and its launch."""
        branches = lowered.branches[head]
        if read[0] < 0 and any(map(_begins_with_statistic, branches)):
            # The input of a statistic has to lie in the workspace.
            read, launch = self._add_run(_COPY, lowered, first, read, launch)
        behind = launch
        for number, branch in enumerate(branches, 1):
            end, after = self._add(branch, read, launch, 0)
            row = first + head + number
            struct.pack_into("=i", self._atoms, ATOM_BYTES * row + 4 * rows.BRANCH_JOB, end[0])
            self._branches.append(row)
            behind = max(behind, after)
        return read, behind

    def _add_run(
        self, run: Structure, lowered: LoweredImage, first: int, read: _Input, launch: int, result: int = 0
    ) -> tuple[_Input, int]:
        """Adds stages whose atoms follow row `first`; the other arguments, and what it returns, are those of `_add`."""
        (stages, table, downs), (job, view) = run, read
        for at, down in downs:
            self._needed.append((self._jobs + at, *needed_rows(lowered, down)))
        x, y, size, fill = view
        self._runs += _RUN.pack(len(stages), first, launch, job, result, *x, *y, fill, *size, *self._size)
        self._stages += table
        self._jobs += len(stages)
        launch += len(stages)
        if result:  # no run reads the result
            return read, launch
        ending = stages[-1].end - 1 if stages[-1].begin < stages[-1].end else stages[-1].head
        if ending >= 0:
            height, width = lowered.atom(ending)[OUTPUT_HEIGHT:]
            size = height, width
        return (self._jobs - 1, whole_view(size)), launch


def _begins_with_statistic(lowered: LoweredImage) -> bool:
    return bool(lowered.codes) and lowered.codes[0] & KIND_MASK in _STATISTICS
