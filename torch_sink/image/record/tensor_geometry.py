"""Recording on tensors: crops, pads, flips, resizing, erasing. How a recorder works is said in `tensor.py`."""

from __future__ import annotations

from typing import Any

import torch
from torchvision.transforms import functional as F
from torchvision.transforms.v2.functional._geometry import (
    _center_crop_compute_crop_anchor,
    _center_crop_compute_padding,
    _check_interpolation,
    _compute_resized_output_size,
)

from torch_sink.image.core.arguments import color_of, crop_fits, padding_fits, sides_of, size_of
from torch_sink.image.core.ops import WIDE_TYPES, Op
from torch_sink.image.core.tensor_argument import TensorArgument
from torch_sink.image.handles.shared_memory import share_memory
from torch_sink.image.handles.tensor import HANDLES, recorded
from torch_sink.image.lower.geometry import NEAREST_MODES, integer_resize_fits
from torch_sink.image.record.tensor_values import changes_in_place, record_maybe_in_place


def crop(family: str, handle: Any, top: int, left: int, height: int, width: int) -> Any:
    channels, old_height, old_width = handle.sink_shape
    if not all(isinstance(value, int) for value in (top, left, height, width)):
        return NotImplemented
    inside = top >= 0 and left >= 0 and top + height <= old_height and left + width <= old_width
    if not crop_fits(top, left, height, width) or not (inside or handle.sink_dtype == torch.uint8):
        return NotImplemented
    cropped = handle.record(Op(f"{family}.crop", (top, left, height, width)), shape=(channels, height, width))
    return share_memory(handle, cropped) if inside else cropped


def pad(family: str, handle: Any, padding: Any, fill: Any = None, padding_mode: str = "constant") -> Any:
    channels, height, width = handle.sink_shape
    sides = sides_of(padding)
    color = color_of(fill, channels)
    if sides is None or color is None or not padding_fits(sides, padding_mode, height, width):
        return NotImplemented
    a_fill_a_channel = isinstance(fill, (list, tuple)) and len(fill) > 1
    if (family == "v1" and isinstance(fill, (list, tuple))) or (a_fill_a_channel and padding_mode != "constant"):
        return NotImplemented
    colors = color if isinstance(color, tuple) else (color,)
    if padding_mode == "constant" and (handle.sink_dtype != torch.uint8 or min(colors) < 0 or max(colors) > 255):
        return NotImplemented
    left, top, right, bottom = sides
    op = Op(f"{family}.pad", ([left, top, right, bottom], colors if a_fill_a_channel else colors[0], padding_mode))
    return handle.record(op, shape=(channels, height + top + bottom, width + left + right))


def flip(name: str, handle: Any) -> Any:
    return handle.record(Op(name))


def resize_v2(
    handle: Any, size: Any, interpolation: Any = F.InterpolationMode.BILINEAR, max_size: Any = None,
    antialias: bool | None = True,
) -> Any:  # fmt: skip
    channels, height, width = handle.sink_shape
    new_height, new_width = _resized(height, width, size, max_size)
    if (new_height, new_width) == (height, width):
        return handle
    if not all(type(side) is int and side > 0 for side in (new_height, new_width)):
        return NotImplemented
    mode = F.InterpolationMode(_check_interpolation(interpolation))
    if handle.sink_dtype != torch.uint8 or not (mode in NEAREST_MODES or integer_resize_fits(mode)):
        return NotImplemented
    if mode == F.InterpolationMode.LANCZOS and not antialias:
        return NotImplemented
    if antialias and (new_height, new_width) == (1, 1) and channels == 3:
        return NotImplemented  # which torch refuses, or not, by how pixels lie in memory
    op = Op("v2.resize", ((new_height, new_width), mode, bool(antialias)))
    return handle.record(op, shape=(channels, new_height, new_width))


