"""Pillow's own affine and perspective transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from torch_sink.image.core.arguments import color_of
from torch_sink.image.core.lowering import LoweredImage, byte_fill
from torch_sink.image.core.ops import Op, Operation
from torch_sink.image.core.recording import Recording
from torch_sink.image.operations.moves import add_affine, remap, shift
from torch_sink.image.operations.resize import filter_of
from torch_sink.image.operations.resize_tables import nearest_table
from torch_sink.triton_kernels.rows import Kind

_NEAREST = int(Image.Resampling.NEAREST)
_FILTERS = (Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
# The coefficients of the two methods that record.
_COEFFICIENTS: dict[int, int] = {Image.Transform.AFFINE: 6, Image.Transform.PERSPECTIVE: 8}
_AFFINE = int(Image.Transform.AFFINE)


def _transform(
    image: Recording, size: Any, method: Any, data: Any = None, resample: int = Image.Resampling.NEAREST, fill: int = 1,
    fillcolor: Any = None,
) -> Any:  # fmt: skip
    is_size = isinstance(size, (tuple, list)) and len(size) == 2
    if not is_size or not isinstance(method, int) or method not in _COEFFICIENTS or data is None:
        return NotImplemented
    # A fill as torchvision passes it on: three integers for "RGB", one for "L", or None for black.
    channels = 3 if image.mode == "RGB" else 1
    fills = fillcolor if isinstance(fillcolor, tuple) else (0,) * channels if fillcolor is None else (fillcolor,)
    if len(fills) != channels or not all(isinstance(value, int) for value in fills):
        return NotImplemented
    return _recorded(image, size, method, data, resample, fillcolor)


def _recorded(image: Recording, size: Any, method: int, data: Any, resample: int, fill: Any) -> Any:
    """`_transform`, with a fill that it has looked at."""
    (width, height), data = size, tuple(map(float, data))
    is_whole = len(data) >= _COEFFICIENTS[method] and all(map(math.isfinite, data))
    if resample not in _FILTERS or not is_whole:
        return NotImplemented
    resample = filter_of(image, resample)
    is_nearest = method == _AFFINE and resample == _NEAREST
    if min(width, height) <= 0 or (is_nearest and not _fits_16_bits(data, width, height)):
        return NotImplemented
    op = Op("pil.transform", ((width, height), int(method), data, int(resample), fill))
    return image.record(op, (image.shape[0], height, width))


def _affine(image: Recording, matrix: Any, interpolation: int = Image.Resampling.NEAREST, fill: Any = None) -> Any:
    color = color_of(fill, image.shape[0])
    if color is None:
        return NotImplemented
    return _recorded(image, image.size, _AFFINE, matrix, interpolation, color)


def _rotate(
    image: Recording, angle: float, interpolation: int = Image.Resampling.NEAREST, expand: Any = False,
    center: Any = None, fill: Any = None,
) -> Any:  # fmt: skip
    """Records a turn around the middle, of the matrix that `Image.rotate` makes; it makes that of others itself."""
    if center is not None or expand or not angle % 90:
        return NotImplemented
    turn, (x, y) = -math.radians(angle % 360.0), (image.size[0] / 2, image.size[1] / 2)
    cos, sin = round(math.cos(turn), 15), round(math.sin(turn), 15)
    matrix = cos, sin, cos * -x + sin * -y + 0.0 + x, -sin, cos, -sin * -x + cos * -y + 0.0 + y
    return _affine(image, matrix, interpolation, fill)


def _fits_16_bits(data: Sequence[float], width: int, height: int) -> bool:
    """True where Pillow uses 16.16 integers; positions of corners that do not fit make it add up floats."""
    a, b, c, d, e, f = data[:6]
    if max(width * abs(a) + height * abs(b) + abs(c), width * abs(d) + height * abs(e) + abs(f)) < 32768.0:
        return True
    rows = ((a, b, c), (d, e, f)) if b or d else ()
    return all(
        max(abs(c), abs(width * a + c), abs(height * b + c), abs(width * a + height * b + c)) < 32768.0
        for a, b, c in rows
    )


def _lower(
    lowered: LoweredImage, size: tuple[int, int], method: int, data: tuple[float, ...], resample: int, fill: Any
) -> None:
    """WARP: (input width, input height, filter, -, perspective), and a table of 8 float64 in two int32 each."""
    width, height = size
    is_affine = method == Image.Transform.AFFINE
    if is_affine and resample == Image.Resampling.NEAREST:
        _lower_nearest(lowered, height, width, data, fill)
        return
    coefficients = np.zeros(8)
    count = _COEFFICIENTS[method]
    coefficients[:count] = data[:count]
    old_height, old_width = lowered.resize_to(height, width)
    values = (old_width, old_height, resample, 0, int(not is_affine))
    lowered.add(Kind.WARP, *values, fill=byte_fill(fill), tables=(coefficients.view(np.int32),))


def _lower_nearest(lowered: LoweredImage, height: int, width: int, data: tuple[float, ...], fill: Any) -> None:
    a0, a1, a2, a3, a4, a5 = data[:6]
    if a1 or a3:
        old_height, old_width = lowered.resize_to(height, width)
        x_row = _fixed(a0), _fixed(a1), _fixed(a2 + a0 * 0.5 + a1 * 0.5)
        y_row = _fixed(a3), _fixed(a4), _fixed(a5 + a3 * 0.5 + a4 * 0.5)
        add_affine(lowered, x_row, y_row, (old_width, old_height), fill)
    elif a0 == a4 == 1.0 and a2.is_integer() and a5.is_integer():
        shift(lowered, int(a5), int(a2), height, width, fill)
    else:
        x_table = nearest_table(a2 + a0 * 0.5, a0, width, lowered.width)
        remap(lowered, x_table, nearest_table(a5 + a4 * 0.5, a4, height, lowered.height), fill)


def _fixed(value: float) -> int:
    return math.floor(value * 65536.0 + 0.5)


Operation(
    "transform",
    stock={
        "pil.transform": lambda image, size, method, data, resample, fill: image.transform(
            size, Image.Transform(method), data, resample, fillcolor=fill
        )
    },
    record={"Image.transform": _transform, "pil.affine": _affine, "pil.rotate": _rotate},
    lower=_lower,
)
