"""A batch that is not computed yet, as one record: made where it is collated, once, and run wherever its device is.

A program knows neither addresses nor strides: its jobs name the decoded images that they read and the rows of the batch
that they write. Who runs it gives the places of the images, and the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_sink.image.core.ops import Op
from torch_sink.image.core.state import default_device
from torch_sink.image.decode.jpeg_tables import JpegPlan, plan_jpegs
from torch_sink.image.decode.providers import candidates
from torch_sink.image.decode.source import FinishedSource, Source
from torch_sink.image.program.block import Packed, Packing
from torch_sink.image.program.jobs import RowBuilder
from torch_sink.image.program.launches import Launch, boxes_read, lay_out_launches
from torch_sink.image.program.lowering import lower
from torch_sink.triton_kernels import rows
from torch_sink.triton_kernels.rows import Kind
from torch_sink.triton_kernels.shapes import stage_tile

# The arrays of a program in the order in which they lie in the block. The first two stay on the host.
ARRAYS = ("files", "boxes", "places", "jobs", "operations", "work", "statistics", "tables")
_INT64 = ("places", "jobs")
_ALIGNMENT_BYTES = 16
_MOST_SHOWN = 4


class Program(NamedTuple):
    """A batch [N, C, H, W] that is not computed yet. `print` shows who decodes, and what each launch does.

    Attributes:
        packed: the sources and the calls recorded on each image, in a block of bytes that also holds the arrays.
        shape: of the batch.
        dtype: of the batch.
        destination: device that the backend was set to, as a string; nothing can be executed for "meta".
        interpreted: the kernels run on the CPU under Triton's interpreter.
        tile: rows and columns of what a program of the stage kernel makes.
        arrays: {one of `ARRAYS`: its first byte in the block, rows, and columns}; empty without launches. `files` are
            the numbers of the sources that kernels decode, `boxes` what is read of each source: left, top, width,
            height, all 0 where nothing is. `places` are those of the decoded images where these are files; what follows
            is said at `lay_out_launches`.
        launches: of stages, in order; none where all images are finished tensors.
        mixes: calls recorded on the whole batch, `MixUp` and `CutMix`; they run after every image is made.
        jpegs: how the files are decoded, which the block begins with; None without any.
        made_entries: of the tables that the device makes, behind those of the host.
        workspace_bytes: for the outputs of all stages but the last; never nothing. The pixels of the files follow.
        has_other_images: something else than the files has to be decoded.
        has_finished: some images are finished tensors, which no launch makes.
    """

    packed: Packed
    shape: tuple[int, ...]
    dtype: torch.dtype
    destination: str
    interpreted: bool
    tile: tuple[int, int]
    arrays: dict[str, tuple[int, int, int]]
    launches: tuple[Launch, ...] = ()
    mixes: tuple[Op, ...] = ()
    jpegs: JpegPlan | None = None
    made_entries: int = 0
    workspace_bytes: int = _ALIGNMENT_BYTES
    has_other_images: bool = False
    has_finished: bool = False

    @property
    def block(self) -> torch.Tensor:
        """uint8 [bytes] on the host, which everything of the batch lies in."""
        return self.packed.blob

    def array(self, name: str) -> np.ndarray:
        """One of `ARRAYS`, [rows, columns], where it lies in the block."""
        begin, count, columns = self.arrays[name]
        dtype: Any = np.int64 if name in _INT64 else np.int32
        values = self.block.numpy()[begin : begin + count * columns * np.dtype(dtype).itemsize]
        return values.view(dtype).reshape(count, columns)

    def jobs_of(self, launch: Launch) -> np.ndarray:
        """The rows of the jobs of a launch, int64 [jobs, JOB_COLUMNS]."""
        work = self.array("work")
        first = work[:, rows.FIRST_TILE]
        chosen = work[(work[:, rows.WORK] == rows.JOB) & (first >= launch.begin) & (first < launch.end)]
        return self.array("jobs")[chosen[:, rows.TILED_JOB]]

    def stages_of(self, launch: Launch) -> Counter[str]:
        """How many images of a launch run which stage."""
        names = {int(kind): kind.name.lower() for kind in Kind}
        kinds = [names.get(kind, "") for kind in self.array("operations")[:, 0].tolist()]
        found: Counter[str] = Counter()
        for job in self.jobs_of(launch).tolist():
            head = kinds[job[rows.HEAD] : job[rows.HEAD] + 1] if job[rows.HEAD] else []
            found[" + ".join(head + kinds[job[rows.TAIL_BEGIN] : job[rows.TAIL_END]]) or "copy"] += 1
        return found

    @property
    def decoders(self) -> Counter[str]:
        """{name of a provider: how many images it would decode}, on the device that the backend was set to."""
        device = torch.device(default_device() if self.destination == "meta" else self.destination)
        found: Counter[str] = Counter()
        sources = self.packed.sources()
        for at in self.packed.entry_of_image:
            source = sources[at]
            if isinstance(source, FinishedSource):
                found["nobody (finished tensors)"] += 1
            else:
                found[next(provider.name for provider in candidates(device) if provider.takes(source))] += 1
        return found

    def __str__(self) -> str:
        lines = [f"decode: {', '.join(f'{count} by {name}' for name, count in self.decoders.items())}"]
        for number, launch in enumerate(self.launches, 1):
            found = self.stages_of(launch)
            work = "; ".join(f"{count} x {text}" for text, count in found.most_common(_MOST_SHOWN))
            more = f"; {len(found) - _MOST_SHOWN} other mixtures" if len(found) > _MOST_SHOWN else ""
            statistics = " after statistics" if launch.statistics_begin < launch.statistics_end else ""
            lines.append(f"launch {number}{statistics}: {work}{more}")
        return "\n".join([*lines, f"-> {list(self.shape[1:])}"] if self.launches else lines)

    def __repr__(self) -> str:
        return str(self)


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
        sources: of each image.
        calls: recorded on each; images that are not finished tensors end in `shape`.
        shape: [N, C, H, W].
        dtype: as of `Program`, like the other two.
    """
    packing, tile = Packing(sources, calls), stage_tile()
    made_rows = [row for row, source in enumerate(sources) if not isinstance(source, FinishedSource)]
    launched: dict[str, Any] = {"arrays": {}}
    if made_rows:
        launched = _launched(packing, [(row, sources[row], calls[row]) for row in made_rows], tile)
    program = Program(packing.write(), shape, dtype, destination, interpreted, tile, **launched)
    return program._replace(has_finished=len(made_rows) < len(sources))


