"""Recording on float32 tensors: crops, pads, resizing. How a recorder works is said in `tensor.py`."""

from __future__ import annotations

from typing import Any

from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional._geometry import (
    _center_crop_compute_crop_anchor,
    _center_crop_compute_padding,
    _check_interpolation,
    _compute_resized_output_size,
)

from torch_sink.image.core.arguments import crop_fits, is_number, padding_fits, sides_of, size_of
from torch_sink.image.core.ops import Op
from torch_sink.image.handles.shared_memory import share_memory
from torch_sink.image.lower.geometry import NEAREST_MODES


def crop(family: str, handle: Any, top: Any, left: Any, height: Any, width: Any) -> Any:
    channels, old_height, old_width = handle.sink_shape
    if not all(type(value) is int for value in (top, left, height, width)):
        return NotImplemented
    inside = top >= 0 and left >= 0 and top + height <= old_height and left + width <= old_width
    if not crop_fits(top, left, height, width):
        return NotImplemented
    op = Op(f"{family}.crop" if inside else f"{family}.crop_beyond", (top, left, height, width))
    cropped = handle.record(op, shape=(channels, height, width))
    return share_memory(handle, cropped) if inside else cropped


def _fill_of(family: str, fill: Any, channels: int) -> tuple[float, ...] | None:
    """A fill as one value, or one a channel; None where stock code should look at it."""
    if fill is None:
        return (0.0,)
    if is_number(fill):
        return (fill,)
    if family == "v1" or not isinstance(fill, (list, tuple)) or not all(map(is_number, fill)):
        return None
    return tuple(fill) if len(fill) in (1, channels) else None


def pad(family: str, handle: Any, padding: Any, fill: Any = None, padding_mode: Any = "constant") -> Any:
    channels, height, width = handle.sink_shape
    sides, fills = sides_of(padding), _fill_of(family, fill, channels)
    if sides is None or fills is None or not padding_fits(sides, padding_mode, height, width):
        return NotImplemented
    if padding_mode != "constant" and len(fills) > 1:
        return NotImplemented
    left, top, right, bottom = sides
    op = Op(f"{family}.pad", ([left, top, right, bottom], fills[0] if len(fills) == 1 else fills, padding_mode))
    return handle.record(op, shape=(channels, height + top + bottom, width + left + right))


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


def _resize(family: str, handle: Any, height: Any, width: Any, mode: InterpolationMode, antialias: bool) -> Any:
    channels, old_height, old_width = handle.sink_shape
    if not all(type(side) is int and side > 0 for side in (height, width)):
        return NotImplemented
    if (height, width) == (old_height, old_width):
        return handle
    if mode not in (*NEAREST_MODES, InterpolationMode.BILINEAR, InterpolationMode.BICUBIC):
        return NotImplemented
    if antialias and width == 1 and mode not in NEAREST_MODES:
        return NotImplemented  # to one column, torch's result depends on how pixels lie in memory
    op = Op(f"{family}.float_resize", ((height, width), mode, antialias))
    return handle.record(op, shape=(channels, height, width))


def resize_v1(handle: Any, size: Any, interpolation: Any = "bilinear", antialias: Any = True) -> Any:
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        return NotImplemented
    try:
        mode = InterpolationMode(interpolation)
    except ValueError:
        return NotImplemented
    return _resize("v1", handle, size[0], size[1], mode, bool(antialias))


def resize_v2(
    handle: Any, size: Any, interpolation: Any = InterpolationMode.BILINEAR, max_size: Any = None,
    antialias: bool | None = True,
) -> Any:  # fmt: skip
    _, height, width = handle.sink_shape
    new_height, new_width = _compute_resized_output_size((height, width), size=size, max_size=max_size)
    return _resize("v2", handle, new_height, new_width, _check_interpolation(interpolation), bool(antialias))


def resized_crop(
    handle: Any, top: Any, left: Any, height: Any, width: Any, size: Any,
    interpolation: Any = InterpolationMode.BILINEAR, antialias: bool | None = True,
) -> Any:  # fmt: skip
    cropped = crop("v2", handle, top, left, height, width)
    if cropped is NotImplemented:
        return cropped
    return resize_v2(cropped, size, interpolation, None, antialias)
