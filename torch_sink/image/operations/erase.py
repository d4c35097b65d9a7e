"""Erased boxes: one value a channel, or a value a pixel."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from torch_sink.image.core.arguments import fits_range
from torch_sink.image.core.atoms import Kind, Lowering, three
from torch_sink.image.core.examples import Arguments, Example, sample
from torch_sink.image.core.ops import Op, Stock, TensorArgument, record_maybe_in_place
from torch_sink.image.operations.functionals import functional, stock_of

_NO_BOX = 0, 0, 0, 0, (0.0,)


def _erase(family: str, handle: Any, i: int, j: int, h: int, w: int, v: Any, inplace: bool = False) -> Any:
    channels, height, width = handle.sink_shape
    if v is handle:
        # What `RandomErasing` asks for where it finds no box: nothing is erased.
        return handle if inplace else handle.record(Op(f"{family}.erase", _NO_BOX))
    if not isinstance(v, torch.Tensor) or v.ndim != 3 or v.device.type != "cpu":
        return NotImplemented
    is_inside = min(i, j) >= 0 and min(h, w) > 0 and i + h <= height and j + w <= width
    if not is_inside or (inplace and not handle.changes_in_place):
        return NotImplemented
    if v.shape == (channels, h, w) and v.numel() > channels:
        # Converted as the assignment in stock code does it; a copy, for the caller may go on to write to its own.
        pixels = TensorArgument(v.detach().to(handle.sink_dtype, copy=True))
        return record_maybe_in_place(handle, inplace, f"{family}.erase", (i, j, h, w, pixels))
    if v.shape[1:] != (1, 1) or len(v) not in (1, channels):
        return NotImplemented
    values = tuple(v.flatten().tolist())
    if handle.sink_dtype == torch.uint8 and not all(0 <= value < 256 for value in values):
        return NotImplemented
    return record_maybe_in_place(handle, inplace, f"{family}.erase", (i, j, h, w, values))


def _lower_erase(state: Lowering, top: int, left: int, height: int, width: int, written: Any) -> None:
    """ERASE: (left, top, right, bottom), and a fill.
    PASTE: (left, top, right, bottom, -, pixels of the box), and its pixels, three planes of float32.
    """
    box = left, top, left + width, top + height
    if isinstance(written, TensorArgument):
        planes = written.tensor.float().expand(3, -1, -1).contiguous()  # one channel stands for all
        state.add(Kind.PASTE, *box, 0, height * width, tables=(planes.view(torch.int32).numpy(),))
    else:
        state.add(Kind.ERASE, *box, fill=three(tuple(map(int, written)) if state.is_uint8 else written))


def _stock(function: Stock, image: Any, i: int, j: int, h: int, w: int, written: Any) -> Any:
    if isinstance(written, TensorArgument):
        return function(image, i, j, h, w, written.tensor)
    return function(image, i, j, h, w, torch.tensor(written, dtype=torch.float32, device="cpu").view(-1, 1, 1))


def _leaves_range(op: Op) -> bool:
    written = op.args[4]
    return not fits_range(written.tensor.flatten().tolist() if isinstance(written, TensorArgument) else written)


def _examples(a: Arguments) -> Iterator[Example]:
    (top, left), (height, width) = a.corner(), a.smaller
    color = torch.tensor(a.fill()).to(torch.uint8 if a.scale == 1 else torch.float32).reshape(-1, 1, 1)
    yield Example("erase", (top, left, height, width, color))
    yield Example("erase", (top, left, height, width, a.noise(height, width)), label="random values")


functional(
    "erase",
    _erase,
    _lower_erase,
    stock={place: functools.partial(_stock, function) for place, function in stock_of("erase").items()},
    examples=_examples,
    transforms={"RandomErasing": [sample(p=1.0), sample(p=1.0, value="random", label='value="random"')]},
    leaves_range=_leaves_range,
)
