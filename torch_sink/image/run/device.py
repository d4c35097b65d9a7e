"""Batches made by the kernels: decoded and transformed on the device, those of one program side by side.

Everything is launched as if no file were damaged. Where the kernels then report damaged files, Pillow decodes these,
their places are replaced, and the same launches run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import numpy as np
import torch

from torch_sink.common.transfer import (
    current_stream,
    host_buffer,
    to_device,
    to_host_later,
    transfer,
)
from torch_sink.errors import DecodeError
from torch_sink.image.core.ops import replay
from torch_sink.image.decode.providers import decode_sources, kernels_decode
from torch_sink.image.decode.source import Box, Decoded
from torch_sink.image.program.launches import layouts_of
from torch_sink.image.program.program import Batch, Made, Program, Wanted, launches_of, survivors
from torch_sink.triton_kernels.rows import TILE_COLUMNS

_INT32_BYTES = 4
_ALIGNED_VALUES = 4
_MOST_LAYOUTS = 4  # that a program on a device keeps: those of the usual memory formats


class DecodedImages:
    """The decoded images of a program on the device, by kernels or by other providers.

    Args:
        program: whose images are decoded.
        device: where the images are decoded, or copied to.

    Attributes:
        memory: uint8 [bytes]: the outputs of the stages, then the pixels of the files that kernels decode.
        places: int64 [sources, PLACE_COLUMNS], from the first byte of `memory`; None for those in the program.
        owners: tensors that hold pixels outside of `memory`.
        errors: {number of a source: why it cannot be decoded}; the pixels of such a source are undefined.
    """

    def __init__(self, program: Program, device: torch.device) -> None:
        self._program, self.owners = program, list[torch.Tensor]()
        self.places: np.ndarray | None = None
        self.errors: dict[int, DecodeError] = {}
        jpegs = program.jpegs if program.jpegs is not None and kernels_decode(device) else None
        pixels_bytes = 0 if jpegs is None else jpegs.pixels_bytes
        self.memory = torch.empty(program.workspace_bytes + pixels_bytes, dtype=torch.uint8, device=device)
        self._status = None
        if jpegs is not None:
            from torch_sink.image.decode.jpeg_decoder import launch_jpegs

            block = to_device(program.packed.blob.narrow(0, 0, jpegs.size), device)
            status = launch_jpegs(jpegs, block, self.memory.narrow(0, program.workspace_bytes, pixels_bytes))
            self._status = to_host_later(status)  # copied while the host goes on
        if program.arrays and (jpegs is None or program.has_other_images):
            boxes = program.array("boxes")
            is_read = boxes[:, 2] > 0
            if jpegs is not None:
                is_read[program.array("files")[:, 0]] = False
            self._decode(np.flatnonzero(is_read).tolist(), boxes=list(map(Box._make, boxes[is_read].tolist())))

    def decode_damaged(self) -> bool:
        """Waits for the kernels, and has Pillow decode the files that they found damaged.

        True where the launches have to run again, with new pixels; a second call returns False.
        """
        status, self._status = self._status, None
        found = [] if status is None else status().tolist()
        damaged = self._program.array("files")[np.flatnonzero(found), 0].tolist() if any(found) else []
        if damaged:
            self._decode(damaged, provider="pillow")
        return not self.errors.keys() >= set(damaged)

    def _decode(
        self, sources: list[int], provider: str | None = None, boxes: Sequence[Box | None] | None = None
    ) -> None:
        """Has a provider, by default the best for each, decode some sources; notes where their pixels lie."""
        packed, device = self._program.packed, self.memory.device
        images = decode_sources([packed.source(at) for at in sources], device, provider, boxes)  # type: ignore[misc]
        self.errors |= {at: image for at, image in zip(sources, images, strict=True) if isinstance(image, DecodeError)}
        if self.places is None:
            self.places = self._program.array("places").copy()
        self.places[sources], owners = places_of(images, self.memory)
        self.owners += owners


def places_of(images: Sequence[Decoded | DecodeError], memory: torch.Tensor) -> tuple[np.ndarray, list[torch.Tensor]]:
    """Where images lie on the device, and the tensors that hold them; those on the host are copied in one transfer.

    Places are int64 [images, PLACE_COLUMNS], from the first byte of `memory`, uint8 [bytes] on the device. An
    error's pixels all read the same zero byte.
    """
    places = np.empty((len(images), 4), np.int64)
    pixels = [image.pixels if isinstance(image, Decoded) else torch.zeros(1, dtype=torch.uint8) for image in images]
    owners = _sent([each.as_strided((each.numel(),), (1,)) for each in pixels], memory.device)
    for at, (image, owner) in enumerate(zip(images, owners, strict=True)):
        places[at] = image.place if isinstance(image, Decoded) else 0
        places[at, 0] += owner.data_ptr() - memory.data_ptr()
    return places, owners


def _sent(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """uint8 tensors [bytes] on the device: those on the host are copied in one transfer, the others stay."""
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if device.type == "cpu" or not on_host:
        return tensors
    sizes = [len(tensor) for tensor in on_host]
    together = torch.cat(on_host, out=host_buffer(sum(sizes), torch.uint8, device))
    arrived = iter(together.to(device, non_blocking=True).split(sizes))
    return [next(arrived) if tensor.device.type == "cpu" else tensor for tensor in tensors]


class Launches:
    """The launches of a program on a device: their arrays, which the prologue completes.

    Args:
        program: with launches.
        memory: uint8 [bytes], from whose first byte places count; its first `workspace_bytes` are written to.
        layouts: int64 [batches, LAYOUT_COLUMNS]; default those in the program.
        places: int64 [sources, PLACE_COLUMNS], of the decoded images; default those in the program.

    Attributes:
        values: int32 [values], the memory of the arrays.
    """

    def __init__(
        self,
        program: Program,
        memory: torch.Tensor,
        layouts: np.ndarray | None = None,
        places: np.ndarray | None = None,
    ) -> None:
        from torch_sink.triton_kernels.stages.prologue import PROLOGUE_BLOCK, run_prologue

        self._tile, self._memory, device = program.tile, memory, memory.device
        begin, (last, count, _) = program.arrays["places"][0], program.arrays["tables"]
        given = program.packed.blob.narrow(0, begin, last - begin + _INT32_BYTES * count).view(torch.int32)
        # The tables that the device makes follow those of the host and are never empty; then come the tiles.
        entries = count + program.made_entries + 1
        first_tile = -(-((last - begin) // _INT32_BYTES + entries) // _ALIGNED_VALUES) * _ALIGNED_VALUES
        size = first_tile + TILE_COLUMNS * program.batches[-1].launches[-1].end
        self.values = values = torch.empty(size, dtype=torch.int32, device=device)
        transfer(given, values.narrow(0, 0, len(given)))

        def there(name: str, values_each: int = 1) -> torch.Tensor:
            first, count, columns = program.arrays[name]
            columns *= values_each
            return values.as_strided((count, columns), (columns, 1), (first - begin) // _INT32_BYTES)

        if places is not None or layouts is not None:
            places = program.array("places") if places is None else places
            layouts = program.array("layouts") if layouts is None else layouts
            in_their_place = torch.from_numpy(np.concatenate([places.ravel(), layouts.ravel()])).view(torch.int32)
            transfer(in_their_place, values.narrow(0, 0, len(in_their_place)))
        places_there, layouts_there, jobs = (there(name, 2).view(torch.int64) for name in ("places", "layouts", "jobs"))
        operations, work, self._statistics = map(there, ("operations", "work", "statistics"))
        tables = values.narrow(0, (last - begin) // _INT32_BYTES, entries)
        tiles = values[first_tile:].view(-1, TILE_COLUMNS)
        self._read, self._tiles = (jobs, operations, tables), tiles
        constants = dict(zip(("BLOCK_Y", "BLOCK_X"), program.tile, strict=True))
        with _current(device):
            arrays = work, places_there, layouts_there, jobs, tables, tiles
            run_prologue(work.shape[:1], arrays, **constants, BLOCK=PROLOGUE_BLOCK)

    def run(self, batches: Sequence[Batch], outputs: Sequence[torch.Tensor]) -> None:
        """Launches as many stages as the longest image has.

        Args:
            batches: of the program, in order of their numbers.
            outputs: of one dtype, [N, C, H, W], which lie as the layouts say, counted from the first: written to,
                except for rows of finished tensors.
        """
        from torch_sink.triton_kernels.stages.stage import run_stage
        from torch_sink.triton_kernels.stages.statistics import STATISTICS_BLOCK, run_statistics

        with _current(outputs[0].device):
            for launch in chain.from_iterable(launches_of(batches)):
                if launch.statistics_begin < launch.statistics_end:
                    measured = self._statistics[launch.statistics_begin : launch.statistics_end]
                    run_statistics(measured.shape[:1], (self._memory, *self._read, measured), BLOCK=STATISTICS_BLOCK)
                run_stage(
                    self._memory, outputs[0], *self._read, self._tiles,
                    begin=launch.begin, end=launch.end, is_heavy=launch.is_heavy, rows_and_columns=self._tile,
                )  # fmt: skip


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, wherever the tensors are."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


class ProgramOnDevice:
    """A program on a device: its files are decoded once, whichever of its batches are made, when, and how often.

    Streams take turns: one that makes a batch waits for the one before.

    Args:
        program: whose batches are made.
        device: where.
    """

    def __init__(self, program: Program, device: torch.device) -> None:
        self._program, self._device = program, device
        self._images: DecodedImages | None = None
        self._launches: dict[bytes, Launches] = {}  # the newest, by their layouts
        self._stream: Any = None  # that worked last

    def make(self, wanted: Sequence[tuple[Batch, Wanted]]) -> list[Made]:
        """Makes batches side by side, on the current stream.

        One may be wanted twice, as itself and mixed, or in two shapes: each is made.

        Raises:
            DecodeError: under the conditions of `survivors`.
        """
        outputs = [_Output(*one) for one in wanted]
        rounds = _rounds(outputs)
        self._take_turn()
        images = self._images = self._images or DecodedImages(self._program, self._device)
        is_new = True
        while is_new:  # again at most once
            for together in rounds:
                self._run(together, images)
            for output in outputs:
                output.complete(self._program)
            if is_new := images.decode_damaged():
                self._launches.clear()
        return [output.delivered(self._program, images.errors) for output in outputs]

    def _run(self, outputs: Sequence[_Output], images: DecodedImages) -> None:
        """Launches what makes the outputs, those of one dtype side by side."""
        of_dtype: dict[torch.dtype, list[_Output]] = {}
        for output in sorted(outputs, key=lambda output: output.batch.number):
            if output.batch.is_launched:
                of_dtype.setdefault(output.whole.dtype, []).append(output)
        if not of_dtype:
            return
        shapes = [batch.shape for batch in self._program.batches]
        layouts = layouts_of(shapes, outputs[0].wanted.memory_format)
        for together in of_dtype.values():
            for output in together:
                layouts[output.batch.number] = output.layout_from(together[0].whole)
        launches = self._launches.get(key := layouts.tobytes())
        if launches is None:
            is_in_program = np.array_equal(layouts, self._program.array("layouts"))
            launches = Launches(self._program, images.memory, None if is_in_program else layouts, images.places)
            if len(self._launches) >= _MOST_LAYOUTS:
                del self._launches[next(iter(self._launches))]
            self._launches[key] = launches
        for together in of_dtype.values():
            launches.run([output.batch for output in together], [output.whole for output in together])

    def _take_turn(self) -> None:
        if self._device.type in ("cpu", "meta"):  # they have no streams
            return
        stream, before = current_stream(self._device), self._stream
        self._stream = stream
        if before is None or before == stream:
            return
        stream.wait_stream(before)
        held = [launches.values for launches in self._launches.values()]
        if self._images is not None:
            held += [self._images.memory, *self._images.owners]
        for tensor in held:
            tensor.record_stream(stream)  # or their memory would be free for the stream that made them


def _rounds(outputs: Sequence[_Output]) -> list[list[_Output]]:
    """The outputs in as few groups as there are, at most, of one batch: a job names one place to write to."""
    rounds: list[list[_Output]] = []
    met: Counter[int] = Counter()
    for output in outputs:
        at = met[output.batch.number]
        met[output.batch.number] += 1
        if at == len(rounds):
            rounds.append([])
        rounds[at].append(output)
    return rounds


class _Output:
    """One batch while it is made.

    Attributes:
        batch, wanted: what is made, and how it is delivered.
        whole: [N, C, H, W], what the kernels write.
    """

    def __init__(self, batch: Batch, wanted: Wanted) -> None:
        self.batch, self.wanted = batch, wanted
        self._result, dtype = wanted.result(batch, batch.shape[0]), wanted.kernel_dtype(batch)
        self._made = torch.empty_like(self._result) if wanted.keeps_rows else self._result
        is_last = self._made.dtype == dtype and not batch.mixes
        self.whole = self._made if is_last else torch.empty_like(self._made, dtype=dtype)

    def layout_from(self, first: torch.Tensor) -> tuple[int, ...]:
        """The columns of its layout, counted from a tensor of the same dtype."""
        return (self.whole.data_ptr() - first.data_ptr()) // first.itemsize, *self.whole.stride()

    def complete(self, program: Program) -> None:
        """What follows the launches: copies of finished tensors, and mixes."""
        if self.batch.has_finished:
            self._copy_finished(program)
        if self.whole is not self._made:
            self._made.copy_(replay(self.whole, self.batch.mixes))

    def _copy_finished(self, program: Program) -> None:
        packed = program.packed
        is_read = program.array("boxes")[:, 2] > 0 if program.arrays else np.zeros(len(packed.contents.entries), bool)
        for row, at in enumerate(packed.entry_of_image[self.batch.first : self.batch.end]):
            if not is_read[at]:
                self.whole[row].copy_(packed.source(at).decode(), non_blocking=True)  # type: ignore[arg-type]

    def delivered(self, program: Program, errors_of_sources: dict[int, DecodeError]) -> Made:
        """The batch as it was wanted; raises `DecodeError` under the conditions of `survivors`."""
        batch, wanted, result = self.batch, self.wanted, self._result
        errors = {}
        if errors_of_sources:
            entries = enumerate(program.packed.entry_of_image[batch.first : batch.end])
            errors = {row: errors_of_sources[at] for row, at in entries if at in errors_of_sources}
        shown, broken_files = survivors(errors, batch.shape[0], len(batch.mixes), wanted.on_decode_error)
        if shown is not None:
            rows = to_device(np.array(shown), wanted.device)
            result = wanted.result(batch, len(shown)).copy_(self._made[rows])
        elif self._made is not result:
            result.copy_(self._made)
        return result, shown, broken_files


def make_on_device(program: Program, wanted: Wanted) -> Made:
    """Makes the only batch of a program, on the current stream; raises `DecodeError` as `survivors` does."""
    return ProgramOnDevice(program, wanted.device).make([(program.batches[0], wanted)])[0]
