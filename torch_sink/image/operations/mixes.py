"""Erased boxes, with one value a channel or one a pixel; and mixed images: MixUp and CutMix."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_sink.image.core.arguments import fits_range, has_minus_zero, is_constant
from torch_sink.image.core.lowering import LoweredImage, three
from torch_sink.image.core.ops import Op, Operation, Stock, TensorArgument
from torch_sink.image.core.recording import Recording, record_maybe_in_place
from torch_sink.image.operations.functionals import functional, stock_of
from torch_sink.triton_kernels.rows import Kind

# --- erased boxes

_NO_BOX = 0, 0, 0, 0, (0.0,)


def _erase(family: str, image: Recording, i: int, j: int, h: int, w: int, v: Any, inplace: bool = False) -> Any:
    channels, height, width = image.shape
    if getattr(v, "lazy_recording", None) is image and (i, j, h, w) == (0, 0, height, width):
        # What `RandomErasing` asks for where it finds no box: nothing is erased.
        return image if inplace else image.record(Op(f"{family}.erase", _NO_BOX))
    if not is_constant(v) or v.ndim != 3:
        return NotImplemented
    is_inside = min(i, j) >= 0 and min(h, w) > 0 and i + h <= height and j + w <= width
    if not is_inside:
        return NotImplemented
    if v.shape == (channels, h, w) and v.numel() > channels:
        # Converted as the assignment in stock code does it; a copy, for the caller may go on to write to its own.
        pixels = TensorArgument(v.to(image.dtype, copy=True))
        return record_maybe_in_place(image, inplace, f"{family}.erase", (i, j, h, w, pixels))
    if v.shape[1:] != (1, 1) or len(v) not in (1, channels):
        return NotImplemented
    values = tuple(v.flatten().tolist())
    if has_minus_zero(values) or (image.dtype == torch.uint8 and not all(0 <= value < 256 for value in values)):
        return NotImplemented
    return record_maybe_in_place(image, inplace, f"{family}.erase", (i, j, h, w, values))


def _lower_erase(lowered: LoweredImage, top: int, left: int, height: int, width: int, written: Any) -> None:
    """ERASE: (left, top, right, bottom), and a fill.
    PASTE: (left, top, right, bottom, -, pixels of the box), and its pixels, three planes of float32.
    """
    box = left, top, left + width, top + height
    if isinstance(written, TensorArgument):
        planes = written.tensor.float().expand(3, -1, -1).contiguous()  # one channel stands for all
        lowered.add(Kind.PASTE, *box, 0, height * width, tables=(planes.view(torch.int32).numpy(),))
    else:
        lowered.add(Kind.ERASE, *box, fill=three(tuple(map(int, written)) if lowered.is_uint8 else written))


def _stock(function: Stock, image: Recording, i: int, j: int, h: int, w: int, written: Any) -> Any:
    if isinstance(written, TensorArgument):
        return function(image, i, j, h, w, written.tensor)
    return function(image, i, j, h, w, torch.tensor(written, dtype=torch.float32, device="cpu").view(-1, 1, 1))


def _leaves_range(op: Op) -> bool:
    written = op.args[4]
    return not fits_range(written.tensor.flatten().tolist() if isinstance(written, TensorArgument) else written)


functional(
    "erase",
    _erase,
    _lower_erase,
    stock={name: functools.partial(_stock, function) for name, function in stock_of("erase").items()},
    leaves_range=_leaves_range,
)

# --- whole batches


def _mix_up(batch: Any, params: dict[str, Any]) -> Any:
    return batch.record_mix(Op("batch.mix_up", (params["lam"],))) if batch.dtype.is_floating_point else NotImplemented


Operation(
    "MixUp",
    # Each image with the one before it, in the proportion lam : 1 - lam.
    stock={"batch.mix_up": lambda batch, lam: batch.roll(1, 0).mul_(1.0 - lam).add_(batch.mul(lam))},
    record={"MixUp.transform": _mix_up},
)


def _cut_mix(batch: torch.Tensor, box: tuple[int, int, int, int]) -> torch.Tensor:
    """`v2.CutMix`: a box (left, top, right, bottom) of each image comes from the one before it."""
    left, top, right, bottom = box
    mixed = batch.clone()
    mixed[..., top:bottom, left:right] = batch.roll(1, 0)[..., top:bottom, left:right]
    return mixed


Operation(
    "CutMix",
    stock={"batch.cut_mix": _cut_mix},
    record={"CutMix.transform": lambda batch, params: batch.record_mix(Op("batch.cut_mix", (params["box"],)))},
)
