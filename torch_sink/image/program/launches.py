"""Sources and calls -> a `Program`: the jobs of all images in launches, and the arrays that kernels read.

Every image's last stage runs in the last launch, for bytes and floats alike, so all batches of a program together cost
as many launches as their longest image has stages, and one more before each in which an image needs statistics of its
input. The tiles of a launch lie batch by batch, so that each batch can also be made alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from torch_sink.image.core.lowering import ATOM_BYTES, ATOM_COLUMNS, OUTPUT_HEIGHT, ResizeWeights
from torch_sink.image.core.ops import Op
from torch_sink.image.decode.jpeg_block import ALIGNMENT_BYTES, plan_jpegs
from torch_sink.image.decode.source import FinishedSource, Source
from torch_sink.image.program import plan as column_of
from torch_sink.image.program.block import Packing
from torch_sink.image.program.plan import STAGE_COLUMNS, ImagePlan, Stage, plan_image
from torch_sink.image.program.program import ARRAYS, Batch, Launch, Program
from torch_sink.triton_kernels import rows
from torch_sink.triton_kernels.rows import Kind
from torch_sink.triton_kernels.shapes import stage_tile

_FLOAT_BYTES, _HISTOGRAM = 4, 256
_ARGUMENTS = attrgetter("arguments")  # of a plan
_OF_IMAGE = rows.NAMED, 0, 0, 0


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
    results: list[tuple[int, int]] = []  # for each image, its row in its batch, and the number of that
    for number, (shape, dtype) in enumerate(batches):
        first, count = len(results), shape[0]
        has_finished = not plans.keys() >= {*range(first, first + count)}
        made.append(Batch(number, first, shape, dtype, has_finished))
        results += zip(range(count), repeat(number))
    launched: dict[str, Any] = {"arrays": {}}
    if plans:
        entries = [*map(packing.entry_of_image.__getitem__, plans)]
        found = Rows(list(plans.values()), entries, [*map(results.__getitem__, plans)])
        shapes = [shape for shape, _ in batches]
        launches, launched = _launched(packing, found, shapes, tile)
        made = [batch._replace(launches=tuple(own)) for batch, own in zip(made, launches, strict=True)]
    arguments = chain.from_iterable(map(_ARGUMENTS, plans.values()))
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
        jpegs, places[files] = plan_jpegs(packing.jpegs, boxes[files], packing.chunks.add_array)
        places[files, 0] += workspace_bytes
    arrays |= {"files": files[:, None], "boxes": boxes, "places": places, "layouts": layouts_of(shapes)}
    laid = [arrays[name] for name in ARRAYS]
    begins = packing.chunks.add_arrays(laid)
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


# --- rows: every column is computed for all images at once


class Rows:
    """The rows of a program.

    Args:
        plans: one for each image; equal images may share one.
        sources: number of the decoded image that each begins with.
        results: the row that each becomes, and the number of its batch.

    Attributes:
        jobs: int64 [jobs, JOB_COLUMNS], image by image.
        launches: int64 [jobs], number of the launch of each; every image ends in the last launch.
        batches: int64 [jobs], number of the batch of each.
        is_heavy: bool [jobs], whether each needs the heavy variant of the kernel.
        reads: int64 [images], the jobs that read a decoded image.
        shown: int64 [images, 4], height and width of what the view of each shows, and of that image.
        atoms: int32 [rows, OPERATION_COLUMNS]; row 0 stands for no atom.
        statistics: int32 [n, STATISTIC_COLUMNS]; the last column is the job that needs it.
        tables: the lookup tables of the atoms.
        workspace: bytes for outputs that are not the result.
    """

    def __init__(self, plans: Sequence[ImagePlan], sources: Sequence[int], results: Sequence[tuple[int, int]]) -> None:
        of: Any = ImagePlan._make(zip(*plans, strict=True))  # each field is a tuple [images]
        images = _joined(of.image, np.int64, column_of.IMAGE_COLUMNS)
        counts = images[:, : column_of.RESULT]
        first_atoms, first_jobs = (counts.cumsum(axis=0) - counts).T
        lowered = _joined((bytes(ATOM_BYTES), *of.atoms), np.int32, ATOM_COLUMNS)
        atoms, atom_sizes = np.ascontiguousarray(lowered[:, :OUTPUT_HEIGHT]), lowered[:, OUTPUT_HEIGHT:]
        tables = Tables(of.tables, of.resizes, first_atoms.tolist(), atoms)
        stages = _joined(of.stages, np.int64, STAGE_COLUMNS)
        stage: Any = Stage._make(stages.T)  # each field is an array [jobs]

        lengths = counts[:, column_of.JOBS]
        image = np.repeat(np.arange(len(plans)), lengths)
        first = 1 + first_atoms[image]
        read = np.arange(-1, len(stages) - 1)  # the job whose output each reads; -1: an image
        read[first_jobs] = -1
        channels = np.zeros(len(stages), np.int64)
        channels[first_jobs + lengths - 1] = images[:, column_of.RESULT]
        is_result = channels > 0

        # A stage makes what its last atom makes; one without atoms, at the beginning, what its view shows.
        ending = np.where(stage.begin < stage.end, stage.end - 1, stage.head)
        shown = images[:, column_of.SHOWN : column_of.SHOWN + 4]
        size = np.where(ending[:, None] < 0, shown[image, :2], atom_sizes[first + ending])
        of_images = zip(first_jobs.tolist(), of.needed, strict=True)
        needed = [(job + at, *part) for job, parts in of_images for at, *part in parts]
        narrow, begin, end = np.array(needed, np.int64).reshape(-1, 3).T
        size[narrow, 0] = end - begin
        height, width = size.T

        jobs = np.zeros((len(stages), rows.JOB_COLUMNS), np.int64)
        # Planes of the three channels, one after the other: neighbors in a row are neighbors in memory.
        value_bytes = np.where(stage.target_kind == rows.FLOATS, _FLOAT_BYTES, 1)
        plane = height * width
        taken = -(-3 * plane * value_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES * ~is_result
        target = np.ones((len(stages), 4), np.int64)
        target[:, 0], target[:, 1], target[:, 3] = (taken.cumsum() - taken) // value_bytes, width, plane
        target[is_result] = _OF_IMAGE
        source = target[read]
        source[first_jobs] = _OF_IMAGE
        source[first_jobs, 1], target[is_result, 1:3] = sources, results
        jobs[:, rows.SOURCE : rows.SOURCE + 4], jobs[:, rows.TARGET : rows.TARGET + 4] = source, target
        jobs[:, rows.HEIGHT], jobs[:, rows.WIDTH] = height, width
        jobs[:, rows.CHANNELS] = np.where(is_result, channels, 3)
        # A job behind an image's first sees its whole input, except for rows that are not needed.
        jobs[:, rows.VIEW_X_STEP], jobs[:, rows.VIEW_X_END] = 1, width[read]
        jobs[:, rows.VIEW_Y_STEP], jobs[:, rows.VIEW_Y_END] = 1, height[read]
        jobs[first_jobs, rows.VIEW_X_STEP : rows.VIEW_FILL + 1] = images[:, column_of.VIEW : column_of.SHOWN]
        fill = jobs[:, rows.VIEW_FILL]
        fill += first_atoms[image] * (fill > 0)
        down = first[narrow] + stage.down[narrow]
        input_rows = atoms[down, rows.LAST_INPUT] + 1
        step, offset, shows, shows_to = jobs[narrow, rows.VIEW_Y_STEP : rows.VIEW_Y_END + 1].T
        jobs[narrow, rows.VIEW_Y_OFFSET] = offset + step * begin
        jobs[narrow, rows.VIEW_Y_BEGIN] = np.maximum(shows, 0) - begin
        jobs[narrow, rows.VIEW_Y_END] = np.minimum(shows_to, input_rows) - begin
        atoms[down, rows.LAST_INPUT], atoms[down, rows.FIRST_INPUT] = end - 1, begin

        jobs[:, rows.SOURCE_KIND], jobs[:, rows.TOP] = stage.source_kind, stage.top
        jobs[:, rows.SOURCE_VALUES] = np.where(stage.values < 0, 0, atoms[first + stage.values, rows.TABLE])
        jobs[:, rows.TARGET_KIND] = np.where(is_result, rows.OUTPUT, stage.target_kind)
        jobs[:, rows.HEAD] = np.where(stage.head < 0, 0, first + stage.head)
        jobs[:, rows.TAIL_BEGIN], jobs[:, rows.TAIL_END] = first + stage.begin, first + stage.end
        self.is_heavy = (stage.is_heavy > 0) | (jobs[:, rows.TARGET_KIND] == rows.FLOATS) | (fill > 0)
        self.launches = np.arange(len(stages)) + (lengths.max() - lengths - first_jobs)[image]
        self.batches = np.array(results)[image, 1]
        self.statistics = _statistics(stage.measured, read, first + stage.begin, tables, atoms)
        self.jobs, self.atoms, self.tables, self.workspace = jobs, atoms, tables, int(taken.sum())
        self.reads, self.shown = first_jobs, shown


def _statistics(
    measured: np.ndarray, read: np.ndarray, tails: np.ndarray, tables: Tables, atoms: np.ndarray
) -> np.ndarray:
    """Rows for statistics of a job's output, which another job needs.

    Args:
        measured: [jobs], how many channels of its input each job needs statistics of.
        read: [jobs], the job whose output is that input.
        tails: [jobs], the row of the atom that needs them.
        tables: grows by a table for each statistic.
        atoms: written to: the places of these tables.
    """
    needing = np.flatnonzero(measured)
    if not len(needing):
        return np.zeros((0, rows.STATISTIC_COLUMNS), np.int32)
    channels, row = measured[needing], tails[needing]
    entries = np.where(atoms[row, 0] == Kind.BLEND_MEAN, 1, _HISTOGRAM)
    begins = tables.size + (channels * entries).cumsum() - channels * entries
    tables.size += int((channels * entries).sum())
    steps = np.where(channels > 1, entries, 0)  # one table stands for all channels
    atoms[row, rows.TABLE : rows.TABLE + 3] = begins[:, None] + steps[:, None] * np.arange(3)
    channel = np.arange(channels.sum()) - np.repeat(channels.cumsum() - channels, channels)
    job, row, needing = (np.repeat(values, channels) for values in (read[needing], row, needing))
    return np.stack([job, row, channel, needing], axis=1).astype(np.int32)


class Tables:
    """The lookup tables of a program, one after the other; writes into the atoms where theirs lie.

    Args:
        tables, resizes: for each image, as in `ImagePlan`.
        first_atoms: the row before the first atom of each image.
        atoms: int32 [rows, OPERATION_COLUMNS], written to.

    Attributes:
        of_host: those that the host computed, in order.
        resizes: {weights: where the device writes first positions and weights}, behind the tables of the host.
        host_entries: entries of the tables of the host.
        size: entries of all tables.
    """

    def __init__(
        self, tables: Sequence[Any], resizes: Sequence[Any], first_atoms: Sequence[int], atoms: np.ndarray
    ) -> None:
        self.of_host: list[np.ndarray] = []
        self.resizes: dict[ResizeWeights, tuple[int, int]] = {}
        self.size = 0
        self._places: dict[int, tuple[int, ...]] = {}  # {`id` of a table, or of a tuple of tables: where they begin}
        cells: list[int] = []
        values: list[int] = []
        for first, of_image in zip(first_atoms, tables, strict=True):
            for row, column, arrays in of_image:
                # Tables come from caches, so the same ones may serve many images.
                found = self._places.get(id(arrays)) or self._places_of(arrays)
                cell = (first + row) * rows.OPERATION_COLUMNS + column
                cells += range(cell, cell + len(found))
                values += found
        self.host_entries = self.size
        for first, of_image in zip(first_atoms, resizes, strict=True):
            for row, weights in of_image:
                cell = (first + row) * rows.OPERATION_COLUMNS + rows.TABLE
                cells += cell, cell + 1
                if weights not in self.resizes:
                    self.resizes[weights] = self.size, self.size + weights.out_size
                    self.size += (1 + weights.taps) * weights.out_size
                values += self.resizes[weights]
        atoms.reshape(-1)[cells] = values

    def _places_of(self, tables: tuple[np.ndarray, ...]) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        for table in tables:
            if id(table) not in self._places:
                self._places[id(table)] = (self.size,)
                self.size += table.size
                self.of_host.append(table)
            found += self._places[id(table)]
        self._places[id(tables)] = found
        return found


def _joined(parts: Iterable[bytes], dtype: Any, columns: int) -> np.ndarray:
    """One writable array [rows, columns] from pieces, each the bytes of some of its rows."""
    return np.frombuffer(bytearray(b"".join(parts)), dtype).reshape(-1, columns)
