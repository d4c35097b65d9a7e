"""Recording on tensors: crops, pads, flips, resizing, erasing. How a recorder works is said in `record_tensor.py`."""

from __future__ import annotations

from typing import Any

import torch
from torchvision.transforms import functional as F
from torchvision.transforms.v2.functional._geometry import _check_interpolation, _compute_resized_output_size

from torch_sink.image.lower_geometry import integer_resize_fits
from torch_sink.image.ops import Op
from torch_sink.image.record_arguments import colour_of, is_number, padding_fits, sides_of


def crop(family: str, handle: Any, top: int, left: int, height: int, width: int) -> Any:
    channels, old_height, old_width = handle.sink_shape
    if not all(isinstance(value, int) for value in (top, left, height, width)):
        return NotImplemented
    inside = top >= 0 and left >= 0 and top + height <= old_height and left + width <= old_width
    if height <= 0 or width <= 0 or not (inside or handle.sink_dtype == torch.uint8):
        return NotImplemented
    return handle.record(Op(f"{family}.crop", (top, left, height, width)), shape=(channels, height, width))


def pad(family: str, handle: Any, padding: Any, fill: Any = None, padding_mode: str = "constant") -> Any:
    channels, height, width = handle.sink_shape
    sides = sides_of(padding)
    colour = colour_of(fill, channels)
    if sides is None or colour is None or not padding_fits(sides, padding_mode, height, width):
        return NotImplemented
    if family == "v1" and isinstance(fill, (list, tuple)):
        return NotImplemented
    colours = colour if isinstance(colour, tuple) else (colour,)
    if padding_mode == "constant" and (
        handle.sink_dtype != torch.uint8 or len(set(colours)) != 1 or not 0 <= colours[0] <= 255
    ):
        return NotImplemented
    left, top, right, bottom = sides
    op = Op(f"{family}.pad", ([left, top, right, bottom], colours[0], padding_mode))
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
    if not antialias or handle.sink_dtype != torch.uint8 or not integer_resize_fits(mode):
        return NotImplemented
    op = Op("v2.resize", ((new_height, new_width), mode))
    return handle.record(op, shape=(channels, new_height, new_width))


def _resized(height: int, width: int, size: Any, max_size: Any) -> tuple[int, int]:
    new_height, new_width = _compute_resized_output_size((height, width), size=size, max_size=max_size)
    return new_height, new_width


def center_crop(handle: Any, output_size: Any) -> Any:
    sides = (output_size,) if isinstance(output_size, int) else output_size
    if not isinstance(sides, (list, tuple)) or len(sides) not in (1, 2) or not all(map(is_number, sides)):
        return NotImplemented
    crop_height, crop_width = sides[0], sides[-1]
    _, height, width = handle.sink_shape
    if crop_height > height or crop_width > width:
        return NotImplemented
    top, left = round((height - crop_height) / 2.0), round((width - crop_width) / 2.0)
    return crop("v2", handle, int(top), int(left), crop_height, crop_width)


def resized_crop(
    handle: Any, top: int, left: int, height: int, width: int, size: Any,
    interpolation: Any = F.InterpolationMode.BILINEAR, antialias: bool | None = True,
) -> Any:  # fmt: skip
    cropped = crop("v2", handle, top, left, height, width)
    if cropped is NotImplemented:
        return cropped
    return resize_v2(cropped, size, interpolation, None, antialias)


_BYTES = range(256)


def erase(family: str, handle: Any, i: int, j: int, h: int, w: int, v: Any, inplace: bool = False) -> Any:
    channels, height, width = handle.sink_shape
    if not isinstance(v, torch.Tensor) or v.numel() not in (1, channels) or v.ndim != 3 or v.shape[1:] != (1, 1):
        return NotImplemented
    values = tuple(v.flatten().tolist())
    inside = min(i, j) >= 0 and min(h, w) > 0 and i + h <= height and j + w <= width
    if not inside or (handle.sink_dtype == torch.uint8 and not all(value in _BYTES for value in values)):
        return NotImplemented
    result = handle.record(Op(f"{family}.erase", (i, j, h, w, values)))
    return handle.become(result) if inplace else result
