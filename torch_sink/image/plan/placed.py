"""A plan, which knows no addresses, and where its pixels lie -> jobs and tiles for the kernels. A batch at a time."""

from __future__ import annotations

import numpy as np

from torch_sink.image.plan.build import Plan
from torch_sink.image.plan.jobs import COLUMN

_SOURCE = slice(COLUMN["SOURCE"], COLUMN["SOURCE_CHANNEL"] + 1)
_TARGET_STRIDES = slice(COLUMN["TARGET_ROW"], COLUMN["TARGET_CHANNEL"] + 1)


def placed_jobs(plan: Plan, places: np.ndarray, strides: tuple[int, int, int, int]) -> np.ndarray:
    """The jobs of a plan as the kernels read them, int64 [jobs, JOB_COLUMNS].

    Args:
        plan: whose jobs.
        places: int64 [images, 4], by number of image: where its pixel (0, 0) lies, in bytes from the beginning of the
            workspace, and how many bytes lie between rows, columns and channels.
        strides: of the result [N, C, H, W], in elements.
    """
    jobs = plan.jobs.astype(np.int64)
    reading = jobs[:, COLUMN["SOURCE"]] < 0
    jobs[reading, _SOURCE] = places[jobs[reading, COLUMN["SOURCE_ROW"]]]
    writing = jobs[:, COLUMN["TARGET"]] < 0
    batch, channel, row, column = strides
    jobs[writing, COLUMN["TARGET"]] = jobs[writing, COLUMN["TARGET_ROW"]] * batch
    jobs[writing, _TARGET_STRIDES] = row, column, channel
    return jobs


def tiles_of(plan: Plan, shape: tuple[int, int]) -> list[np.ndarray]:
    """For each launch int32 [tiles, 3]: job, first row and first column of each tile.

    Args:
        plan: whose launches.
        shape: (rows, columns) of a tile.
    """
    rows, columns = shape
    sizes = plan.jobs[plan.slot_jobs]
    down, across = -(-sizes[:, COLUMN["HEIGHT"]] // rows), -(-sizes[:, COLUMN["WIDTH"]] // columns)
    counts = (down * across).astype(np.int64)
    ends = np.cumsum(counts)
    slot = np.repeat(np.arange(len(counts)), counts)
    tile_row, tile_column = np.divmod(np.arange(len(slot)) - (ends - counts)[slot], across[slot])
    tiles = np.stack([plan.slot_jobs[slot], tile_row * rows, tile_column * columns], axis=1).astype(np.int32)
    starts = np.concatenate(([0], ends))
    return [tiles[starts[launch.begin] : starts[launch.end]] for launch in plan.launches]
