"""`Program`, batches that are not computed yet; `Wanted`, how one is to be delivered; and which images it then shows.

A program is made once, where its batches are collated, and run wherever their device is.

A program knows no addresses: its jobs name the decoded images that they read, and the rows and batches that they write.
Whoever runs it supplies their addresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_sink.damage.report import BrokenFile
from torch_sink.errors import DecodeError
from torch_sink.image.core.ops import PIXELS, Op
from torch_sink.image.core.settings import default_device
from torch_sink.image.decode.jpeg_block import ALIGNMENT_BYTES, JpegPlan
from torch_sink.image.decode.providers import candidates
from torch_sink.image.decode.source import FinishedSource
from torch_sink.image.program.block import Packed
from torch_sink.triton_kernels import rows
from torch_sink.triton_kernels.rows import Kind

# The arrays of a program in the order in which they lie in the block. The first two stay on the host.
ARRAYS = ("files", "boxes", "places", "layouts", "jobs", "operations", "work", "statistics", "tables")
_INT64 = ("places", "layouts", "jobs")
_MOST_SHOWN = 4
# What the kernels convert values to, other than the dtype of a batch.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Launch(NamedTuple):
    """One launch of the stage kernel, after one of the statistics kernel where the stages need statistics.

    That of one batch may have no tiles; those of neighboring batches can be joined.

    Attributes:
        begin, end: range of its tiles.
        is_heavy: some image needs what only the larger variant of the kernel can do.
        statistics_begin, statistics_end: range of its rows in the array "statistics".
    """

    begin: int
    end: int
    is_heavy: bool
    statistics_begin: int
    statistics_end: int

    def joined(self, following: Launch) -> Launch | None:
        """This launch and one that begins where it ends, as one launch; None where the tiles of others lie between."""
        if (self.end, self.statistics_end) != (following.begin, following.statistics_begin):
            return None
        is_heavy = self.is_heavy or following.is_heavy
        return Launch(self.begin, following.end, is_heavy, self.statistics_begin, following.statistics_end)


class Batch(NamedTuple):
    """One of the batches [N, C, H, W] that a program makes.

    Attributes:
        number: its position among them.
        first: position of its first image among the images of the program.
        shape, dtype: those of the batch.
        has_finished: some images are finished tensors, which no launch makes.
        launches: those of its stages, in order, as many as the program has; () where that has none.
        mixes: calls recorded on the whole batch, `MixUp` and `CutMix`; they run after every image is made.
    """

    number: int
    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    has_finished: bool = False
    launches: tuple[Launch, ...] = ()
    mixes: tuple[Op, ...] = ()

    @property
    def end(self) -> int:
        """Position behind its last image."""
        return self.first + self.shape[0]

    @property
    def is_launched(self) -> bool:
        """False where all images are finished tensors."""
        return any(launch.begin < launch.end for launch in self.launches)


def launches_of(batches: Iterable[Batch]) -> list[list[Launch]]:
    """The launches that make batches, in order of their numbers, side by side: for each stage as few as possible."""
    stages: list[list[Launch]] = []
    for of_batches in zip(*(batch.launches for batch in batches), strict=True):
        joined: list[Launch] = []
        for launch in of_batches:
            if joined and (both := joined[-1].joined(launch)) is not None:
                joined[-1] = both
            else:
                joined.append(launch)
        stages.append([launch for launch in joined if launch.begin < launch.end])
    return stages


class Program(NamedTuple):
    """Batches that are not computed yet. `print` shows who decodes, and what each launch does.

    Attributes:
        packed: the sources and the calls recorded on each image, in a block of bytes that also holds the arrays.
        batches: what is made, in the order of their images.
        destination: device that the backend was set to, as a string; nothing can be executed for "meta".
        interpreted: the kernels run on the CPU under Triton's interpreter.
        tile: rows and columns of pixels that one block of the stage kernel's grid makes.
        arrays: {one of `ARRAYS`: its first byte in the block, rows, and columns}; empty without launches, where all
            images are finished tensors. `files` are the numbers of the sources that kernels decode, `boxes` the part of
            each source that is read: left, top, width, height, all 0 where nothing is. `places` says where the pixels
            of the files lie, `layouts` how batches lie that are new and contiguous. See `lay_out_launches` for the
            others.
        jpegs: how kernels decode the files at the beginning of the block; None without such files.
        made_entries: entries of the tables that the device makes, which follow those of the host.
        workspace_bytes: for the outputs of all stages but the last; never 0. The pixels of the files follow.
        has_other_images: some images that are not among the files have to be decoded.
    """

    packed: Packed
    batches: tuple[Batch, ...]
    destination: str
    interpreted: bool
    tile: tuple[int, int]
    arrays: dict[str, tuple[int, int, int]]
    jpegs: JpegPlan | None = None
    made_entries: int = 0
    workspace_bytes: int = ALIGNMENT_BYTES
    has_other_images: bool = False

    @property
    def launches(self) -> list[Launch]:
        """The launches that make all batches side by side."""
        return [launch for stage in launches_of(self.batches) for launch in stage]

    @property
    def block(self) -> torch.Tensor:
        """uint8 [bytes] on the host: the sources, calls, and arrays."""
        return self.packed.blob

    @property
    def device_bytes(self) -> int:
        """What kernels take on a device to make its batches, beside these: the block, the pixels of JPEG files, and
        what stages write in between. The pixels of other decoders are not counted.
        """
        pixels = 0 if self.jpegs is None else self.jpegs.pixels_bytes
        return self.block.nbytes + self.workspace_bytes + pixels

    def array(self, name: str) -> np.ndarray:
        """A view [rows, columns] of one of `ARRAYS` in the block."""
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
        """{description of a stage: how many images run it in a launch}."""
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
        entries = self.packed.entry_of_image
        for at in chain.from_iterable(entries[batch.first : batch.end] for batch in self.batches):
            source = sources[at]
            if isinstance(source, FinishedSource):
                found["nobody (finished tensors)"] += 1
            else:
                found[next(provider.name for provider in candidates(device) if provider.takes(source))] += 1
        return found

    def __str__(self) -> str:
        lines = [f"decode: {', '.join(f'{count} by {name}' for name, count in self.decoders.items())}"]
        launches = self.launches
        for number, launch in enumerate(launches, 1):
            found = self.stages_of(launch)
            work = "; ".join(f"{count} x {text}" for text, count in found.most_common(_MOST_SHOWN))
            more = f"; {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
            statistics = " after statistics" if launch.statistics_begin < launch.statistics_end else ""
            lines.append(f"launch {number}{statistics}: {work}{more}")
        made = [f"-> {', '.join(str(list(batch.shape[1:])) for batch in self.batches)}"] if launches else []
        return "\n".join(lines + made)

    def __repr__(self) -> str:
        return str(self)


class Wanted(NamedTuple):
    """How a batch is to be delivered."""

    device: torch.device  # device of the result
    dtype: torch.dtype | None = None  # dtype of the result; None for the batch's own
    memory_format: torch.memory_format = torch.contiguous_format  # of the result, unless `out` is given
    out: torch.Tensor | None = None  # written to instead of a new tensor, [N, C, H, W]
    on_decode_error: str = "raise"  # "raise", "skip" or "replace"

    def dtype_of_result(self, batch: Batch) -> torch.dtype:
        """The dtype of the result."""
        return self.out.dtype if self.out is not None else self.dtype or batch.dtype

    def kernel_dtype(self, batch: Batch) -> torch.dtype:
        """The dtype that the kernels write: the result's where they can convert to it and no mix follows.

        A batch in half precision is computed in it first, since the result's dtype may be wider. A batch of masks or
        whole numbers is made in float32, which holds them.
        """
        made, asked = batch.dtype, self.dtype_of_result(batch)
        made = made if made in PIXELS else torch.float32
        converts = made.itemsize != 2 and asked in _FLOATS
        return asked if converts and not batch.mixes else made

    def result(self, batch: Batch, count: int) -> torch.Tensor:
        """The tensor that `count` rows of a batch are written to."""
        if self.out is not None:
            return self.out[:count]
        shape, dtype = (count, *batch.shape[1:]), self.dtype_of_result(batch)
        return torch.empty(shape, dtype=dtype, device=self.device, memory_format=self.memory_format)

    @property
    def keeps_rows(self) -> bool:
        """True where rows of `out` that no good image fills keep their values."""
        return self.out is not None and self.on_decode_error == "skip"


# A batch that was made: its tensor; the images that the rows show, None where these are the batch's, in order; and the
# files whose images were skipped or replaced.
Made = tuple[torch.Tensor, list[int] | None, tuple[BrokenFile, ...]]


def survivors(
    errors: dict[int, DecodeError], count: int, mixes: int, policy: str
) -> tuple[list[int] | None, tuple[BrokenFile, ...]]:
    """The images that a result shows, in order, or None where it shows every image; and the files of the others.

    Args:
        errors: {row of a damaged image: its error}, in order.
        count: number of images.
        mixes: number of mixes; each mixes every image with the one before it, so damage spreads by one row.
        policy: "raise", "skip" a damaged image, or "replace" it by the next good one.

    Raises:
        DecodeError: the first damaged image's, under "raise" or when no image is good.
    """
    if not errors:
        return None, ()
    broken_files = tuple(BrokenFile(error.path, error.reason) for error in errors.values())
    for _ in range(mixes):
        errors = errors | {(row + 1) % count: error for row, error in errors.items()}
    first = min(errors)
    if policy == "raise" or len(errors) == count:
        error = errors[first]
        raise DecodeError(error.path, first, error.reason) from error
    good = [row for row in range(count) if row not in errors]
    if policy == "replace":
        return [next((row for row in good if row >= place), good[0]) for place in range(count)], broken_files
    return good, broken_files
