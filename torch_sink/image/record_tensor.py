"""Stand-ins that record: functionals on tensors; `family` is "v1" or "v2", whose kernels differ.

Each takes the arguments of the stock function it stands in for. On anything that cannot be recorded it calls the
stock function, which then finds an ordinary image, raises its own errors, or makes the handle's pixels itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torchvision.transforms import functional as F
from torchvision.transforms.v2.functional._geometry import _check_interpolation, _compute_resized_output_size

from torch_sink.image.fallback import executing, report_fallback
from torch_sink.image.lazy_tensor import HANDLES, LazyTVImage
from torch_sink.image.lower_geometry import integer_resize_fits
from torch_sink.image.ops import Op
from torch_sink.image.record_arguments import colour_of, is_number, padding_fits, sides_of

Recorder = Callable[..., Any]


def _statistics(values: Any, channels: int) -> tuple[float, ...] | None:
    """mean or std as a tuple of floats, or None where stock code should look at it."""
    if isinstance(values, torch.Tensor) and values.ndim == 1:
        values = values.tolist()
    if isinstance(values, (list, tuple)) and len(values) in (1, channels) and all(map(is_number, values)):
        return tuple(values)
    return None


# Less may be zero in the image's dtype, which stock code refuses.
_SMALLEST_STD = 1e-6


def _normalize(family: str, handle: Any, mean: Any, std: Any, inplace: bool = False) -> Any:
    channels = handle.sink_shape[0]
    mean, std = _statistics(mean, channels), _statistics(std, channels)
    if mean is None or std is None or not handle.sink_dtype.is_floating_point:
        return NotImplemented
    if min(map(abs, std)) < _SMALLEST_STD:
        return NotImplemented
    result = handle.record(Op(f"{family}.normalize", (mean, std)))
    return handle.become(result) if inplace else result


def _convert_dtype(handle: Any, dtype: torch.dtype = torch.float32) -> Any:
    return _to_dtype(handle, dtype, Op("v1.convert_image_dtype", (dtype,)))


def _to_dtype_v2(handle: Any, dtype: torch.dtype = torch.float32, scale: bool = False) -> Any:
    return _to_dtype(handle, dtype, Op("v2.to_dtype", (dtype, scale)))


def _to_dtype(handle: Any, dtype: torch.dtype, op: Op) -> Any:
    if handle.sink_dtype == dtype:
        return handle
    if handle.sink_dtype != torch.uint8 or dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return NotImplemented
    return handle.record(op, dtype=dtype)


def _crop(family: str, handle: Any, top: int, left: int, height: int, width: int) -> Any:
    channels, old_height, old_width = handle.sink_shape
    if not all(isinstance(value, int) for value in (top, left, height, width)):
        return NotImplemented
    inside = top >= 0 and left >= 0 and top + height <= old_height and left + width <= old_width
    if height <= 0 or width <= 0 or not (inside or handle.sink_dtype == torch.uint8):
        return NotImplemented
    return handle.record(Op(f"{family}.crop", (top, left, height, width)), shape=(channels, height, width))


def _pad(family: str, handle: Any, padding: Any, fill: Any = None, padding_mode: str = "constant") -> Any:
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


def _flip(name: str, handle: Any) -> Any:
    return handle.record(Op(name))


def _resize_v2(
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


def _center_crop(handle: Any, output_size: Any) -> Any:
    sides = (output_size,) if isinstance(output_size, int) else output_size
    if not isinstance(sides, (list, tuple)) or len(sides) not in (1, 2) or not all(map(is_number, sides)):
        return NotImplemented
    crop_height, crop_width = sides[0], sides[-1]
    _, height, width = handle.sink_shape
    if crop_height > height or crop_width > width:
        return NotImplemented
    top, left = round((height - crop_height) / 2.0), round((width - crop_width) / 2.0)
    return _crop("v2", handle, int(top), int(left), crop_height, crop_width)


def _resized_crop(
    handle: Any, top: int, left: int, height: int, width: int, size: Any,
    interpolation: Any = F.InterpolationMode.BILINEAR, antialias: bool | None = True,
) -> Any:  # fmt: skip
    cropped = _crop("v2", handle, top, left, height, width)
    if cropped is NotImplemented:
        return cropped
    return _resize_v2(cropped, size, interpolation, None, antialias)


_BYTES = range(256)


def _erase(family: str, handle: Any, i: int, j: int, h: int, w: int, v: Any, inplace: bool = False) -> Any:
    channels, height, width = handle.sink_shape
    if not isinstance(v, torch.Tensor) or v.numel() not in (1, channels) or v.ndim != 3 or v.shape[1:] != (1, 1):
        return NotImplemented
    values = tuple(v.flatten().tolist())
    inside = min(i, j) >= 0 and min(h, w) > 0 and i + h <= height and j + w <= width
    if not inside or (handle.sink_dtype == torch.uint8 and not all(value in _BYTES for value in values)):
        return NotImplemented
    result = handle.record(Op(f"{family}.erase", (i, j, h, w, values)))
    return handle.become(result) if inplace else result


def _colour_recorders(family: str) -> dict[str, Recorder]:
    """Colour operations whose result on uint8 tensors is, value for value, that on a Pillow image."""

    def recorder(name: str, accepts: Callable[..., bool]) -> Recorder:
        def record(handle: Any, *args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            if handle.sink_dtype != torch.uint8 or not accepts(*values):
                return NotImplemented
            return handle.record(Op(f"{family}.{name}", values))

        return record

    return {
        "adjust_brightness": recorder("adjust_brightness", lambda factor: is_number(factor) and factor >= 0),
        "invert": recorder("invert", lambda: True),
        "posterize": recorder("posterize", lambda bits: type(bits) is int and 1 <= bits <= 8),
        "solarize": recorder("solarize", lambda threshold: is_number(threshold) and threshold <= 255),
        "equalize": recorder("equalize", lambda: True),
    }


def _as_pure(recorder: Recorder) -> Recorder:
    """For kernels that compute: what the kernels of v1 compute from a `tv_tensors.Image` is a pure tensor."""

    def record(handle: Any, *args: Any, **kwargs: Any) -> Any:
        result = recorder(handle, *args, **kwargs)
        computed = type(result) is LazyTVImage and result is not handle
        return result.as_subclass(torch.Tensor) if computed else result

    return record


_V1_COMPUTING: dict[str, Recorder] = {
    "normalize": functools.partial(_normalize, "v1"),
    "convert_image_dtype": _convert_dtype,
    "hflip": functools.partial(_flip, "v1.hflip"),
    "vflip": functools.partial(_flip, "v1.vflip"),
    "crop": functools.partial(_crop, "v1"),
    "pad": functools.partial(_pad, "v1"),
    **_colour_recorders("v1"),
}

V1_TENSOR_RECORDERS: dict[str, Recorder] = {
    **{name: _as_pure(recorder) for name, recorder in _V1_COMPUTING.items()},
    "erase": functools.partial(_erase, "v1"),
}

V2_TENSOR_RECORDERS: dict[str, Recorder] = {
    "normalize": functools.partial(_normalize, "v2"),
    "to_dtype": _to_dtype_v2,
    "horizontal_flip": functools.partial(_flip, "v2.horizontal_flip"),
    "vertical_flip": functools.partial(_flip, "v2.vertical_flip"),
    "crop": functools.partial(_crop, "v2"),
    "center_crop": _center_crop,
    "pad": functools.partial(_pad, "v2"),
    "erase": functools.partial(_erase, "v2"),
    **_colour_recorders("v2"),
    "resize": _resize_v2,
    "resized_crop": _resized_crop,
    "get_dimensions": lambda handle: list(handle.sink_shape),
    "get_num_channels": lambda handle: handle.sink_shape[0],
    "get_size": lambda handle: list(handle.sink_shape[1:]),
}


def on_tensor(name: str, recorder: Recorder | None) -> Callable[[Recorder], Recorder]:
    """A stand-in for a tensor functional or kernel: records on handles, and never hands one to stock code."""

    def make(stock: Recorder) -> Recorder:
        @functools.wraps(stock)
        def stand_in(image: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(image, HANDLES):
                if image.is_recording:
                    if recorder is not None:
                        result = recorder(image, *args, **kwargs)
                        if result is not NotImplemented:
                            return result
                    report_fallback(name, f"no kernel for {image.sink_dtype} tensors with these arguments")
                with executing():
                    image = image.materialise()
            return stock(image, *args, **kwargs)

        return stand_in

    return make
