"""The rows of a plan: jobs, the operations that they do, and the tables that these look things up in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_sink.image.core.atoms import Atom, FloatKind, Kind, Program
from torch_sink.image.core.ops import Op
from torch_sink.image.plan.stages import Stage
from torch_sink.triton_kernels import rows

COLUMN = {name: value for name, value in vars(rows).items() if name.isupper()}
_TABLE_COLUMN = {Kind.REMAP: 2, Kind.LOOKUP: 2, Kind.GRID: 10, FloatKind.WARP: 10}
_HEAD_TABLE_COLUMN = 8
# What hands float32 values to the next stage.
_FLOAT_OUTPUTS = (Kind.BLUR_X, Kind.RESIZE_X)
# Of a position that nobody knows while the plan is made; the number of an image, or of a row, follows it.
_ELSEWHERE = -1
_ALIGNMENT_BYTES = 16
_ALIGNMENT_FLOATS = 4


class RowBuilder:
    """Collects the rows of a plan."""

    def __init__(self) -> None:
        self.jobs: list[list[int]] = []
        self.operations: list[list[int]] = []
        self.tables: list[np.ndarray] = []
        self.table_offsets: dict[int, int] = {}
        self.table_entries = 0
        self.histograms = 0
        self.workspace = 0
        self.floats = 0
        self.chains: dict[tuple[tuple[Op, ...], int], int] = {}

    def add_histogram(self) -> int:
        self.histograms += 1
        return self.histograms - 1

    def reserve(self, number_of_bytes: int) -> int:
        offset = self.workspace
        self.workspace += -(-number_of_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return offset

    def reserve_floats(self, elements: int) -> int:
        offset = self.floats
        self.floats += -(-elements // _ALIGNMENT_FLOATS) * _ALIGNMENT_FLOATS
        return offset

    def add_table(self, table: np.ndarray) -> int:
        # Tables come from caches, so the same one may serve many images.
        if id(table) not in self.table_offsets:
            self.table_offsets[id(table)] = self.table_entries
            self.table_entries += table.size
            self.tables.append(table)
        return self.table_offsets[id(table)]

    def add_operation(self, atom: Atom) -> int:
        row = [0] * COLUMN["OPERATION_COLUMNS"]
        row[0], row[COLUMN["FORMULA"]] = int(atom.kind), int(atom.formula)
        row[1 : 1 + len(atom.values)] = atom.values
        for number, table in enumerate(atom.tables):
            row[_TABLE_COLUMN.get(atom.kind, _HEAD_TABLE_COLUMN) + number] = self.add_table(table)
        if atom.factor:
            row[COLUMN["FACTOR"]] = int(np.float32(atom.factor).view(np.int32))
        self.operations.append(row)
        return len(self.operations) - 1


class ImageJobs:
    """Adds the jobs of one image, in order; remembers where its pixels lie meanwhile."""

    def __init__(self, builder: RowBuilder, image: int, row: int, program: Program) -> None:
        self.builder, self.program = builder, program
        self.source: tuple[int, int, int, int] = _ELSEWHERE, image, 0, 0
        self.output = _ELSEWHERE, row, 0, 0
        self.from_bytes = 1
        self.histogram = -1
        # Operations that tell the next mix where its branches end.
        self.branch_ends: list[Atom] = []
        self.shared_histogram = -1

    def add_branch(self, stages: Sequence[Stage], weight: float) -> list[int]:
        """The numbers of the jobs of one branch of the next stage; what that reads itself stays as it is."""
        before = self.source, self.histogram, self.from_bytes
        self.shared_histogram = self.histogram
        numbers = [
            self.add_stage(stage, following, on_floats=False, is_last=False)
            for stage, following in zip(stages, [*stages[1:], None], strict=True)
        ]
        self.branch_ends.append(Atom(Kind.MIX, stages[-1].size, (numbers[-1],), weight))
        self.source, self.histogram, self.from_bytes = before
        return numbers

    def add_stage(self, stage: Stage, following: Stage | None, *, on_floats: bool, is_last: bool) -> int:
        """The number of the new job; `following`: the stage after it, if any; `is_last`: it writes the result."""
        return self._add_float_stage(stage, following, is_last) if on_floats else self._add_byte_stage(stage, is_last)

    def _add_byte_stage(self, stage: Stage, is_last: bool) -> int:
        height, width = stage.size
        target = self.output
        if not is_last:
            # Planes of the three channels, one after the other: neighbors in a row are neighbors in memory.
            value_bytes = 4 if stage.head is not None and stage.head.kind in _FLOAT_OUTPUTS else 1
            offset = self.builder.reserve(3 * height * width * value_bytes) // value_bytes
            target = (offset, width, 1, height * width)
        fill = stage.view.fill[0] if stage.view.fill else 0
        return self._add(stage, target, is_last, fill)

    def _add_float_stage(self, stage: Stage, following: Stage | None, is_last: bool) -> int:
        builder, (height, width) = self.builder, stage.size
        target = self.output
        if not is_last:
            target = (builder.reserve_floats(3 * height * width), width, 1, height * width)
        fill, statistic = -1, -1
        if stage.view.fill:
            fill = builder.add_operation(Atom(Kind.SHIFT, stage.size, (0, 0, 0, 0, *stage.view.fill)))
        if following is not None and stage.writes_histogram:
            statistic = builder.add_operation(following.tail[0])
        number = self._add(stage, target, is_last, fill, statistic)
        self.from_bytes = 0
        return number

    def _add(
        self, stage: Stage, target: tuple[int, int, int, int], is_last: bool, fill: int, statistic: int = -1
    ) -> int:
        builder, (height, width) = self.builder, stage.size
        histogram_read = self.histogram if stage.reads_histogram else -1
        # The tables made of a histogram lie beside it, but each of several branches makes its own.
        shares = stage.reads_histogram and histogram_read == self.shared_histogram
        tables = builder.add_histogram() if shares else histogram_read
        histogram_written = builder.add_histogram() if stage.writes_histogram else -1
        head = builder.add_operation(stage.head) if stage.head is not None else -1
        if stage.branches:
            for end in self.branch_ends:
                builder.add_operation(end)
            self.branch_ends.clear()
        tail_begin = len(builder.operations)
        for atom in stage.tail:
            builder.add_operation(atom)
        chain = self.program.value_ops, self.program.value_channels
        job = [*self.source, *target, height, width, self.program.out_channels if is_last else 3]
        job += [*stage.view.x, *stage.view.y, fill, head, tail_begin, len(builder.operations)]
        job += [histogram_read, histogram_written]
        job += [builder.chains.setdefault(chain, len(builder.chains)), self.from_bytes, statistic]
        job += [stage.histogram_formula, tables]
        self.source, self.histogram = target, histogram_written
        builder.jobs.append(job)
        return len(builder.jobs) - 1
