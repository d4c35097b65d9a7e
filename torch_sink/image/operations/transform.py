"""Pillow's own affine and perspective transforms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from PIL import Image

from torch_sink.image.core.atoms import Kind, Lowering, color_of
from torch_sink.image.core.examples import Arguments, Example, of_method
from torch_sink.image.core.ops import Op, Operation
from torch_sink.image.operations.crops import remap, shift
from torch_sink.image.operations.flips import add_affine
from torch_sink.image.operations.resize import filter_of
from torch_sink.image.operations.resize_tables import nearest_table

_WARP_FILTERS = (Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)


def _fits(method: int, data: Sequence[float], resample: int, size: Sequence[int]) -> bool:
    """True for a call of `Image.transform` that the kernels know.

    Not known: nearest-neighbor affine transforms that reach beyond 16.16 integers, where Pillow adds up positions.
    """
    if resample not in _WARP_FILTERS or not all(map(math.isfinite, data)) or min(size) <= 0:
        return False
    if method == Image.Transform.PERSPECTIVE:
        return len(data) >= 8
    if method != Image.Transform.AFFINE or len(data) < 6:
        return False
    if resample != Image.Resampling.NEAREST or (data[1] == 0 and data[3] == 0):
        return True
    width, height = size
    return all(_stays_small(data[at], data[at + 1], data[at + 2], width, height) for at in (0, 3))


def _stays_small(a: float, b: float, c: float, width: int, height: int) -> bool:
    """True where the positions of all corners fit into 16.16 integers."""
    across, down = width * a, height * b
    return max(abs(c), abs(across + c), abs(down + c), abs(across + down + c)) < 32768.0


def _fixed(value: float) -> int:
    return math.floor(value * 65536.0 + 0.5)


def _lower_transform(
    state: Lowering, size: tuple[int, int], method: int, data: tuple[float, ...], resample: int, fill: Any
) -> None:
    """WARP: (input width, input height, filter, -, perspective), and a table of 8 float64 in two int32 each."""
    width, height = size
    perspective = method == Image.Transform.PERSPECTIVE
    if not perspective and resample == Image.Resampling.NEAREST:
        _affine_nearest(state, height, width, data, fill)
        return
    coefficients = np.zeros(8)
    coefficients[: len(data[:8])] = data[:8]
    if not perspective:
        coefficients[6:] = 0.0
    old_height, old_width = state.resize_to(height, width)
    values = (old_width, old_height, resample, 0, int(perspective))
    state.add(Kind.WARP, *values, fill=color_of(fill), tables=(coefficients.view(np.int32),))


def _affine_nearest(state: Lowering, height: int, width: int, matrix: tuple[float, ...], fill: Any) -> None:
    a0, a1, a2, a3, a4, a5 = matrix[:6]
    if a1 == 0 and a3 == 0:
        if a0 == a4 == 1.0 and a2.is_integer() and a5.is_integer():
            shift(state, int(a5), int(a2), height, width, fill)
            return
        remap(
            state,
            nearest_table(a2 + a0 * 0.5, a0, width, state.width),
            nearest_table(a5 + a4 * 0.5, a4, height, state.height),
            fill,
        )
        return
    old_height, old_width = state.resize_to(height, width)
    x_row = _fixed(a0), _fixed(a1), _fixed(a2 + a0 * 0.5 + a1 * 0.5)
    y_row = _fixed(a3), _fixed(a4), _fixed(a5 + a3 * 0.5 + a4 * 0.5)
    add_affine(state, x_row, y_row, (old_width, old_height), fill)


_MATRIX_TRANSFORMS = (Image.Transform.AFFINE, Image.Transform.PERSPECTIVE)


def _transform_image(
    image: Any, size: Any, method: Any, data: Any = None, resample: int = Image.Resampling.NEAREST, fill: int = 1,
    fillcolor: Any = None,
) -> Any:  # fmt: skip
    if method not in _MATRIX_TRANSFORMS or data is None or not _is_color(image.mode, fillcolor):
        return NotImplemented
    width, height = size
    matrix, resample = tuple(map(float, data)), filter_of(image, resample)
    if not _fits(method, matrix, resample, (width, height)):
        return NotImplemented
    op = Op("pil.transform", ((width, height), int(method), matrix, int(resample), fillcolor))
    return image.record(op, size=(width, height))


def _is_color(mode: str, fill: Any) -> bool:
    """True for a color given as stock code gives it: three numbers for "RGB", one for "L", or None for black."""
    if fill is None:
        return True
    values = fill if isinstance(fill, tuple) else (fill,)
    return len(values) == (3 if mode == "RGB" else 1) and all(isinstance(value, int) for value in values)


def _transform_examples(a: Arguments) -> Iterator[Example]:
    turn = math.radians(a.chance.uniform(10, 80))
    matrix = (math.cos(turn), math.sin(turn), -2.5, -math.sin(turn), math.cos(turn), 1.5)
    size = a.other[1], a.other[0]
    for filter in (Image.Resampling.NEAREST, Image.Resampling.BICUBIC):
        yield from of_method(a, "transform", {filter.name: (size, Image.Transform.AFFINE, matrix, filter)})


Operation(
    "transform",
    stock={
        "pil.transform": lambda image, size, method, data, resample, fill: image.transform(
            size, Image.Transform(method), data, resample, fillcolor=fill
        )
    },
    record={"Image.transform": _transform_image},
    lower=_lower_transform,
    examples=_transform_examples,
    keeps_info=lambda op: True,
)
