"""The programs of a batch -> a Plan: which launch does what to which image, ready for the kernels.

Every image's last stage runs in the last launch, whether it holds bytes or floats, so a batch costs as many launches as
its longest image has stages, and one more before each in which some image needs to know its whole input. Branches end
before the launch that mixes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from torch_sink.image.core.atoms import Lowering, ResizeWeights
from torch_sink.image.plan.jobs import COLUMNS, IS_HEAVY, LAUNCH, RowBuilder
from torch_sink.triton_kernels import rows
from torch_sink.triton_kernels.rows import Kind

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
    """What runs where. `str()` is readable.

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
        atoms = [job[rows.HEAD]] if job[rows.HEAD] else []
        atoms += range(job[rows.TAIL_BEGIN], job[rows.TAIL_END])
        return " + ".join(_NAMES[int(self.operations[atom, 0])] for atom in atoms) or "copy"

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


def build_plan(shapes: Sequence[tuple[int, int]], states: Sequence[Lowering], images: Sequence[int]) -> Plan:
    """The plan of some images.

    Args:
        shapes: (height, width) of what each begins with.
        states: what each goes through; all end in the same shape.
        images: the position of each in the batch: that of its pixels, and of its row in the result.
    """
    builder = RowBuilder(states)
    entries_of_host = builder.entries
    for image, shape, state in zip(images, shapes, states, strict=True):
        builder.add_image(image, shape, state)
    columns = np.array(builder.jobs, np.int64).reshape(-1, COLUMNS)
    jobs = _smallest(columns[:, : rows.JOB_COLUMNS])
    # Every image ends in the last launch.
    depths, counts = np.array(builder.depths).T
    launch_of_job = columns[:, LAUNCH] + np.repeat(depths.max() - depths, counts)
    statistics = np.array(builder.statistics, np.int32).reshape(-1, rows.STATISTIC_COLUMNS)
    launch_of_statistic = launch_of_job[statistics[:, 0]]
    heavy = np.bincount(launch_of_job, columns[:, IS_HEAVY])
    return Plan(
        _launches(launch_of_job, launch_of_statistic, heavy),
        jobs,
        np.argsort(launch_of_job, kind="stable").astype(np.int32),
        np.array(builder.atoms, np.int32),
        np.concatenate([table.ravel() for table in builder.tables]) if builder.tables else np.zeros(0, np.int32),
        builder.entries - entries_of_host,
        _resizes(builder.resizes),
        np.roll(statistics, -1, axis=1)[np.argsort(launch_of_statistic, kind="stable")],
        _regions_read(jobs, np.array(builder.read)),
        builder.workspace,
        states[0].channels,
        (states[0].height, states[0].width),
    )


def _launches(of_jobs: np.ndarray, of_statistics: np.ndarray, heavy: np.ndarray) -> tuple[Launch, ...]:
    """The launches, from the launch of each job and of each statistic, and how many heavy jobs each launch has."""
    ends, statistics_ends = (
        np.cumsum(np.bincount(launches, minlength=len(heavy))).tolist() for launches in (of_jobs, of_statistics)
    )
    return tuple(map(Launch, [0, *ends], ends, (heavy > 0).tolist(), [0, *statistics_ends], statistics_ends))


def _resizes(places: Mapping[ResizeWeights, tuple[int, int]]) -> np.ndarray:
    resizes = np.zeros((len(places), rows.PROLOGUE_COLUMNS), np.int32)
    if places:
        resizes[:, [*range(rows.IN_SIZE, rows.FILTER + 1), rows.PRECISION]] = list(places)
        resizes[:, [rows.FIRST_AT, rows.WEIGHTS_AT]] = list(places.values())
    return resizes


def _smallest(jobs: np.ndarray) -> np.ndarray:
    """As int32 where that holds them, for the way to another process."""
    return jobs.astype(np.int32) if max(jobs.max(), -jobs.min()) <= np.iinfo(np.int32).max else jobs


