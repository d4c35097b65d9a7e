"""Sources and calls -> the `Program` of a batch: the jobs of all images in launches, and the arrays that kernels read.

Every image's last stage runs in the last launch, for bytes and floats alike, so a batch costs as many launches as its
longest image has stages, and one more before each in which an image needs statistics of its input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torch_sink.image.core.lowering import ResizeWeights
from torch_sink.image.core.ops import Op
from torch_sink.image.decode.jpeg_block import ALIGNMENT_BYTES
from torch_sink.image.decode.jpeg_tables import plan_jpegs
from torch_sink.image.decode.source import FinishedSource, Source
from torch_sink.image.program.block import Packing
from torch_sink.image.program.jobs import plan_image
from torch_sink.image.program.program import ARRAYS, Launch, Program
from torch_sink.image.program.rows import Rows
from torch_sink.triton_kernels import rows
from torch_sink.triton_kernels.shapes import stage_tile

# The tiles of a launch begin at a multiple of 16 bytes: Triton compiles another kernel for other addresses.
_TILE_ALIGNMENT = 4


def make_program(
    sources: Sequence[Source],
    calls: Sequence[tuple[Op, ...]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    destination: str = "cpu",
    interpreted: bool = False,
) -> Program:
    """The program of a batch.

    Args:
        sources: one for each image.
        calls: the calls recorded on each; images that are not finished tensors end in `shape`.
        shape: [N, C, H, W].
        dtype, destination, interpreted: as in `Program`.
    """
    packing, tile = Packing(sources), stage_tile()
    images: dict[int, Any] = {at: one for at, one in enumerate(sources) if not isinstance(one, FinishedSource)}
    plans = {row: plan_image(one.size, 3 if one.mode == "RGB" else 1, calls[row]) for row, one in images.items()}
    launched: dict[str, Any] = {"arrays": {}, "has_finished": len(plans) < len(sources)}
    if plans:
        entries = [packing.entry_of_image[row] for row in plans]
        launched |= _launched(packing, Rows(list(plans.values()), entries, list(plans)), tile)
    arguments = [argument for plan in plans.values() for argument in plan.arguments]
    programs = [plans[row].calls if row in plans else ops for row, ops in enumerate(calls)]
    packed = packing.write(programs, arguments)
    return Program(packed, shape, dtype, destination, interpreted, tile, **launched)


def _launched(packing: Packing, found: Rows, tile: tuple[int, int]) -> dict[str, Any]:
    """Adds the arrays of the launches to the block; returns the fields of `Program` that describe them.

    Args:
        packing: the sources of the batch.
        found: the rows of its images.
        tile: rows and columns of a tile.
    """
    launches, arrays = lay_out_launches(found, tile)
    files, workspace_bytes = packing.jpegs.sources, found.workspace + ALIGNMENT_BYTES
    boxes = boxes_read(found, len(packing.sources))
    places, jpegs = np.zeros((len(boxes), rows.PLACE_COLUMNS), np.int64), None
    if len(files):
        jpegs, places[files] = plan_jpegs(packing.jpegs, boxes[files], packing.add_array)
        places[files, 0] += workspace_bytes
    arrays |= {"files": files[:, None], "boxes": boxes, "places": places}
    return {
        "jpegs": jpegs,
        "launches": tuple(launches),
        "arrays": {name: (packing.add_array(arrays[name]), *arrays[name].shape) for name in ARRAYS},
        "made_entries": found.tables.size - found.tables.host_entries,
        "workspace_bytes": workspace_bytes,
        "has_other_images": int((boxes[:, 2] > 0).sum()) > int((boxes[files, 2] > 0).sum()),
    }


def lay_out_launches(found: Rows, tile: tuple[int, int]) -> tuple[list[Launch], dict[str, np.ndarray]]:
    """The launches of a batch, in order, and the arrays that they read.

    Args:
        found: the rows of its images.
        tile: rows and columns of a tile.

    Returns:
        The launches, and by name:
            jobs: int64 [jobs, JOB_COLUMNS]; a decoded image, or a row of the batch, is given by number, not by address.
            operations: int32 [rows, OPERATION_COLUMNS].
            work: int32 [rows, PROLOGUE_COLUMNS]: the resizes, then the jobs in the order of the launches.
            statistics: int32 [statistics, STATISTIC_COLUMNS], in the order of the launches.
            tables: int32 [entries, 1], the tables of the host.
    """
    jobs, launch_of_job, tables = found.jobs, found.launches, found.tables
    launch_of_statistic = launch_of_job[found.statistics[:, -1]]
    heavy = np.bincount(launch_of_job, found.is_heavy) > 0
    order = np.argsort(launch_of_job, kind="stable")
    work, begins, ends = _tiled(jobs[order], launch_of_job[order], tile)
    work[:, rows.TILED_JOB] = order
    measured = np.cumsum(np.bincount(launch_of_statistic, minlength=len(heavy))).tolist()
    launches = list(map(Launch, begins, ends, heavy.tolist(), [0, *measured], measured))
    return launches, {
        "jobs": jobs,
        "operations": found.atoms,
        "work": np.concatenate([_resizes(tables.resizes), work]),
        "statistics": found.statistics[np.argsort(launch_of_statistic, kind="stable")],
        "tables": np.concatenate([np.zeros(0, np.int32), *map(np.ravel, tables.of_host)])[:, None],
    }


def _tiled(
    jobs: np.ndarray, launch_of_job: np.ndarray, tile: tuple[int, int]
) -> tuple[np.ndarray, list[int], list[int]]:
    """Rows of the prologue's work for jobs in launch order, and where the tiles of each launch begin and end."""
    across, down = -(-jobs[:, rows.WIDTH] // tile[1]), -(-jobs[:, rows.HEIGHT] // tile[0])
    counts = down * across
    of_launch = np.bincount(launch_of_job, counts).astype(np.int64)
    room = -(-of_launch // _TILE_ALIGNMENT) * _TILE_ALIGNMENT
    begins = np.cumsum(room) - room
    before = np.cumsum(counts) - counts - (np.cumsum(of_launch) - of_launch)[launch_of_job]
    work = np.zeros((len(jobs), rows.PROLOGUE_COLUMNS), np.int32)
    work[:, rows.WORK], work[:, rows.FIRST_TILE] = rows.JOB, begins[launch_of_job] + before
    work[:, rows.TILES_DOWN], work[:, rows.TILES_ACROSS] = down, across
    work[:, rows.READ_IMAGE] = np.where(jobs[:, rows.SOURCE] == rows.NAMED, jobs[:, rows.SOURCE + 1], rows.NAMED)
    work[:, rows.WRITTEN_ROW] = np.where(jobs[:, rows.TARGET] == rows.NAMED, jobs[:, rows.TARGET + 1], rows.NAMED)
    return work, begins.tolist(), (begins + of_launch).tolist()


def _resizes(places: Mapping[ResizeWeights, tuple[int, int]]) -> np.ndarray:
    resizes = np.zeros((len(places), rows.PROLOGUE_COLUMNS), np.int32)
    if places:
        resizes[:, [*range(rows.IN_SIZE, rows.FILTER + 1), rows.PRECISION]] = list(places)
        resizes[:, [rows.FIRST_AT, rows.WEIGHTS_AT]] = list(places.values())
    return resizes


def boxes_read(found: Rows, sources: int) -> np.ndarray:
    """The part of each source that is read: only the crop where the recorded operations begin with one.

    Returns:
        int32 [sources, 4]: left, top, width, height, in pixels; all 0 where no job reads the source.
    """
    jobs = found.jobs[found.reads]
    shown, size = found.shown[:, 1::-1], found.shown[:, :1:-1]
    step, offset, begin, end = jobs[:, rows.VIEW_X_STEP : rows.VIEW_Y_END + 1].reshape(-1, 2, 4).transpose(2, 0, 1)
    one = step * np.maximum(begin, 0) + offset
    other = step * (np.minimum(end, shown) - 1) + offset
    lowest = np.minimum(np.maximum(np.minimum(one, other), 0), size - 1)
    # At least one position.
    highest = np.maximum(np.minimum(np.maximum(one, other) + 1, size), lowest + 1)
    begins, ends = np.full((sources, 2), np.iinfo(np.int32).max), np.zeros((sources, 2), np.int64)
    np.minimum.at(begins, jobs[:, rows.SOURCE + 1], lowest)
    np.maximum.at(ends, jobs[:, rows.SOURCE + 1], highest)
    return (np.concatenate([begins, ends - begins], axis=1) * (ends[:, :1] > 0)).astype(np.int32)
