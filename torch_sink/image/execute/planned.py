"""How a batch is made: its plan, and the order for whoever launches. Both come from where the batch is collated.

An order is a few numbers, and arrays in one piece that go to the device as they lie: whoever launches opens no plan and
touches no array. Only where pixels lie elsewhere than was expected, or the result does, the jobs are made anew from the
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_sink.image.core.ops import Op
from torch_sink.image.decode.jpeg_block import Chunks, JpegFiles
from torch_sink.image.decode.jpeg_tables import JpegPlan, plan_jpegs
from torch_sink.image.decode.source import FinishedSource, Source
from torch_sink.image.plan.build import Launch, Plan, Prologue, build_plan, placed_jobs, prologue_of
from torch_sink.image.plan.lowering import lower
from torch_sink.triton_kernels.shapes import stage_tile

_INT32_BYTES = 4
_ALIGNED_VALUES = 4
_ALIGNMENT_BYTES = 16

Write = Callable[[np.ndarray], int]


def shape_of(source: Source) -> tuple[int, int, int]:
    """Height and width in pixels and channels, 1 or 3, of a source that is no finished tensor."""
    width, height = source.size  # type: ignore[union-attr]
    return height, width, 3 if source.mode == "RGB" else 1  # type: ignore[union-attr]


class Planned(NamedTuple):
    """The plan of a batch.

    Attributes:
        plan: of the launches, which know an image by its position in the batch; None where all are finished tensors.
        prologue: what is made on the device before these.
        boxes: int32 [sources, 4], the part of each source that its images read: left, top, width, height; all 0 where
            nobody reads it.
        jpegs: how the JPEG files among the sources are decoded; None where pixels are there already.
    """

    plan: Plan | None
    prologue: Prologue | None
    boxes: np.ndarray
    jpegs: JpegPlan | None


def plan_batch(
    images: Sequence[Source],
    calls: Sequence[tuple[Op, ...]],
    entry_of_image: Sequence[int],
    jpegs: JpegFiles | None = None,
    *,
    only: Sequence[int] | None = None,
) -> Planned:
    """The plan of a batch.

    Args:
        images: the source of each; finished tensors need no plan.
        calls: recorded on each.
        entry_of_image: which of the distinct sources that is.
        jpegs: those among the sources; None where they are decoded already.
        only: images that are made, as they are among all of them; by default all.
    """
    wanted = range(len(images)) if only is None else only
    chosen = [at for at in wanted if not isinstance(images[at], FinishedSource)]
    plan = prologue = None
    boxes = np.zeros((max(entry_of_image) + 1, 4), np.int32)
    if chosen:
        shapes = [shape_of(images[at]) for at in chosen]
        states = [lower(*shape, calls[at]) for shape, at in zip(shapes, chosen, strict=True)]
        plan = build_plan([shape[:2] for shape in shapes], states, chosen)
        prologue = prologue_of(plan, stage_tile())
        _join_boxes(plan.boxes, np.array(entry_of_image)[chosen], boxes)
    return Planned(plan, prologue, boxes, None if jpegs is None else plan_jpegs(jpegs, boxes[jpegs.sources]))


def _join_boxes(boxes: np.ndarray, sources: np.ndarray, out: np.ndarray) -> None:
    """Writes the smallest box [sources, 4] around what images read of each source."""
    begins, ends = np.full_like(out[:, :2], np.iinfo(np.int32).max), np.zeros_like(out[:, :2])
    np.minimum.at(begins, sources, boxes[:, :2])
    np.maximum.at(ends, sources, boxes[:, :2] + boxes[:, 2:])
    is_read = ends[:, 0] > 0
    out[is_read] = np.concatenate([begins, ends - begins], axis=1)[is_read]


class Order(NamedTuple):
    """How a batch is launched.

    Attributes:
        jpegs: how its files are decoded: a plan in whose batches `tables` says where these begin, and `places` is left
            out; None without files.
        begin: where the arrays of the plan begin, in bytes: jobs, operations, work of the prologue, statistics, tables.
        size: bytes of these.
        arrays: of each, and of the tiles after them, where it begins on the device, rows and columns, in int32 values.
        launches: of stages; none where all images are finished tensors.
        ranges: first tile of each launch, and the end of its tiles.
        tile: its rows and columns.
        workspace_bytes: for the outputs of all stages but the last; never nothing.
        is_placed: the jobs hold where the result has `layout`, and all pixels are decoded in one launch, with the
            workspace right behind them.
        is_complete: every image is made by the launches.
        layout: of the result that the jobs write to.
    """

    jpegs: JpegPlan | None
    begin: int
    size: int
    arrays: tuple[tuple[int, int, int], ...]
    launches: tuple[Launch, ...]
    ranges: tuple[tuple[int, int], ...]
    tile: tuple[int, int]
    workspace_bytes: int
    is_placed: bool
    is_complete: bool
    layout: torch.memory_format

    def jpegs_in(self, host: torch.Tensor) -> JpegPlan | None:
        """How the files are decoded, with tables that lie in uint8 [bytes]."""
        if self.jpegs is None:
            return None
        batches = []
        for batch in self.jpegs.batches:
            begin: Any = batch.tables
            tables: Any = host.narrow(0, begin, batch.tables_bytes).view(torch.int32)
            batches.append(batch._replace(tables=tables))
        return self.jpegs._replace(batches=tuple(batches))


def order_of(
    planned: Planned,
    entry_of_image: np.ndarray,
    shape: tuple[int, ...],
    write: Write,
    layout: torch.memory_format = torch.contiguous_format,
) -> Order:
    """The order of a batch.

    Args:
        planned: its plan.
        entry_of_image: the source of each image.
        shape: of the result, [N, C, H, W].
        write: writes an array behind those before it, and says where it begins; a multiple of 16 bytes.
        layout: of the result.
    """
    is_read = planned.boxes[:, 2] > 0
    places = np.zeros((len(is_read), 4), np.int64)
    is_placed, jpegs = False, planned.jpegs
    if jpegs is not None:
        if len(jpegs.batches) == 1:
            (batch,) = jpegs.batches
            places[jpegs.sources] = batch.places - [batch.sizes.pixels_bytes, 0, 0, 0]
            is_placed = int(is_read[jpegs.sources].sum()) == int(is_read.sum())
        batches = [batch._replace(tables=write(batch.tables), places=None) for batch in jpegs.batches]  # type: ignore[arg-type]
        jpegs = jpegs._replace(sources=None, batches=tuple(batches))  # type: ignore[arg-type]
    launched: Any = (0, 0, (), (), (), (0, 0), _ALIGNMENT_BYTES)
    if planned.plan is not None and planned.prologue is not None:
        strides = torch.empty(shape, device="meta", memory_format=layout).stride()
        jobs = placed_jobs(planned.plan, places[entry_of_image], strides)
        launched = _launched(planned.plan, planned.prologue, jobs, write)
    return Order._make((jpegs, *launched, is_placed, bool(is_read[entry_of_image].all()), layout))


def _launched(plan: Plan, prologue: Prologue, jobs: np.ndarray, write: Write) -> tuple[Any, ...]:
    """From `Order.begin` to `Order.workspace_bytes`."""
    given = jobs, plan.operations, prologue.work, plan.statistics, plan.tables
    begins = [write(array) for array in given]
    arrays = []
    for begin, array in zip(begins, given, strict=True):
        values = array.itemsize // _INT32_BYTES
        columns = values * (array.shape[1] if array.ndim == 2 else 1)
        arrays.append(((begin - begins[0]) // _INT32_BYTES, len(array), columns))
    # What the device makes lies behind the tables; they are never empty.
    first, rows, columns = arrays[-1]
    arrays[-1] = first, rows + plan.made_entries + 1, columns
    tiles = -(-(first + arrays[-1][1]) // _ALIGNED_VALUES) * _ALIGNED_VALUES
    arrays.append((tiles, prologue.tiles, 3))
    size = begins[-1] + plan.tables.nbytes - begins[0]
    room = plan.workspace_bytes + _ALIGNMENT_BYTES
    return begins[0], size, tuple(arrays), plan.launches, prologue.ranges, prologue.shape, room


def order_alone(planned: Planned, entry_of_image: np.ndarray, shape: tuple[int, ...]) -> tuple[Order, torch.Tensor]:
    """The order of a batch whose plan was made just now, and uint8 [bytes] with the arrays for it."""
    chunks = Chunks()
    order = order_of(planned, entry_of_image, shape, chunks.add_array)
    return order, chunks.write(torch.empty(chunks.size, dtype=torch.uint8, device="cpu"))
