"""The programs of a batch -> a Plan: which launch does what to which image, ready for the kernels.

Every image's last stage runs in the last launch, whether it holds bytes or floats, so a batch costs as many launches as
its longest image has stages, and one more before each in which some image needs to know its whole input. Branches end
in the launch before the one that mixes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torch_sink.image.core.atoms import Kind, Program
from torch_sink.image.plan.branches import branched_stages, depth, longest_branch
from torch_sink.image.plan.jobs import COLUMN, ImageJobs, RowBuilder
from torch_sink.image.plan.regions import regions_read
from torch_sink.image.plan.stages import Stage

_NAMES = {int(kind): kind.name.lower() for kind in Kind}
_MOST_SHOWN = 4


class Launch(NamedTuple):
    """One launch of the stage kernel, and of the one for statistics before it where there are any.

    Attributes:
        begin: of its jobs among `Plan.slot_jobs`.
        end: of the same.
        is_heavy: some image needs what only the larger variant can do.
        statistics_begin: of its statistics among `Plan.statistics`.
        statistics_end: of the same.
    """

    begin: int
    end: int
    is_heavy: bool
    statistics_begin: int
    statistics_end: int


class Plan(NamedTuple):
    """What runs where, for images that run together. `str()` is readable.

    Attributes:
        launches: in order.
        jobs: int32 [jobs, JOB_COLUMNS], int64 where an offset needs it. A SOURCE of -1 stands for the pixels of image
            SOURCE_ROW, a TARGET of -1 for row TARGET_ROW of the result.
        slot_jobs: int32 [jobs], the jobs in the order of the launches.
        operations: int32 [rows, OPERATION_COLUMNS].
        tables: int32 [entries].
        made_entries: of the tables that the device makes, behind these.
        resizes: int32 [resizes, PROLOGUE_COLUMNS], whose weights the device makes before the launches.
        statistics: int32 [statistics, STATISTIC_COLUMNS], in the order of the launches.
        boxes: int32 [images, 4], the part of each image that is read: left, top, width, height.
        workspace_bytes: for the outputs of all stages but the last of each image.
        out_channels: channels of the result.
        size: (height, width) of the result.
    """

    launches: tuple[Launch, ...]
    jobs: np.ndarray
    slot_jobs: np.ndarray
    operations: np.ndarray
    tables: np.ndarray
    made_entries: int
    resizes: np.ndarray
    statistics: np.ndarray
    boxes: np.ndarray
    workspace_bytes: int
    out_channels: int
    size: tuple[int, int]

    def work(self, launch: Launch) -> Counter[str]:
        """How many images of a launch run which stage."""
        return Counter(map(self._stage, self.jobs[self.slot_jobs[launch.begin : launch.end]].tolist()))

    def _stage(self, job: Sequence[int]) -> str:
        rows = [job[COLUMN["HEAD"]]] if job[COLUMN["HEAD"]] else []
        rows += range(job[COLUMN["TAIL_BEGIN"]], job[COLUMN["TAIL_END"]])
        return " + ".join(_NAMES[int(self.operations[row, 0])] for row in rows) or "copy"

    def __str__(self) -> str:
        lines = []
        for number, launch in enumerate(self.launches, 1):
            found = self.work(launch)
            work = "; ".join(f"{count} x {text}" for text, count in found.most_common(_MOST_SHOWN))
            more = len(found) - _MOST_SHOWN
            statistics = " after statistics" if launch.statistics_begin < launch.statistics_end else ""
            lines.append(f"launch {number}{statistics}: {work}{f'; {more} other mixtures' if more > 0 else ''}")
        height, width = self.size
        lines.append(f"-> [{self.out_channels}, {height}, {width}]")
        return "\n".join(lines)


class _Slots:
    """The launches while jobs are added to them."""

    def __init__(self, count: int) -> None:
        self.jobs: list[list[int]] = [[] for _ in range(count)]
        self.statistics: list[list[list[int]]] = [[] for _ in range(count)]
        self.is_heavy = [False] * count

    def add(self, at: int, job: ImageJobs, number: int, stage: Stage) -> None:
        self.jobs[at].append(number)
        self.statistics[at] += job.statistics
        # What writes floats for the next stage, or reads them, is heavy.
        reads_floats = job.builder.jobs[number][COLUMN["SOURCE_KIND"]] != COLUMN["BYTES"]
        writes_floats = job.builder.jobs[number][COLUMN["TARGET_KIND"]] == COLUMN["FLOATS"]
        self.is_heavy[at] |= stage.is_heavy or reads_floats or writes_floats

    def launches(self) -> tuple[Launch, ...]:
        launches, end, statistics_end = [], 0, 0
        for jobs, statistics, is_heavy in zip(self.jobs, self.statistics, self.is_heavy, strict=True):
            begin, end = end, end + len(jobs)
            statistics_begin, statistics_end = statistics_end, statistics_end + len(statistics)
            launches.append(Launch(begin, end, is_heavy, statistics_begin, statistics_end))
        return tuple(launches)


def build_plan(
    shapes: Sequence[tuple[int, int]], programs: Sequence[Program], images: Sequence[int], rows: Sequence[int]
) -> Plan:
    """The plan of some images.

    Args:
        shapes: (height, width) of what each begins with.
        programs: what each goes through; all end in the same shape.
        images: which pixels each begins with, by number.
        rows: which row of the result each becomes.
    """
    builder = RowBuilder()
    chains = [branched_stages(*shape, program.atoms) for shape, program in zip(shapes, programs, strict=True)]
    slots = _Slots(max(map(depth, chains)))
    for image, row, program, stages in zip(images, rows, programs, chains, strict=True):
        _add_image(slots, ImageJobs(builder, image, row, program), stages)
    operations, resizes = builder.made_arrays()
    statistics = [row for rows_of_launch in slots.statistics for row in rows_of_launch]
    return Plan(
        slots.launches(),
        _smallest(np.array(builder.jobs, dtype=np.int64)),
        np.array([number for jobs in slots.jobs for number in jobs], dtype=np.int32),
        operations,
        np.concatenate([table.ravel() for table in builder.tables]) if builder.tables else np.zeros(0, np.int32),
        builder.made_entries,
        resizes,
        np.array(statistics, dtype=np.int32).reshape(-1, COLUMN["STATISTIC_COLUMNS"]),
        regions_read(shapes, chains),
        builder.workspace,
        programs[0].out_channels,
        programs[0].size,
    )


def _add_image(slots: _Slots, job: ImageJobs, stages: Sequence[Stage]) -> None:
    """Adds the stages of one image to the last launches."""
    at = len(slots.jobs) - depth(stages)
    for number, stage in enumerate(stages, 1):
        at += longest_branch(stage)
        for branch, mixed in zip(stage.branches, stage.head.branches if stage.head else (), strict=True):
            position = job.position
            for slot, part in enumerate(branch, at - len(branch)):
                position = job.add_branch_stage(part, position)
                slots.add(slot, job, position.job, part)
            job.end_branch(branch[-1], position, mixed.weight)
        slots.add(at, job, job.add_stage(stage, is_last=number == len(stages)), stage)
        at += 1


def _smallest(jobs: np.ndarray) -> np.ndarray:
    """As int32 where that holds them, for the way to another process."""
    return jobs.astype(np.int32) if abs(jobs).max(initial=0) <= np.iinfo(np.int32).max else jobs
