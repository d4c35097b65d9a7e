"""A plan, which knows no addresses, and where its pixels lie -> rows for the kernels. A batch at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_sink.image.plan.build import Plan
from torch_sink.triton_kernels import rows

_SOURCE = slice(rows.SOURCE, rows.SOURCE_CHANNEL + 1)
_TARGET_STRIDES = slice(rows.TARGET_ROW, rows.TARGET_CHANNEL + 1)
# The tiles of a launch begin where their address is a multiple of 16 bytes: other kernels are compiled elsewhere.
_TILE_ALIGNMENT = 4


def place_jobs(jobs: np.ndarray, plan: Plan, places: np.ndarray, strides: tuple[int, int, int, int]) -> None:
    """Writes the jobs of a plan as the kernels read them.

    Args:
        jobs: int64 [jobs, JOB_COLUMNS], written to.
        plan: whose jobs.
        places: int64 [images, 4], by number of image: where its pixel (0, 0) lies, in bytes from the beginning of the
            workspace, and how many bytes lie between rows, columns and channels.
        strides: of the result [N, C, H, W], in elements.
    """
    jobs[:] = plan.jobs
    # Positions within the workspace are not below 0.
    reading = jobs[:, rows.SOURCE] < 0
    jobs[reading, _SOURCE] = places[jobs[reading, rows.SOURCE_ROW]]
    writing = jobs[:, rows.TARGET] < 0
    batch, channel, row, column = strides
    jobs[writing, rows.TARGET] = jobs[writing, rows.TARGET_ROW] * batch
    jobs[writing, _TARGET_STRIDES] = row, column, channel


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
        if launch.begin < launch.end:
            first[launch.begin : launch.end] += begin - first[launch.begin]
        ranges.append((begin, end))
    tiled = np.zeros((len(counts), rows.PROLOGUE_COLUMNS), np.int32)
    tiled[:, rows.WORK] = rows.TILES
    tiled[:, rows.TILED_JOB], tiled[:, rows.FIRST_TILE] = plan.slot_jobs, first
    tiled[:, rows.TILES_DOWN], tiled[:, rows.TILES_ACROSS] = down, across
    return Prologue(np.concatenate([plan.resizes, tiled]), end, tuple(ranges), shape)
