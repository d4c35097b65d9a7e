"""The rows of a plan: jobs, the operations that they do, and the tables that these look things up in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torch_sink.image.core.atoms import Atom, Kind, ResizeWeights, float_bits
from torch_sink.image.plan.stages import Stage, depth, longest_branch
from torch_sink.triton_kernels import rows

COLUMN = {name: value for name, value in vars(rows).items() if name.isupper()}
# Of a position that nobody knows while the plan is made; the number of an image, or of a row, follows it.
ELSEWHERE = -1
_ALIGNMENT_BYTES = 16
_FLOAT_BYTES = 4
# Columns of one axis of a resize or a filter: the last input position, and the first that exists.
_LAST, _FIRST = 1, 7
_NO_OPERATION = (0,) * rows.OPERATION_COLUMNS


class _Position(NamedTuple):
    """Where the pixels of an image lie meanwhile: the four columns of a job that say so, and which job wrote them."""

    place: tuple[int, int, int, int]
    job: int


class Slot(NamedTuple):
    """One launch.

    Attributes:
        jobs: their rows.
        statistics: rows of those that are found before it.
        heavy: jobs that only the heavy variant of the kernel does.
    """

    jobs: list[int]
    statistics: list[tuple[int, int, int, int]]
    heavy: list[int]


class RowBuilder:
    """Collects the rows of a plan, image by image.

    Attributes:
        slots: the launches, from the last one backwards.
        read: of each job that reads an image: its number, what its view shows, and that image, as width and height.
        workspace: bytes.
        made_entries: of the tables that the device makes.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.read: list[tuple[int, int, int, int, int]] = []
        self.workspace = 0
        self.made_entries = 0
        self._jobs: list[int] = []
        self._operations: list[int] = [*_NO_OPERATION]  # row 0 is no head
        self._tables: list[np.ndarray] = []
        self._table_offsets: dict[int, int] = {}
        self._table_entries = 0
        # What the device makes lies behind the tables of the host: where, and which operations say so.
        self._resizes: dict[ResizeWeights, tuple[int, int]] = {}
        self._made_columns: list[int] = []

    # --- images

    def add_image(self, image: int, row: int, size: tuple[int, int], channels: int, stages: Sequence[Stage]) -> None:
        """Adds an image, whose stages run in the last launches.

        Args:
            image: its number.
            row: of the result that it becomes.
            size: its height and width.
            channels: of the result.
            stages: of the image.
        """
        launch = depth(stages)
        while len(self.slots) < launch:
            self.slots.append(Slot([], [], []))
        position = _Position((ELSEWHERE, image, 0, 0), -1)
        last = stages[-1]
        for stage in stages:
            ends = []
            if stage.branches:
                launch -= longest_branch(stage)
                ends = self._add_branches(stage, launch, position, size)
            launch -= 1
            target = (ELSEWHERE, row, 0, 0) if stage is last else None
            position = self._add_job(stage, self.slots[launch], position, size, target, channels, ends)

    def _add_branches(self, stage: Stage, launch: int, position: _Position, size: tuple[int, int]) -> list[Atom]:
        """Adds the branches that a stage mixes, up to the launch before it; returns what tells it where these end."""
        ends = []
        for branch, mixed in zip(stage.branches, stage.atoms[stage.form.head].branches, strict=True):
            end = position
            for at, part in enumerate(branch, 1):
                end = self._add_job(part, self.slots[launch + len(branch) - at], end, size)
            ends.append(Atom(Kind.MIX, branch[-1].size, (end.job,), mixed.weight))
        return ends

    def _add_job(
        self, stage: Stage, slot: Slot, position: _Position, image_size: tuple[int, int],
        target: tuple[int, int, int, int] | None = None, channels: int = 3, ends: Sequence[Atom] = (),
    ) -> _Position:  # fmt: skip
        """Adds one stage, which writes to the workspace where no target is given."""
        form, atoms, view, input_size, (height, width), read_rows, _ = stage
        values, head, tail, reads_floats, begins_in_floats, leaves_floats, measured, is_heavy, _ = form
        target_kind = rows.OUTPUT
        if target is None:
            # Planes of the three channels, one after the other: neighbors in a row are neighbors in memory.
            channels, target_kind = 3, rows.FLOATS if leaves_floats else rows.BYTES
            target = self._reserve(height, width, _FLOAT_BYTES if leaves_floats else 1)
        head_row = self._add_operation(atoms[head], read_rows) if head >= 0 else 0
        for end in ends:
            self._add_operation(end)
        fill = self._add_operation(Atom(Kind.SHIFT, stage.size, fill=view.fill)) if view.fill else 0
        tail_begin = len(self._operations) // rows.OPERATION_COLUMNS
        for at in tail:
            self._add_operation(atoms[at])
        source_kind, first_value = rows.FLOATS if reads_floats else rows.BYTES, 0
        if values >= 0:
            source_kind, (first_value, *_) = rows.VALUED, [self._table(table) for table in atoms[values].tables]
        job = len(self._jobs) // rows.JOB_COLUMNS
        self._jobs += (
            *position.place, *target, height, width, channels, *view.x, *view.y, fill, source_kind, first_value,
            target_kind, 1 if begins_in_floats else 255, head_row, tail_begin, tail_begin + len(tail),
        )  # fmt: skip
        slot.jobs.append(job)
        if is_heavy or source_kind != rows.BYTES or target_kind == rows.FLOATS or view.fill:
            slot.heavy.append(job)
        if position.job < 0:
            self.read.append((job, *input_size[::-1], *image_size[::-1]))
        for channel in range(measured):
            slot.statistics.append((position.job, tail_begin, channel, 0))
        return _Position(target, job)

    def _reserve(self, height: int, width: int, value_bytes: int) -> tuple[int, int, int, int]:
        offset = self.workspace
        self.workspace += -(-3 * height * width * value_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return offset // value_bytes, width, 1, height * width

    # --- operations and tables

    def _add_operation(self, atom: Atom, read_rows: tuple[int, int] | None = None) -> int:
        kind, _, values, factor, tables, formula, _, fill, weights = atom
        number = len(self._operations) // rows.OPERATION_COLUMNS
        row = [int(kind), *values, *_NO_OPERATION[len(values) + 1 :]]
        if read_rows is not None:
            row[_LAST], row[_FIRST] = read_rows[1] - 1, read_rows[0]
        if formula:
            row[rows.FORMULA] = int(formula)
        if tables:
            first = rows.PASTED if kind == Kind.PASTE else rows.TABLE
            row[first : first + len(tables)] = [self._table(table) for table in tables]
        if weights is not None:
            self._set_made(row, number, self._weights_at(weights))
        elif 23 <= kind < 30:
            self._set_made(row, number, self._statistic_at(kind))
        if fill:
            row[rows.FILL : rows.FILL + 3] = float_bits(*fill)
        if factor:
            row[rows.FACTOR] = float_bits(factor)[0]
        self._operations += row
        return number

    def _table(self, table: np.ndarray) -> int:
        # Tables come from caches, so the same one may serve many images.
        offset = self._table_offsets.get(id(table))
        if offset is None:
            offset = self._table_offsets[id(table)] = self._table_entries
            self._table_entries += table.size
            self._tables.append(table)
        return offset

    def _weights_at(self, weights: ResizeWeights) -> tuple[int, int]:
        """Where the device writes first positions and weights."""
        found = self._resizes.get(weights)
        if found is None:
            entries = weights.out_size, weights.taps * weights.out_size
            found = self._resizes[weights] = self._add_made(entries[0]), self._add_made(entries[1])
        return found

    def _statistic_at(self, kind: Kind) -> Sequence[int]:
        if kind == Kind.BLEND_MEAN:
            return (self._add_made(1),)
        if kind == Kind.CONTRAST:
            return (self._add_made(256),) * 3
        return [self._add_made(256) for _ in range(3)]

    def _add_made(self, entries: int) -> int:
        offset = self.made_entries
        self.made_entries += entries
        return offset

    def _set_made(self, row: list[int], number: int, offsets: Sequence[int]) -> None:
        row[rows.TABLE : rows.TABLE + len(offsets)] = offsets
        begin = number * rows.OPERATION_COLUMNS + rows.TABLE
        self._made_columns += range(begin, begin + len(offsets))

    # --- arrays

    def jobs(self) -> np.ndarray:
        """int64 [jobs, JOB_COLUMNS]."""
        return np.array(self._jobs, np.int64).reshape(-1, rows.JOB_COLUMNS)

    def operations(self) -> np.ndarray:
        """int32 [operations, OPERATION_COLUMNS]."""
        operations = np.array(self._operations, np.int32)
        operations[self._made_columns] += self._table_entries
        return operations.reshape(-1, rows.OPERATION_COLUMNS)

    def tables(self) -> np.ndarray:
        """int32 [entries]."""
        return np.concatenate([table.ravel() for table in self._tables]) if self._tables else np.zeros(0, np.int32)

    def resizes(self) -> np.ndarray:
        """int32 [resizes, PROLOGUE_COLUMNS]."""
        resizes = np.zeros((len(self._resizes), rows.PROLOGUE_COLUMNS), np.int32)
        if self._resizes:
            resizes[:, [*range(rows.IN_SIZE, rows.FILTER + 1), rows.PRECISION]] = list(self._resizes)
            resizes[:, [rows.FIRST_AT, rows.WEIGHTS_AT]] = list(self._resizes.values())
            resizes[:, [rows.FIRST_AT, rows.WEIGHTS_AT]] += self._table_entries
        return resizes
