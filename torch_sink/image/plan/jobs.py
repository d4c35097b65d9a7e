"""The rows of a plan: jobs, the operations that they do, and the tables that these look things up in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torch_sink.image.core.atoms import Atom, Kind, Program, ResizeWeights, float_bits
from torch_sink.image.plan.stages import Stage
from torch_sink.triton_kernels import rows

COLUMN = {name: value for name, value in vars(rows).items() if name.isupper()}
# Of a position that nobody knows while the plan is made; the number of an image, or of a row, follows it.
_ELSEWHERE = -1
_ALIGNMENT_BYTES = 16
_FLOAT_BYTES = 4


class RowBuilder:
    """Collects the rows of a plan."""

    def __init__(self) -> None:
        self.jobs: list[list[int]] = []
        self.operations: list[list[int]] = [[0] * rows.OPERATION_COLUMNS]  # no head
        self.tables: list[np.ndarray] = []
        self.table_offsets: dict[int, int] = {}
        self.table_entries = 0
        # What the device makes lies behind the tables of the host: where, and which operations say so.
        self.resizes: dict[ResizeWeights, list[int]] = {}
        self.made_entries = 0
        self.made_columns: list[tuple[int, int]] = []
        self.workspace = 0

    def reserve(self, number_of_bytes: int) -> int:
        offset = self.workspace
        self.workspace += -(-number_of_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return offset

    def add_table(self, table: np.ndarray) -> int:
        # Tables come from caches, so the same one may serve many images.
        if id(table) not in self.table_offsets:
            self.table_offsets[id(table)] = self.table_entries
            self.table_entries += table.size
            self.tables.append(table)
        return self.table_offsets[id(table)]

    def _add_made(self, entries: int) -> int:
        offset = self.made_entries
        self.made_entries += entries
        return offset

    def _weights_at(self, weights: ResizeWeights) -> list[int]:
        """Where the device writes first positions and weights."""
        if weights not in self.resizes:
            entries = weights.out_size, weights.taps * weights.out_size
            self.resizes[weights] = [self._add_made(count) for count in entries]
        return self.resizes[weights]

    def add_operation(self, atom: Atom) -> int:
        number, row = len(self.operations), [0] * rows.OPERATION_COLUMNS
        row[0], row[rows.FORMULA] = int(atom.kind), int(atom.formula)
        row[1 : 1 + len(atom.values)] = atom.values
        first = rows.PASTED if atom.kind == Kind.PASTE else rows.TABLE
        for column, table in enumerate(atom.tables, first):
            row[column] = self.add_table(table)
        if atom.weights is not None:
            self._set_made(row, number, self._weights_at(atom.weights))
        elif atom.kind == Kind.BLEND_MEAN:
            self._set_made(row, number, [self._add_made(1)])
        elif atom.kind.role == "statistic":
            tables = [self._add_made(256) for _ in range(1 if atom.kind == Kind.CONTRAST else 3)]
            self._set_made(row, number, tables * (3 // len(tables)))
        if atom.fill:
            row[rows.FILL : rows.FILL + 3] = float_bits(*atom.fill)
        if atom.factor:
            row[rows.FACTOR] = float_bits(atom.factor)[0]
        self.operations.append(row)
        return number

    def _set_made(self, row: list[int], number: int, offsets: Sequence[int]) -> None:
        for column, offset in enumerate(offsets, rows.TABLE):
            row[column] = offset
            self.made_columns.append((number, column))

    def made_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Operations and resizes, with all offsets into the tables: int32."""
        operations = np.array(self.operations, dtype=np.int32)
        if self.made_columns:
            operations[tuple(np.array(self.made_columns).T)] += self.table_entries
        resizes = np.zeros((len(self.resizes), rows.PROLOGUE_COLUMNS), np.int32)
        if self.resizes:
            resizes[:, [*range(rows.IN_SIZE, rows.FILTER + 1), rows.PRECISION]] = list(self.resizes)
            offsets = np.array(list(self.resizes.values()))
            resizes[:, [rows.FIRST_AT, rows.WEIGHTS_AT]] = offsets + self.table_entries
        return operations, resizes


class Position(NamedTuple):
    """Where the pixels of an image lie meanwhile: the four columns of a job that say so, and which job wrote them."""

    place: tuple[int, int, int, int]
    is_float: bool
    job: int


class ImageJobs:
    """Adds the jobs of one image, in order; remembers where its pixels lie meanwhile."""

    def __init__(self, builder: RowBuilder, image: int, row: int, program: Program) -> None:
        self.builder, self.program = builder, program
        self.position = Position((_ELSEWHERE, image, 0, 0), False, -1)
        self.output = _ELSEWHERE, row, 0, 0
        # Operations that tell the next mix where its branches end.
        self.branch_ends: list[Atom] = []
        # Of the job that was added last: rows of `statistics`.
        self.statistics: list[list[int]] = []

    def add_branch_stage(self, stage: Stage, position: Position) -> Position:
        """Adds one stage of a branch of the next stage; what that reads itself stays as it is."""
        before, self.position = self.position, position
        self.add_stage(stage, is_last=False)
        position, self.position = self.position, before
        return position

    def end_branch(self, stage: Stage, position: Position, weight: float) -> None:
        """Remembers where a branch ends."""
        self.branch_ends.append(Atom(Kind.MIX, stage.size, (position.job,), weight))

    def add_stage(self, stage: Stage, *, is_last: bool) -> int:
        """The number of the new job; `is_last`: it writes the result."""
        builder, (height, width) = self.builder, stage.size
        if is_last:
            target, target_kind = self.output, rows.OUTPUT
        else:
            # Planes of the three channels, one after the other: neighbors in a row are neighbors in memory.
            value_bytes = _FLOAT_BYTES if stage.leaves_floats else 1
            offset = builder.reserve(3 * height * width * value_bytes) // value_bytes
            target, target_kind = (offset, width, 1, height * width), rows.FLOATS if stage.leaves_floats else rows.BYTES
        head = builder.add_operation(stage.head) if stage.head is not None else 0
        if stage.branches:
            for end in self.branch_ends:
                builder.add_operation(end)
            self.branch_ends.clear()
        fill = builder.add_operation(Atom(Kind.SHIFT, stage.size, fill=stage.view.fill)) if stage.view.fill else 0
        tail_begin = len(builder.operations)
        for atom in stage.tail:
            builder.add_operation(atom)
        source_kind, values = rows.FLOATS if self.position.is_float else rows.BYTES, 0
        if stage.values is not None:
            source_kind, (values, *_) = rows.VALUED, [builder.add_table(table) for table in stage.values.tables]
        job = [*self.position.place, *target, height, width, self.program.out_channels if is_last else 3]
        job += [*stage.view.x, *stage.view.y, fill, source_kind, values, target_kind]
        job += [1 if stage.begins_in_floats else 255, head, tail_begin, len(builder.operations)]
        self.statistics = []
        if stage.measures:
            channels = 1 if stage.tail[0].kind in (Kind.CONTRAST, Kind.BLEND_MEAN) else 3
            self.statistics = [[self.position.job, tail_begin, channel, 0] for channel in range(channels)]
        builder.jobs.append(job)
        self.position = Position(target, stage.leaves_floats, len(builder.jobs) - 1)
        return self.position.job
