"""Batches made by the kernels: decoded and transformed on the device.

Everything is launched as if no file were damaged. Where the kernels then report damaged files, Pillow decodes these,
their places are replaced, and the same launches run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch

from torch_sink.common.transfer import host_buffer, to_device, to_host_later, transfer
from torch_sink.errors import DecodeError
from torch_sink.image.core.ops import replay
from torch_sink.image.decode.providers import decode_sources, kernels_decode
from torch_sink.image.decode.source import Box, Decoded
from torch_sink.image.program.program import Made, Program, Wanted, survivors
from torch_sink.triton_kernels.rows import TILE_COLUMNS

_INT32_BYTES = 4
_ALIGNED_VALUES = 4


class DecodedImages:
    """The decoded images of a batch on the device, by kernels or by other providers.

    Args:
        program: the program of the batch.
        device: where the images are decoded, or copied to.

    Attributes:
        memory: uint8 [bytes]: the outputs of the stages, then the pixels of the files that kernels decode.
        places: int64 [sources, PLACE_COLUMNS], from the first byte of `memory`; None for those in the program.
        errors: {number of a source: why it cannot be decoded}; the pixels of such a source are undefined.
    """

    def __init__(self, program: Program, device: torch.device) -> None:
        self._program, self._owners = program, list[torch.Tensor]()
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
        if program.launches and (jpegs is None or program.has_other_images):
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
        self._owners += owners


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


def make_on_device(program: Program, wanted: Wanted) -> Made:
    """Makes a batch by the kernels, on the current stream; raises `DecodeError` under the conditions of `survivors`."""
    images = DecodedImages(program, wanted.device)
    result, dtype = wanted.result(program, program.shape[0]), wanted.kernel_dtype(program)
    made = torch.empty_like(result) if wanted.keeps_rows else result
    is_last = made.dtype == dtype and not program.mixes
    whole = made if is_last else torch.empty_like(made, dtype=dtype)
    is_new = True
    while is_new:  # again at most once
        run_launches(program, images.memory, whole, images.places)
        if program.has_finished:
            _copy_finished(program, whole)
        if whole is not made:
            made.copy_(replay(whole, program.mixes))
        is_new = images.decode_damaged()
    errors = {}
    if images.errors:
        entries = enumerate(program.packed.entry_of_image)
        errors = {row: images.errors[at] for row, at in entries if at in images.errors}
    shown, broken_files = survivors(errors, program.shape[0], len(program.mixes), wanted.on_decode_error)
    if shown is not None:
        result = wanted.result(program, len(shown)).copy_(made[to_device(np.array(shown), wanted.device)])
    elif made is not result:
        result.copy_(made)
    return result, shown, broken_files


def _copy_finished(program: Program, whole: torch.Tensor) -> None:
    """Copies the finished tensors of a batch to their rows."""
    packed = program.packed
    is_read = program.array("boxes")[:, 2] > 0 if program.launches else np.zeros(len(packed.contents.entries), bool)
    for row, at in enumerate(packed.entry_of_image):
        if not is_read[at]:
            whole[row].copy_(packed.source(at).decode(), non_blocking=True)  # type: ignore[arg-type]


def run_launches(
    program: Program, memory: torch.Tensor, target: torch.Tensor, places: np.ndarray | None = None
) -> None:
    """Launches the prologue of a batch, then as many stages as its longest image has.

    Args:
        program: the program of the batch; without launches where all images are finished tensors.
        memory: uint8 [bytes], from whose first byte places count; its first `workspace_bytes` are written to.
        target: [N, C, H, W], written to except for rows of finished tensors; everything runs on its device.
        places: int64 [sources, PLACE_COLUMNS], of the decoded images; default those in the program.
    """
    if not program.launches:
        return
    from torch_sink.triton_kernels.stages.prologue import PROLOGUE_BLOCK, run_prologue
    from torch_sink.triton_kernels.stages.stage import run_stage
    from torch_sink.triton_kernels.stages.statistics import STATISTICS_BLOCK, run_statistics

    device = target.device
    begin, (last, count, _) = program.arrays["places"][0], program.arrays["tables"]
    given = program.packed.blob.narrow(0, begin, last - begin + _INT32_BYTES * count).view(torch.int32)
    if places is not None:
        in_their_place = torch.from_numpy(places).view(torch.int32).flatten()
        given = torch.cat([in_their_place, given[len(in_their_place) :]])
    # The tables that the device makes follow those of the host and are never empty; then come the tiles.
    entries = count + program.made_entries + 1
    first_tile = -(-((last - begin) // _INT32_BYTES + entries) // _ALIGNED_VALUES) * _ALIGNED_VALUES
    values = torch.empty(first_tile + TILE_COLUMNS * program.launches[-1].end, dtype=torch.int32, device=device)
    transfer(given, values.narrow(0, 0, len(given)))

    def there(name: str, values_each: int = 1) -> torch.Tensor:
        first, count, columns = program.arrays[name]
        columns *= values_each
        return values.as_strided((count, columns), (columns, 1), (first - begin) // _INT32_BYTES)

    places_there, jobs = (there(name, 2).view(torch.int64) for name in ("places", "jobs"))
    operations, work, statistics = map(there, ("operations", "work", "statistics"))
    tables = values.narrow(0, (last - begin) // _INT32_BYTES, entries)
    tiles = values[first_tile:].view(-1, TILE_COLUMNS)
    # Triton launches on the current device, wherever the tensors are.
    with nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index):
        arrays, (block_y, block_x) = (work, places_there, jobs, tables, tiles), program.tile
        constants = {"BLOCK_Y": block_y, "BLOCK_X": block_x, "BLOCK": PROLOGUE_BLOCK}
        run_prologue(work.shape[:1], arrays, target.stride(), **constants)
        for launch in program.launches:
            if launch.statistics_begin < launch.statistics_end:
                measured = statistics[launch.statistics_begin : launch.statistics_end]
                arrays = memory, jobs, operations, tables, measured
                run_statistics(measured.shape[:1], arrays, BLOCK=STATISTICS_BLOCK)
            run_stage(
                memory, target, jobs, operations, tables, tiles[launch.begin : launch.end],
                is_heavy=launch.is_heavy, rows_and_columns=program.tile,
            )  # fmt: skip