def _launched(
    packing: Packing, images: Sequence[tuple[int, Any, tuple[Op, ...]]], tile: tuple[int, int]
) -> dict[str, Any]:
    """What a program says of its launches, with their arrays in the block.

    Args:
        packing: of all sources.
        images: row in the batch, source, and calls of each that is made.
        tile: as of `Program`.
    """
    lowered = [lower(source.size, 3 if source.mode == "RGB" else 1, ops) for _, source, ops in images]
    builder = RowBuilder(lowered)
    for (row, source, _), state in zip(images, lowered, strict=True):
        builder.add_image(packing.entry_of_image[row], row, source.size, state)
    launches, arrays = lay_out_launches(builder, tile)
    files, workspace_bytes = packing.jpegs.sources, builder.workspace + _ALIGNMENT_BYTES
    boxes = boxes_read(builder, len(packing.sources))
    places, jpegs = np.zeros((len(boxes), rows.PLACE_COLUMNS), np.int64), None
    if len(files):
        jpegs, places[files] = plan_jpegs(packing.jpegs, boxes[files], packing.add_array)
        places[files, 0] += workspace_bytes
    arrays |= {"files": files[:, None], "boxes": boxes, "places": places}
    return {
        "jpegs": jpegs,
        "launches": tuple(launches),
        "arrays": {name: (packing.add_array(arrays[name]), *arrays[name].shape) for name in ARRAYS},
        "made_entries": builder.entries - builder.host_entries,
        "workspace_bytes": workspace_bytes,
        "has_other_images": int((boxes[:, 2] > 0).sum()) > int((boxes[files, 2] > 0).sum()),
    }
