"""What a device does for a batch, as a few numbers, and the arrays for it in one piece: made where a batch is planned.

Whoever launches opens no plan and touches no array: they go to the device as they lie. Only where pixels lie elsewhere
than was expected, or the result does, the jobs are made anew from the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_sink.image.decode.jpeg_block import Chunks
from torch_sink.image.decode.jpeg_tables import JpegBatch, JpegPlan, Sizes
from torch_sink.image.execute.planned import Planned, Run
from torch_sink.image.plan.build import Launch, place_jobs
from torch_sink.triton_kernels.shapes import LaneShape, TileShape

_INT32_BYTES = 4
_ALIGNED_VALUES = 4
_ALIGNMENT_BYTES = 16


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


Write = Callable[[np.ndarray], int]


class RunOrder(NamedTuple):
    """How a run is launched.

    Attributes:
        begin: where its arrays begin, in bytes: jobs, operations, work of the prologue, statistics, tables.
        size: bytes of these.
        arrays: of each, and of the tiles after them, where it begins on the device, rows and columns, in int32 values.
        launches: of stages.
        ranges: first tile of each launch, and the end of its tiles.
        tile: its rows and columns.
        workspace_bytes: for the outputs of all stages but the last.
        is_looked_up: it makes bytes, whose values are looked up after it.
    """

    begin: int
    size: int
    arrays: tuple[tuple[int, int, int], ...]
    launches: tuple[Launch, ...]
    ranges: tuple[tuple[int, int], ...]
    tile: tuple[int, int]
    workspace_bytes: int
    is_looked_up: bool


class Order(NamedTuple):
    """How a batch is launched.

    Attributes:
        jpegs: how its files are decoded: a plan in whose batches `tables` says where these begin, and `places` is left
            out; None without files.
        runs: in order.
        is_placed: the jobs hold where the result has `layout`, and all pixels are decoded in one launch, with the
            workspace right behind them.
        is_complete: every image is made by a run.
        is_channels_last: of the result.
    """

    jpegs: JpegPlan | None
    runs: tuple[RunOrder, ...]
    is_placed: bool
    is_complete: bool
    is_channels_last: bool = False

    @property
    def layout(self) -> torch.memory_format:
        """Of the result that the jobs write to."""
        return torch.channels_last if self.is_channels_last else torch.contiguous_format

    @property
    def workspace_bytes(self) -> int:
        """What the runs need, one after the other; never nothing."""
        return max((run.workspace_bytes for run in self.runs), default=0) + _ALIGNMENT_BYTES

    def numbers(self) -> Any:
        """It as tuples of numbers, which arrive sooner than those that have names."""
        return _plain(self)

    @staticmethod
    def of_numbers(jpegs: Any, runs: Any, *rest: bool) -> Order:
        """What `numbers` gave."""
        if jpegs is not None:
            *places, batches, shape, tile = jpegs
            batches = tuple([JpegBatch._make((*batch[:-1], Sizes._make(batch[-1]))) for batch in batches])
            jpegs = JpegPlan._make((*places, batches, LaneShape._make(shape), TileShape._make(tile)))
        made = [RunOrder._make((*run[:3], tuple(map(Launch._make, run[3])), *run[4:])) for run in runs]
        return Order._make((jpegs, tuple(made), *rest))

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
    _, channels, height, width = shape
    is_channels_last, size = layout is torch.channels_last, height * width
    steps = (1, width * channels, channels) if is_channels_last else (size, width, 1)
    runs = [_run_order(run, places[entry_of_image], (channels * size, *steps), write) for run in planned.runs]
    return Order(jpegs, tuple(runs), is_placed, bool(is_read[entry_of_image].all()), is_channels_last)


def _run_order(run: Run, places: np.ndarray, strides: tuple[int, int, int, int], write: Write) -> RunOrder:
    plan, prologue = run.plan, run.prologue
    jobs = placed_jobs(run, places, strides)
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
    is_looked_up = run.chain_of_image is not None
    shown = tuple(arrays), plan.launches, prologue.ranges, prologue.shape
    return RunOrder(begins[0], size, *shown, plan.workspace_bytes, is_looked_up)


def placed_jobs(run: Run, places: np.ndarray, strides: tuple[int, ...]) -> np.ndarray:
    """The jobs of a run as the kernels read them, int64; arguments as of `place_jobs`."""
    jobs = np.empty(run.plan.jobs.shape, np.int64)
    place_jobs(jobs, run.plan, places, strides)  # type: ignore[arg-type]
    return jobs


def order_alone(planned: Planned, entry_of_image: np.ndarray, shape: tuple[int, ...]) -> tuple[Order, torch.Tensor]:
    """The order of a batch whose plan was made just now, and uint8 [bytes] with the arrays for it."""
    chunks = Chunks()
    order = order_of(planned, entry_of_image, shape, chunks.add_array)
    return order, chunks.write(torch.empty(chunks.size, dtype=torch.uint8, device="cpu"))
