"""The rows of a program: the jobs of its images, the atoms that they do, and the tables for these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torch_sink.image.core.lowering import KIND_MASK, LoweredImage, ResizeWeights
from torch_sink.image.operations.resize_tables import needed_rows
from torch_sink.image.program.stages import Stage, View, shifted, stages_of, view_through, whole_view
from torch_sink.triton_kernels import rows
from torch_sink.triton_kernels.rows import Kind

# Behind the columns of a job: its launch, counted from the first one of its image, and whether it is heavy.
LAUNCH, IS_HEAVY, COLUMNS = rows.JOB_COLUMNS, rows.JOB_COLUMNS + 1, rows.JOB_COLUMNS + 2
_ALIGNMENT_BYTES = 16
_VALUE_BYTES = {rows.BYTES: 1, rows.FLOATS: 4}
_STATISTICS = range(Kind.CONTRAST, Kind.RESAMPLE_X)
_COPY = Stage()
_HISTOGRAM = 256

# The four columns of a job that say where pixels lie.
Position = tuple[int, int, int, int]


class Input(NamedTuple):
    """What a stage reads."""

    position: Position
    job: int  # that wrote it; -1 of an image
    view: View  # how it is seen


class RowBuilder:
    """Collects the rows of a program, image by image.

    Args:
        images: those that will be added; their tables come first.

    Attributes:
        jobs: COLUMNS integers each, one after the other.
        atoms: rows of operations; row 0 is no head.
        tables: of the host.
        resizes: {weights: where the device writes first positions and weights}.
        statistics: the job that waits for it, the one that is measured, the row of the atom, and the channel.
        read: of each job that reads a decoded image: its number, what its view shows, and that image, as height and
            width.
        depths: how many launches each image takes, and how many jobs.
        host_entries: of the tables of the host.
        entries: of all tables, those that the device makes behind those of the host.
        workspace: bytes.
    """

    def __init__(self, images: Sequence[LoweredImage]) -> None:
        self.jobs: list[int] = []
        self.atoms: list[list[int]] = [[0] * rows.OPERATION_COLUMNS]
        self.tables: list[np.ndarray] = []
        self.resizes: dict[ResizeWeights, tuple[int, int]] = {}
        self.statistics: list[tuple[int, int, int, int]] = []
        self.read: list[tuple[int, int, int, int, int]] = []
        self.depths: list[tuple[int, int]] = []
        self.entries = self.workspace = 0
        self._tables_at: dict[int, list[int]] = {}  # of a table, or of several, by `id`
        self._add_tables(list(images))
        self.host_entries = self.entries

    def add_image(self, source: int, row: int, size: tuple[int, int], lowered: LoweredImage) -> None:
        """Adds an image.

        Args:
            source: the number of the decoded image that it begins with.
            row: of the result, which it becomes.
            size: width and height of the decoded image.
            lowered: what it goes through.
        """
        self._image_size, before = (size[1], size[0]), len(self.jobs)
        read = Input((rows.NAMED, source, 0, 0), -1, whole_view(self._image_size))
        _, launches = self._add_stages(lowered, read, 0, (rows.NAMED, row, 0, 0))
        self.depths.append((launches, (len(self.jobs) - before) // COLUMNS))

    def _add_stages(
        self, lowered: LoweredImage, read: Input, launch: int, result: Position | None = None
    ) -> tuple[Input, int]:
        """Adds the stages of an image, or of a branch of one, which has no row of the result.

        Args:
            lowered: what it goes through.
            read: what it begins with.
            launch: of its first stage.
            result: where the last stage writes; None for the workspace.

        Returns:
            What the last stage wrote, and the launch behind it.
        """
        codes, first = tuple(lowered.codes), len(self.atoms)
        self.atoms += lowered.atoms
        for at, weights in lowered.weights.items():
            found = self.resizes.get(weights)
            if found is None:
                found = self.resizes[weights] = self.entries, self.entries + weights.out_size
                self.entries = found[1] + weights.taps * weights.out_size
            lowered.atoms[at][rows.TABLE : rows.TABLE + 2] = found
        view, leading = view_through(read.view, lowered, codes, self.atoms, first)
        read = Input(read.position, read.job, view)
        stages = stages_of(codes, leading)
        if read.job >= 0 and _begins_with_statistic(lowered):
            stages = stages[1:]  # what it measures lies in the workspace
        needed: tuple[int, int] | None = None
        for stage in stages:
            head = stage.head
            if head in lowered.branches:
                read, launch = self._add_branches(lowered, head, first, read, launch)
            if needed is not None:
                row = self.atoms[first + head] = self.atoms[first + head].copy()
                row[rows.LAST_INPUT], row[rows.FIRST_INPUT] = needed[1] - 1, needed[0]
                needed = None
            size = read.view.size
            if stage.begin < stage.end:
                size = lowered.sizes[stage.end - 1]
            elif stage.down >= 0:
                needed = begin, end = needed_rows(lowered, stage.down)
                x, y, shown, fill = read.view
                y = shifted(y, begin, lowered.atoms[stage.down][rows.LAST_INPUT] + 1)
                read = Input(read.position, read.job, View(x, y, shown, fill))
                size = end - begin, lowered.sizes[head][1]
            elif head >= 0:
                size = lowered.sizes[head]
            target = result if stage is stages[-1] else None
            read = self._add_job(stage, first, read, size, launch, target, lowered.channels)
            launch += 1
        return read, launch

    def _add_branches(
        self, lowered: LoweredImage, head: int, first: int, read: Input, launch: int
    ) -> tuple[Input, int]:
        """Adds what a MIX reads; returns what it reads besides, and its launch."""
        branches = lowered.branches[head]
        if read.job < 0 and any(map(_begins_with_statistic, branches)):
            # What is measured has to lie in the workspace.
            read, launch = self._add_job(_COPY, first, read, read.view.size, launch), launch + 1
        behind = launch
        for number, branch in enumerate(branches, 1):
            end, after = self._add_stages(branch, read, launch)
            lowered.atoms[head + number][rows.BRANCH_JOB] = end.job
            behind = max(behind, after)
        return read, behind

    def _add_job(
        self, stage: Stage, first: int, read: Input, size: tuple[int, int], launch: int,
        target: Position | None = None, channels: int = 3,
    ) -> Input:  # fmt: skip
        """Adds one stage, of an image whose atoms begin at row `first`; it writes to the workspace without a target."""
        position, job, view = read
        values, head, begin, end, source_kind, target_kind, top, measured, is_heavy, _ = stage
        height, width = size
        if target is None:
            # Planes of the three channels, one after the other: neighbors in a row are neighbors in memory.
            value_bytes = _VALUE_BYTES[target_kind]
            channels, target = 3, (self.workspace // value_bytes, width, 1, height * width)
            self.workspace += -(-3 * height * width * value_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        else:
            target_kind = rows.OUTPUT
        number = len(self.jobs) // COLUMNS
        self.jobs += (
            *position, *target, height, width, channels, *view.x, *view.y, view.fill,
            source_kind, self.atoms[first + values][rows.TABLE] if values >= 0 else 0, target_kind, top,
            first + head if head >= 0 else 0, first + begin, first + end,
            launch, is_heavy or target_kind == rows.FLOATS or view.fill > 0,
        )  # fmt: skip
        if job < 0:
            self.read.append((number, *view.size, *self._image_size))
        if measured:
            self._measure(number, job, first + begin, measured)
        return Input(target, number, whole_view(size))

    # --- tables

    def _add_tables(self, images: list[LoweredImage]) -> None:
        """Adds those of the host, and says in their atoms where they are."""
        for image in images:  # and the branches of these, as they come
            for at, tables in image.tables.items():
                row = image.atoms[at]
                column = rows.PASTED if row[0] == Kind.PASTE else rows.TABLE
                # Tables come from caches, so the same ones may serve many images.
                found = self._tables_at.get(id(tables)) or self._places_of(tables)
                row[column : column + len(found)] = found
            for branches in image.branches.values():
                images += branches

    def _places_of(self, tables: tuple[np.ndarray, ...]) -> list[int]:
        for table in tables:
            if id(table) not in self._tables_at:
                self._tables_at[id(table)] = [self.entries]
                self.entries += table.size
                self.tables.append(table)
        found = self._tables_at[id(tables)] = [self._tables_at[id(table)][0] for table in tables]
        return found

    def _measure(self, number: int, job: int, row: int, channels: int) -> None:
        """Has something of the output of `job` found for a row, in tables of its own, before another job."""
        entries = 1 if self.atoms[row][0] == Kind.BLEND_MEAN else _HISTOGRAM
        made = [self.entries + entries * channel for channel in range(channels)]
        self.entries += entries * channels
        self.atoms[row][rows.TABLE : rows.TABLE + 3] = made * (3 // channels)
        self.statistics += [(number, job, row, channel) for channel in range(channels)]


def _begins_with_statistic(lowered: LoweredImage) -> bool:
    return bool(lowered.codes) and lowered.codes[0] & KIND_MASK in _STATISTICS
