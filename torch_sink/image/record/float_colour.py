"""Recording on float32 tensors: colour. How a recorder works is said in `tensor.py`.

Most kernels give stock code's very bits, a few differ in the last ones. An operation that could turn such a difference
into a large one (a threshold, a range of values stretched) is not recorded after them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch_sink.image.ops import Op
from torch_sink.image.record.arguments import is_number, permutation_of
from torch_sink.image.record.memory_order import lies_row_by_row
from torch_sink.image.record.value_range import fits_int32, is_exact, since_conversion, value_range
from torch_sink.image.sum_order import summing_threads

Recorder = Callable[..., Any]

# What a table of 256 values can stand for.
_BEFORE_A_TABLE = frozenset(
    f"{family}.{name}"
    for family in ("v1", "v2")
    for name in ("adjust_brightness", "invert", "solarize", "posterize", "adjust_gamma", "normalize", "hflip", "vflip",
                 "horizontal_flip", "vertical_flip", "crop", "erase", "convert_image_dtype", "to_dtype")
) | {"contiguous", "to_tensor", "pil_to_tensor", "to_image"}  # fmt: skip


# What the kernel can keep of a sum of gray values, in 64 bits.
_LARGEST_SUM = 2.0**34
# Of values so large the range may be infinite.
_LARGEST_COLOUR = 2.0**100


def _magnitude(handle: Any) -> float:
    """No value is further from 0."""
    return max(map(abs, value_range(handle)))


def _brightness(family: str, handle: Any, brightness_factor: Any) -> Any:
    if not is_number(brightness_factor) or brightness_factor < 0:
        return NotImplemented
    return handle.record(Op(f"{family}.adjust_brightness", (brightness_factor,)))


def _contrast(family: str, handle: Any, contrast_factor: Any) -> Any:
    if not is_number(contrast_factor) or contrast_factor < 0:
        return NotImplemented
    channels, height, width = handle.sink_shape
    if _magnitude(handle) * height * width > _LARGEST_SUM:
        return NotImplemented
    threads = summing_threads(height * width) if lies_row_by_row(handle.sink_ops, channels) else None
    return handle.record(Op(f"{family}.float_contrast", (contrast_factor, threads)))


def _sharpness(family: str, handle: Any, sharpness_factor: Any) -> Any:
    _, height, width = handle.sink_shape
    if not is_number(sharpness_factor) or sharpness_factor < 0:
        return NotImplemented
    if min(height, width) <= 2:
        return handle
    return handle.record(Op(f"{family}.adjust_sharpness", (sharpness_factor,)))


def _saturation(family: str, handle: Any, saturation_factor: Any) -> Any:
    if not is_number(saturation_factor) or saturation_factor < 0:
        return NotImplemented
    if handle.sink_shape[0] == 1:
        return handle
    return handle.record(Op(f"{family}.adjust_saturation", (saturation_factor,)))


def _hue(family: str, handle: Any, hue_factor: Any) -> Any:
    if not is_number(hue_factor) or not -0.5 <= hue_factor <= 0.5:
        return NotImplemented
    if handle.sink_shape[0] == 1:
        return handle
    if not is_exact(handle) or _magnitude(handle) > _LARGEST_COLOUR:
        return NotImplemented
    return handle.record(Op(f"{family}.adjust_hue", (hue_factor,)))


def _gamma(family: str, handle: Any, gamma: Any, gain: Any = 1) -> Any:
    if not is_number(gamma) or gamma < 0 or not is_number(gain):
        return NotImplemented
    # Below 0 only whole powers are numbers, and those less than 1 rise steeply above it.
    is_even = gamma >= 1 and (value_range(handle)[0] >= 0 or float(gamma).is_integer())
    from_table = all(op.name in _BEFORE_A_TABLE for op in since_conversion(handle))
    if not (is_even or from_table or is_exact(handle)):
        return NotImplemented
    return handle.record(Op(f"{family}.adjust_gamma", (gamma, gain)))


def _invert(family: str, handle: Any) -> Any:
    return handle.record(Op(f"{family}.invert"))


def _solarize(family: str, handle: Any, threshold: Any) -> Any:
    if not is_number(threshold) or threshold > 1 or not is_exact(handle):
        return NotImplemented
    return handle.record(Op(f"{family}.solarize", (threshold,)))


def _autocontrast(family: str, handle: Any) -> Any:
    return handle.record(Op(f"{family}.autocontrast")) if is_exact(handle) else NotImplemented


def _gray(family: str, handle: Any, num_output_channels: Any = 1) -> Any:
    channels, height, width = handle.sink_shape
    if type(num_output_channels) is not int or num_output_channels not in (1, 3):
        return NotImplemented
    # The kernel of v1 leaves an image of one channel as it is.
    made = channels if (family, channels) == ("v1", 1) else num_output_channels
    return handle.record(Op(f"{family}.rgb_to_grayscale", (num_output_channels,)), shape=(made, height, width))


def recorders(family: str) -> dict[str, Recorder]:
    """Those that both families have."""
    return {
        "adjust_brightness": functools.partial(_brightness, family),
        "adjust_contrast": functools.partial(_contrast, family),
        "adjust_sharpness": functools.partial(_sharpness, family),
        "adjust_saturation": functools.partial(_saturation, family),
        "adjust_hue": functools.partial(_hue, family),
        "adjust_gamma": functools.partial(_gamma, family),
        "invert": functools.partial(_invert, family),
        "solarize": functools.partial(_solarize, family),
        "autocontrast": functools.partial(_autocontrast, family),
        "rgb_to_grayscale": functools.partial(_gray, family),
    }


def posterize(handle: Any, bits: Any) -> Any:
    if type(bits) is not int or not 0 <= bits <= 8 or not is_exact(handle):
        return NotImplemented
    return handle.record(Op("v2.posterize", (bits,)))


def equalize(handle: Any) -> Any:
    if not is_exact(handle) or not fits_int32(handle):
        return NotImplemented
    return handle.record(Op("v2.equalize"))


def grayscale_to_rgb(handle: Any) -> Any:
    channels, height, width = handle.sink_shape
    return handle if channels == 3 else handle.record(Op("v2.grayscale_to_rgb"), shape=(3, height, width))


def permute_channels(handle: Any, permutation: Any) -> Any:
    order = permutation_of(permutation, handle.sink_shape[0])
    return NotImplemented if order is None else handle.record(Op("v2.permute_channels", (order,)))
