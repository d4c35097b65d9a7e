"""Runs the programs of a batch, pass by pass: decoded pixels -> the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torch_sink.errors import DecodeError
from torch_sink.image.core.atoms import Program
from torch_sink.image.core.ops import Op
from torch_sink.image.core.transfer import to_device
from torch_sink.image.decode.providers import decode_sources, launch_packed
from torch_sink.image.execute.launch import run_on_device
from torch_sink.image.execute.packed import Packed
from torch_sink.image.execute.programs import earlier_passes, is_wide, last_passes, values_of
from torch_sink.image.sources.decoded import Box, Decoded
from torch_sink.image.sources.source import FinishedSource, Source


def decoded_images(
    packed: Packed, sources: Sequence[Source], device: torch.device, boxes: Sequence[Box | None]
) -> list[Decoded | DecodeError | FinishedSource]:
    """Pixels of every source that is not a finished tensor: those of its box, where there is one, or all of them.

    Args:
        packed: a batch.
        sources: its sources.
        device: where the pixels are wanted.
        boxes: the part of each that is read.
    """
    results: list[Any] = [source if isinstance(source, FinishedSource) else None for source in sources]
    in_kernels, wanted = packed.jpegs.sources.tolist(), packed.jpegs.whole_images()
    for row, at in enumerate(in_kernels):
        wanted[row] = boxes[at] or wanted[row]
    launched = launch_packed(packed.jpegs, wanted, packed.blob, device)
    if launched is not None:
        for at, pixels in zip(in_kernels, launched.images(), strict=True):
            results[at] = pixels
    others = [at for at, result in enumerate(results) if result is None]
    images = decode_sources([sources[at] for at in others], device, boxes=[boxes[at] for at in others])  # type: ignore[misc]
    if launched is not None:
        damaged = [in_kernels[row] for row in launched.damaged()]
        images += decode_sources([sources[at] for at in damaged], device, "pillow")  # type: ignore[misc]
        others += damaged
    for at, image in zip(others, images, strict=True):
        results[at] = image
    return results


def run_programs(
    decoded: Sequence[Decoded], programs: Sequence[tuple[Program, ...]], rows: Sequence[int], out: torch.Tensor
) -> None:
    """Runs the programs of a batch, pass by pass.

    Args:
        decoded: pixels of each image; the same object may stand for several.
        programs: what each image goes through, as `programs_of` gives them.
        rows: position of each image in the batch.
        out: [N, C, H, W], written to; its device is where everything runs.
    """
    images = list(decoded)
    for group in earlier_passes(programs):
        first = group[0][1]
        made = torch.empty((len(group), first.out_channels, *first.size), dtype=torch.uint8, device=out.device)
        run_on_device([images[at] for at, _ in group], [program for _, program in group], range(len(group)), made)
        for row, (at, _) in enumerate(group):
            images[at] = Decoded(made[row], channels_last=False)
    for together in last_passes(programs):
        last = [programs[at][-1] for at in together]
        run = _run_in_wide_type if is_wide(last[0]) else run_on_device
        run([images[at] for at in together], last, [rows[at] for at in together], out)


def _run_in_wide_type(
    decoded: Sequence[Decoded], programs: Sequence[Program], rows: Sequence[int], out: torch.Tensor
) -> None:
    """As `run_on_device`: makes bytes, then looks up their values, one lookup for each chain of calls on values."""
    made = torch.empty((len(rows), *out.shape[1:]), dtype=torch.uint8, device=out.device)
    of_bytes = [program._replace(value_ops=(Op("pil_to_tensor"),)) for program in programs]
    run_on_device(decoded, of_bytes, range(len(rows)), made)
    channel = torch.arange(out.shape[1], device=out.device).view(1, -1, 1, 1)
    for chain in {(program.value_channels, program.value_ops) for program in programs}:
        same = [at for at, program in enumerate(programs) if (program.value_channels, program.value_ops) == chain]
        values = to_device(values_of(programs[same[0]]), out.device)
        places = to_device(np.array([rows[at] for at in same]), out.device)
        out[places] = values[channel, made[to_device(np.array(same), out.device)].long()].to(out.dtype)
