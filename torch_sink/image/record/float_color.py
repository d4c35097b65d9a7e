"""Recording on float32 tensors: color. How a recorder works is said in `tensor.py`.

Thresholds, stretched ranges and gammas fall back to stock torchvision: they would turn a difference in the last bits
into a large one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch_sink.image.core.arguments import is_number, permutation_of
from torch_sink.image.core.exactness import is_normalized, may_overshoot
from torch_sink.image.core.ops import Op

Recorder = Callable[..., Any]


def _brightness(family: str, handle: Any, brightness_factor: Any) -> Any:
    if not is_number(brightness_factor) or brightness_factor < 0:
        return NotImplemented
    return handle.record(Op(f"{family}.adjust_brightness", (brightness_factor,)))


def _contrast(family: str, handle: Any, contrast_factor: Any) -> Any:
    if not is_number(contrast_factor) or contrast_factor < 0:
        return NotImplemented
    if is_normalized(handle):
        return NotImplemented  # the kernel adds gray values up as whole numbers
    return handle.record(Op(f"{family}.float_contrast", (contrast_factor,)))


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
    if is_normalized(handle) or may_overshoot(handle):
        return NotImplemented  # stock code makes NaN of some values below 0
    return handle.record(Op(f"{family}.adjust_hue", (hue_factor,)))


def _invert(family: str, handle: Any) -> Any:
    return handle.record(Op(f"{family}.invert"))


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
        "invert": functools.partial(_invert, family),
        "rgb_to_grayscale": functools.partial(_gray, family),
    }


def grayscale_to_rgb(handle: Any) -> Any:
    channels, height, width = handle.sink_shape
    return handle if channels == 3 else handle.record(Op("v2.grayscale_to_rgb"), shape=(3, height, width))


def permute_channels(handle: Any, permutation: Any) -> Any:
    order = permutation_of(permutation, handle.sink_shape[0])
    return NotImplemented if order is None else handle.record(Op("v2.permute_channels", (order,)))
