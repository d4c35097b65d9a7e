"""Sources and calls -> a `Program`: the jobs of all images in launches, and the arrays that kernels read.

Every image's last stage runs in the last launch, for bytes and floats alike, so all batches of a program together cost
as many launches as their longest image has stages, and one more before each in which an image needs statistics of its
input. The tiles of a launch lie batch by batch, so that each batch can also be made alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch

from torch_sink.image.core.lowering import ResizeWeights
from torch_sink.image.core.ops import Op
from torch_sink.image.decode.jpeg_block import ALIGNMENT_BYTES
from torch_sink.image.decode.jpeg_tables import plan_jpegs
from torch_sink.image.decode.source import FinishedSource, Source
from torch_sink.image.program.block import Packing
from torch_sink.image.program.plan import ImagePlan, plan_image
from torch_sink.image.program.program import ARRAYS, Batch, Launch, Program
from torch_sink.image.program.rows import Rows
from torch_sink.triton_kernels import rows
from torch_sink.triton_kernels.shapes import stage_tile


def make_program(
    sources: Sequence[Source],
    calls: Sequence[tuple[Op, ...]],
    batches: Sequence[tuple[tuple[int, ...], torch.dtype]],
    destination: str = "cpu",
    interpreted: bool = False,
) -> Program:
    """The program of one or more batches.

    Args:
        sources: one for each image, batch by batch.
        calls: the calls recorded on each; images that are not finished tensors end in the shape of their batch.
        batches: shape [N, C, H, W] and dtype of each.
        destination, interpreted: as in `Program`.
    """
    packing, tile = Packing(sources), stage_tile()
    images = {at: (one.size, one.mode) for at, one in enumerate(sources) if not isinstance(one, FinishedSource)}
    plans: dict[int, ImagePlan] = {}
    for at, (size, mode) in images.items():
        plans[at] = plan_image(size, 3 if mode == "RGB" else 1, calls[at])
    made: list[Batch] = []
    results: list[tuple[int, int]] = []
    for number, (shape, dtype) in enumerate(batches):
        first, count = len(results), shape[0]
        has_finished = not plans.keys() >= {*range(first, first + count)}
        made.append(Batch(number, first, shape, dtype, has_finished))
        results += zip(range(count), repeat(number))
    launched: dict[str, Any] = {"arrays": {}}
    if plans:
        entries = [packing.entry_of_image[at] for at in plans]
        found = Rows(list(plans.values()), entries, [results[at] for at in plans])
        launches, launched = _launched(packing, found, [batch.shape for batch in made], tile)
        made = [batch._replace(launches=tuple(own)) for batch, own in zip(made, launches, strict=True)]
    arguments = [argument for plan in plans.values() for argument in plan.arguments]
    programs = [plans[at].calls if at in plans else ops for at, ops in enumerate(calls)]
    packed = packing.write(programs, arguments)
    return Program(packed, tuple(made), destination, interpreted, tile, **launched)


def _launched(
    packing: Packing, found: Rows, shapes: Sequence[tuple[int, ...]], tile: tuple[int, int]
) -> tuple[list[list[Launch]], dict[str, Any]]:
    """Adds the arrays of the launches to the block.

    Args:
        packing: the sources of the program.
        found: the rows of its images.
        shapes: those of its batches.
        tile: rows and columns of a tile.

    Returns:
        The launches of each batch, and the fields of `Program` that describe the arrays.
    """
    launches, arrays = lay_out_launches(found, len(shapes), tile)
    files, workspace_bytes = packing.jpegs.sources, found.workspace + ALIGNMENT_BYTES
    boxes = boxes_read(found, len(packing.sources))
    places, jpegs = np.zeros((len(boxes), rows.PLACE_COLUMNS), np.int64), None
    if len(files):
        jpegs, places[files] = plan_jpegs(packing.jpegs, boxes[files], packing.add_array)
        places[files, 0] += workspace_bytes
    arrays |= {"files": files[:, None], "boxes": boxes, "places": places, "layouts": layouts_of(shapes)}
    laid = [arrays[name] for name in ARRAYS]
    begins = packing.add_arrays(laid)
    return launches, {
        "jpegs": jpegs,
        "arrays": {name: (at, *array.shape) for name, at, array in zip(ARRAYS, begins, laid, strict=True)},
        "made_entries": found.tables.size - found.tables.host_entries,
        "workspace_bytes": workspace_bytes,
        "has_other_images": int((boxes[:, 2] > 0).sum()) > int((boxes[files, 2] > 0).sum()),
    }


def lay_out_launches(
    found: Rows, batches: int, tile: tuple[int, int]
) -> tuple[list[list[Launch]], dict[str, np.ndarray]]:
    """The launches of each batch of a program, in order, and the arrays that they read.

    Args:
        found: the rows of its images.
        batches: how many there are.
        tile: rows and columns of a tile.

    Returns:
        The launches, and by name:
            jobs: int64 [jobs, JOB_COLUMNS]; a decoded image, or a row of a batch, is given by number, not by address.
            operations: int32 [rows, OPERATION_COLUMNS].
            work: int32 [rows, PROLOGUE_COLUMNS]: the resizes, then the jobs by launch and batch.
            statistics: int32 [statistics, STATISTIC_COLUMNS], by launch and batch.
            tables: int32 [entries, 1], the tables of the host.
    """
    jobs, tables, count = found.jobs, found.tables, int(found.launches.max()) + 1
    part_of_job = found.launches * batches + found.batches  # a launch of one batch
    part_of_statistic = part_of_job[found.statistics[:, -1]]
    order, parts = np.argsort(part_of_job, kind="stable"), count * batches
    work, tiles = _tiled(jobs[order], tile)
    work[:, rows.TILED_JOB] = order
    heavy = np.bincount(part_of_job, found.is_heavy, parts) > 0
    ends = np.bincount(part_of_job[order], tiles, parts).astype(np.int64).cumsum()
    measured = np.bincount(part_of_statistic, minlength=parts).cumsum()
    ranges = [0, *ends[:-1].tolist()], ends.tolist(), heavy.tolist(), [0, *measured[:-1].tolist()], measured.tolist()
    launches = list(map(Launch, *ranges))
    return [launches[number::batches] for number in range(batches)], {
        "jobs": jobs,
        "operations": found.atoms,
        "work": np.concatenate([_resizes(tables.resizes), work]),
        "statistics": found.statistics[np.argsort(part_of_statistic, kind="stable")],
        "tables": np.concatenate([np.zeros(0, np.int32), *map(np.ravel, tables.of_host)])[:, None],
    }


def _tiled(jobs: np.ndarray, tile: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the prologue's work for jobs, whose tiles lie one after the other; and how many tiles each has."""
    across, down = -(-jobs[:, rows.WIDTH] // tile[1]), -(-jobs[:, rows.HEIGHT] // tile[0])
    counts = down * across
    work = np.zeros((len(jobs), rows.PROLOGUE_COLUMNS), np.int32)
    work[:, rows.WORK], work[:, rows.FIRST_TILE] = rows.JOB, counts.cumsum() - counts
    work[:, rows.TILES_DOWN], work[:, rows.TILES_ACROSS] = down, across
    work[:, rows.READ_IMAGE] = np.where(jobs[:, rows.SOURCE] == rows.NAMED, jobs[:, rows.SOURCE + 1], rows.NAMED)
    is_result = jobs[:, rows.TARGET] == rows.NAMED
    work[:, rows.WRITTEN_ROW] = np.where(is_result, jobs[:, rows.TARGET + 1], rows.NAMED)
    work[:, rows.WRITTEN_BATCH] = np.where(is_result, jobs[:, rows.TARGET + 2], 0)
    return work, counts


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


def layouts_of(
    shapes: Iterable[Sequence[int]], memory_format: torch.memory_format = torch.contiguous_format
) -> np.ndarray:
    """How new tensors of shapes [N, C, H, W] lie, int64 [shapes, LAYOUT_COLUMNS]."""
    is_last = memory_format is torch.channels_last
    return np.array(
        [
            (0, height * width * channels, 1, width * channels, channels)
            if is_last
            else (0, channels * height * width, height * width, width, 1)
            for _, channels, height, width in shapes
        ],
        np.int64,
    )
