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
from torch_sink.image.plan.jobs import COLUMN, RowBuilder, Slot
from torch_sink.image.plan.stages import stages_of

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
    for image, row, shape, program in zip(images, rows, shapes, programs, strict=True):
        builder.add_image(image, row, shape, program.out_channels, stages_of(*shape, program.atoms))
    slots, jobs = builder.slots[::-1], _smallest(builder.jobs())
    return Plan(
        _launches(slots),
        jobs,
        np.array([number for slot in slots for number in slot.jobs], np.int32),
        builder.operations(),
        builder.tables(),
        builder.made_entries,
        builder.resizes(),
        np.array([row for slot in slots for row in slot.statistics], np.int32).reshape(-1, COLUMN["STATISTIC_COLUMNS"]),
        _regions_read(jobs, np.array(builder.read)),
        builder.workspace,
        programs[0].out_channels,
        programs[0].size,
    )


def _launches(slots: Sequence[Slot]) -> tuple[Launch, ...]:
    launches, end, statistics_end = [], 0, 0
    for jobs, statistics, heavy in slots:
        begin, end = end, end + len(jobs)
        statistics_begin, statistics_end = statistics_end, statistics_end + len(statistics)
        launches.append(Launch(begin, end, bool(heavy), statistics_begin, statistics_end))
    return tuple(launches)


def _smallest(jobs: np.ndarray) -> np.ndarray:
    """As int32 where that holds them, for the way to another process."""
    return jobs.astype(np.int32) if max(jobs.max(), -jobs.min()) <= np.iinfo(np.int32).max else jobs


def _regions_read(jobs: np.ndarray, read: np.ndarray) -> np.ndarray:
    """Which part of each image is read: where the recorded operations begin with a crop, only that crop.

    Args:
        jobs: all of them.
        read: int64 [those that read an image, 5]: number, what the view shows, and the image, as width and height.

    Returns:
        int32 [images, 4]: left, top, width, height, in pixels.
    """
    shown, size = read[:, 1:3], read[:, 3:]
    jobs = jobs[read[:, 0]]
    views = jobs[:, COLUMN["VIEW_X_STEP"] : COLUMN["VIEW_Y_END"] + 1].astype(np.int64).reshape(-1, 2, 4)
    step, offset, begin, end = views.transpose(2, 0, 1)
    one = step * np.maximum(begin, 0) + offset
    other = step * (np.minimum(end, shown) - 1) + offset
    begins = np.minimum(np.maximum(np.minimum(one, other), 0), size - 1)
    # At least one position.
    ends = np.maximum(np.minimum(np.maximum(one, other) + 1, size), begins + 1)
    # Several branches may read one image; their jobs follow each other.
    first_of_image = np.flatnonzero(np.diff(jobs[:, COLUMN["SOURCE_ROW"]], prepend=-1))
    begins, ends = np.minimum.reduceat(begins, first_of_image), np.maximum.reduceat(ends, first_of_image)
    return np.concatenate([begins, ends - begins], axis=1, dtype=np.int32)
