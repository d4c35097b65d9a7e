"""Erased boxes: one value a channel, or a value a pixel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms.v2 import functional as F_v2

from torch_sink.image.core.arguments import fits_range
from torch_sink.image.core.atoms import Kind, Lowering, three
from torch_sink.image.core.examples import Arguments, Example, sample
from torch_sink.image.core.ops import RECORDERS, WIDE_TYPES, Op, Operation, both, record_maybe_in_place
from torch_sink.image.core.tensor_argument import TensorArgument

_NO_BOX = 0, 0, 0, 0, (0.0,)


def _erase(family: str, handle: Any, i: int, j: int, h: int, w: int, v: Any, inplace: bool = False) -> Any:
    channels, height, width = handle.sink_shape
    if handle.sink_dtype in WIDE_TYPES:
        return NotImplemented
    if v is handle:
        # What `RandomErasing` asks for where it finds no box: nothing is erased.
        return handle if inplace else handle.record(Op(f"{family}.erase", _NO_BOX))
    if not isinstance(v, torch.Tensor) or v.ndim != 3 or v.device.type != "cpu":
        return NotImplemented
    if v.shape[1:] == (1, 1):
        # What a slice leaves of a box that reaches beyond the image.
        i, j = min(i, height), min(j, width)
        h, w = min(h, height - i), min(w, width - j)
    if min(i, j, h, w) < 0 or i + h > height or j + w > width:
        return NotImplemented
    if inplace and not handle.changes_in_place:
        return NotImplemented
    if v.shape != (channels, h, w) and v.shape[1:] != (1, 1) and _broadcasts(v.shape, (channels, h, w)):
        v = v.expand(channels, h, w)
    if v.shape == (channels, h, w) and v.numel() > channels:
        # Converted as the assignment in stock code does it; a copy, for the caller may go on to write to its own.
        pixels = TensorArgument(v.detach().to(handle.sink_dtype, copy=True))
        return record_maybe_in_place(handle, inplace, f"{family}.erase_pixels", (i, j, h, w, pixels))
    if not h * w and v.shape in ((channels, h, w), (channels, 1, 1), (1, 1, 1)):
        return handle if inplace else handle.record(Op(f"{family}.erase", _NO_BOX))
    if v.shape[1:] != (1, 1) or len(v) not in (1, channels):
        return NotImplemented
    values = tuple(v.flatten().tolist())
    if handle.sink_dtype == torch.uint8 and not all(0 <= value < 256 for value in values):
        values = tuple(v.flatten().to(torch.uint8).tolist())
    return record_maybe_in_place(handle, inplace, f"{family}.erase", (i, j, h, w, values))


def _broadcasts(shape: torch.Size, box: tuple[int, int, int]) -> bool:
    return all(side in (1, of_box) for side, of_box in zip(shape, box, strict=True))


def _assign_box(handle: Any, index: Any, value: Any) -> Any:
    """`image[:, top:bottom, left:right] = values`, as other libraries erase a box."""
    if type(value) is not torch.Tensor or type(index) is not tuple or len(index) != 3:
        return NotImplemented
    if index[0] not in (slice(None), Ellipsis):
        return NotImplemented
    if not all(type(part) is slice and part.step in (None, 1) for part in index[1:]):
        return NotImplemented
    (top, bottom, _), (left, right, _) = (
        part.indices(side) for part, side in zip(index[1:], handle.sink_shape[1:], strict=True)
    )
    if bottom <= top or right <= left:
        return NotImplemented
    return RECORDERS["v1.erase"](handle, top, left, bottom - top, right - left, value, inplace=True)


def _lower_erase(state: Lowering, top: int, left: int, height: int, width: int, value: tuple[float, ...]) -> None:
    """ERASE: (left, top, right, bottom), and a fill.

    Values that come before a table of values go through what the table holds, in stock code.
    """
    colors = three(tuple(map(int, value)) if state.is_uint8 else value)
    _note_erased(state, torch.tensor(colors, device="cpu").view(-1, 1, 1))
    state.add(Kind.ERASE, left, top, left + width, top + height, fill=colors)


def _lower_pixels(state: Lowering, top: int, left: int, height: int, width: int, pixels: TensorArgument) -> None:
    """PASTE: (left, top, right, bottom, -, pixels of the box), and its pixels, three planes of float32."""
    _note_erased(state, pixels.tensor)
    table = three_planes(pixels.tensor.float())
    state.add(Kind.PASTE, left, top, left + width, top + height, 0, height * width, tables=(table,))


def _note_erased(state: Lowering, values: torch.Tensor) -> None:
    """Notes a box that is added next to floats for which a table will stand, in an atom before the first such box."""
    if state.is_uint8 or state.is_float:
        return
    if not state.erased:
        state.add(Kind.VALUES)
    state.erased.append((len(state.atoms), len(state.value_ops), values))


def three_planes(pixels: torch.Tensor) -> np.ndarray:
    """float32 [C, H, W] as a table of bits; one channel stands for all."""
    return pixels.expand(3, -1, -1).contiguous().view(torch.int32).numpy()


def _with_value(function: Any, image: Any, i: int, j: int, h: int, w: int, value: tuple[float, ...]) -> Any:
    values = torch.tensor(value, dtype=torch.float32, device="cpu").view(-1, 1, 1)
    return function(image, i, j, h, w, values)


def _examples(a: Arguments) -> Iterator[Example]:
    (top, left), (height, width) = a.corner(), a.smaller
    color = torch.tensor(a.fill()).to(torch.uint8 if a.scale == 1 else torch.float32).reshape(-1, 1, 1)
    yield Example("erase", (top, left, height, width, color))
    yield Example("erase", (top, left, height, width, a.noise(height, width)), label="random values")


def _leaves_range(op: Op) -> bool:
    written = op.args[4]
    return not fits_range(written.tensor.flatten().tolist() if isinstance(written, TensorArgument) else written)


Operation(
    "erase",
    stock={
        "v1.erase": lambda image, *args: _with_value(F_tensor.erase, image, *args),
        "v2.erase": lambda image, *args: _with_value(F_v2.erase_image, image, *args),
        "v1.erase_pixels": lambda image, i, j, h, w, pixels: F_tensor.erase(image, i, j, h, w, pixels.tensor),
        "v2.erase_pixels": lambda image, i, j, h, w, pixels: F_v2.erase_image(image, i, j, h, w, pixels.tensor),
    },
    record={**both("erase", _erase), torch.Tensor.__setitem__: _assign_box},
    lower={**both("erase", _lower_erase), **both("erase_pixels", _lower_pixels)},
    examples=_examples,
    transforms={"RandomErasing": [sample(p=1.0), sample(p=1.0, value="random", label='value="random"')]},
    is_tabled=lambda op: True,
    leaves_range=_leaves_range,
)