def _regions_read(jobs: np.ndarray, read: np.ndarray) -> np.ndarray:
    """Which part of each image is read: where the recorded operations begin with a crop, only that crop.

    Args:
        jobs: all of them.
        read: int64 [those that read an image, 5]: number, what the view shows, and the image, as height and width.

    Returns:
        int32 [images, 4]: left, top, width, height, in pixels.
    """
    shown, size = read[:, [2, 1]], read[:, [4, 3]]
    jobs = jobs[read[:, 0]]
    views = jobs[:, rows.VIEW_X_STEP : rows.VIEW_Y_END + 1].astype(np.int64).reshape(-1, 2, 4)
    step, offset, begin, end = views.transpose(2, 0, 1)
    one = step * np.maximum(begin, 0) + offset
    other = step * (np.minimum(end, shown) - 1) + offset
    begins = np.minimum(np.maximum(np.minimum(one, other), 0), size - 1)
    # At least one position.
    ends = np.maximum(np.minimum(np.maximum(one, other) + 1, size), begins + 1)
    # Several branches may read one image; their jobs follow each other.
    first_of_image = np.flatnonzero(np.diff(jobs[:, rows.SOURCE_ROW], prepend=-1))
    begins, ends = np.minimum.reduceat(begins, first_of_image), np.maximum.reduceat(ends, first_of_image)
    return np.concatenate([begins, ends - begins], axis=1, dtype=np.int32)


# --- where the pixels of a plan, which knows no addresses, lie

_SOURCE = slice(rows.SOURCE, rows.SOURCE_CHANNEL + 1)
_TARGET_STRIDES = slice(rows.TARGET_ROW, rows.TARGET_CHANNEL + 1)
# The tiles of a launch begin where their address is a multiple of 16 bytes: other kernels are compiled elsewhere.
_TILE_ALIGNMENT = 4


def placed_jobs(plan: Plan, places: np.ndarray, strides: tuple[int, ...]) -> np.ndarray:
    """The jobs of a plan as the kernels read them, int64 [jobs, JOB_COLUMNS].

    Args:
        plan: whose jobs.
        places: int64 [images, 4], by number of image: where its pixel (0, 0) lies, in bytes from the beginning of the
            workspace, and how many bytes lie between rows, columns and channels.
        strides: of the result [N, C, H, W], in elements.
    """
    jobs = plan.jobs.astype(np.int64)
    # Positions within the workspace are not below 0.
    reading = jobs[:, rows.SOURCE] < 0
    jobs[reading, _SOURCE] = places[jobs[reading, rows.SOURCE_ROW]]
    writing = jobs[:, rows.TARGET] < 0
    batch, channel, row, column = strides
    jobs[writing, rows.TARGET] = jobs[writing, rows.TARGET_ROW] * batch
    jobs[writing, _TARGET_STRIDES] = row, column, channel
    return jobs


class Prologue(NamedTuple):
    """What is made on the device before the stages."""

    work: np.ndarray  # int32 [rows, PROLOGUE_COLUMNS], resizes and jobs
    tiles: int  # how many tiles all launches have
    ranges: tuple[tuple[int, int], ...]  # first tile of each launch, and the end of its tiles
    shape: tuple[int, int]  # rows and columns of a tile


def prologue_of(plan: Plan, shape: tuple[int, int]) -> Prologue:
    """The prologue of a plan; `shape`: rows and columns of a tile."""
    sizes = plan.jobs[plan.slot_jobs][:, [rows.HEIGHT, rows.WIDTH]]
    down, across = (-(-sizes[:, axis] // shape[axis]) for axis in (0, 1))
    counts = (down * across).astype(np.int64)
    first = np.cumsum(counts) - counts
    end, ranges = 0, []
    for launch in plan.launches:
        begin = -(-end // _TILE_ALIGNMENT) * _TILE_ALIGNMENT
        end = begin + int(counts[launch.begin : launch.end].sum())
        first[launch.begin : launch.end] += begin - first[launch.begin]
        ranges.append((begin, end))
    tiled = np.zeros((len(counts), rows.PROLOGUE_COLUMNS), np.int32)
    tiled[:, rows.WORK] = rows.TILES
    tiled[:, rows.TILED_JOB], tiled[:, rows.FIRST_TILE] = plan.slot_jobs, first
    tiled[:, rows.TILES_DOWN], tiled[:, rows.TILES_ACROSS] = down, across
    return Prologue(np.concatenate([plan.resizes, tiled]), end, tuple(ranges), shape)