def resize_v1(handle: Any, size: Any, interpolation: Any = "bilinear", antialias: Any = True) -> Any:
    if handle.sink_dtype != torch.uint8 or not isinstance(size, (list, tuple)) or len(size) != 2:
        return NotImplemented
    if not all(type(side) is int and side > 0 for side in size):
        return NotImplemented
    try:
        mode = F.InterpolationMode(interpolation)
    except ValueError:
        return NotImplemented
    if mode not in (*NEAREST_MODES, F.InterpolationMode.BILINEAR, F.InterpolationMode.BICUBIC):
        return NotImplemented
    if antialias and size[1] == 1 and mode not in NEAREST_MODES:
        return NotImplemented  # to one column, torch's result depends on how pixels lie in memory
    op = Op("v1.resize", (tuple(size), mode, bool(antialias)))
    return handle.record(op, shape=(handle.sink_shape[0], *size))


def _resized(height: int, width: int, size: Any, max_size: Any) -> tuple[int, int]:
    new_height, new_width = _compute_resized_output_size((height, width), size=size, max_size=max_size)
    return new_height, new_width


def center_crop(handle: Any, output_size: Any) -> Any:
    size = size_of(output_size)
    if size is None:
        return NotImplemented
    _, height, width = handle.sink_shape
    if size[0] > height or size[1] > width:
        handle = pad("v2", handle, _center_crop_compute_padding(*size, height, width))
        if handle is NotImplemented or handle.sink_shape[1:] == size:
            return handle
        _, height, width = handle.sink_shape
    top, left = _center_crop_compute_crop_anchor(*size, height, width)
    return crop("v2", handle, top, left, *size)


def five_crop(handle: Any, size: Any) -> Any:
    sides = size_of(size)
    if sides is None or sides[0] > handle.sink_shape[1] or sides[1] > handle.sink_shape[2]:
        return NotImplemented
    below, right = handle.sink_shape[1] - sides[0], handle.sink_shape[2] - sides[1]
    corners = (0, 0), (0, right), (below, 0), (below, right)
    return *(crop("v2", handle, top, left, *sides) for top, left in corners), center_crop(handle, size)


def ten_crop(handle: Any, size: Any, vertical_flip: bool = False) -> Any:
    crops = five_crop(handle, size)
    if crops is NotImplemented:
        return crops
    return crops + five_crop(flip("v2.vertical_flip" if vertical_flip else "v2.horizontal_flip", handle), size)


def resized_crop(
    handle: Any, top: int, left: int, height: int, width: int, size: Any,
    interpolation: Any = F.InterpolationMode.BILINEAR, antialias: bool | None = True,
) -> Any:  # fmt: skip
    cropped = crop("v2", handle, top, left, height, width)
    if cropped is NotImplemented:
        return cropped
    return resize_v2(cropped, size, interpolation, None, antialias)


_NO_BOX = 0, 0, 0, 0, (0.0,)


def erase(family: str, handle: Any, i: int, j: int, h: int, w: int, v: Any, inplace: bool = False) -> Any:
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
    if inplace and not changes_in_place(handle):
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


@recorded(torch.Tensor.__setitem__)
def _assign_box(handle: Any, index: Any, value: Any) -> Any:
    """`image[:, top:bottom, left:right] = values`, as other libraries erase a box."""
    if not isinstance(handle, HANDLES) or not handle.is_recording or type(value) is not torch.Tensor:
        return NotImplemented
    if type(index) is not tuple or index[0] not in (slice(None), Ellipsis) or len(index) != 3:
        return NotImplemented
    if not all(type(part) is slice and part.step in (None, 1) for part in index[1:]):
        return NotImplemented
    (top, bottom, _), (left, right, _) = (
        part.indices(side) for part, side in zip(index[1:], handle.sink_shape[1:], strict=True)
    )
    if bottom <= top or right <= left:
        return NotImplemented
    erased = erase("v1", handle, top, left, bottom - top, right - left, value, inplace=True)
    return NotImplemented if erased is NotImplemented else None
