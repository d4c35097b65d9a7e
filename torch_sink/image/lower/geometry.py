"""Geometry -> atoms: crops, pads, flips, Pillow's warps, erased boxes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from torch_sink.image.core.arguments import Sides, cropped_size, padding_fits
from torch_sink.image.core.atoms import Atom, Kind, Lowering, color_of, lowers, three
from torch_sink.image.core.tensor_argument import TensorArgument
from torch_sink.image.lower.resample_weights import nearest_table

Resampling, Transpose = Image.Resampling, Image.Transpose


def _shift(state: Lowering, top: int, left: int, height: int, width: int, fill: Any = 0) -> None:
    """SHIFT: (left, top, input width, input height), and a fill. Input position = output position + (left, top)."""
    old_height, old_width = state.resize_to(height, width)
    inside = top >= 0 and left >= 0 and top + height <= old_height and left + width <= old_width
    if inside and narrow_resize(state, top, left):
        return
    if (top, left, height, width) != (0, 0, old_height, old_width):
        state.add(Kind.SHIFT, left, top, old_width, old_height, fill=_fill(state, fill))


def _fill(state: Lowering, fill: Any) -> tuple[float, ...]:
    """A fill as the kernels have it: bytes, or floats as they are."""
    if not state.is_float:
        return color_of(fill)
    return three(fill if isinstance(fill, (tuple, list)) else (fill,))


_AXES = ((Kind.RESAMPLE_X, Kind.RESAMPLE_Y), (Kind.FILTER_X, Kind.FILTER_Y))


def narrow_resize(state: Lowering, top: int, left: int) -> bool:
    """A crop right after a filter of both axes: only the pixels inside the crop are computed at all."""
    if tuple(sorted(atom.kind for atom in state.atoms[-2:])) not in _AXES:
        return False
    first, second = state.atoms[-2:]
    first_height, first_width = first.size
    if first.kind in (Kind.RESAMPLE_X, Kind.FILTER_X):
        state.atoms[-2] = _moved(first, left, (first_height, state.width))
        state.atoms[-1] = _moved(second, top, (state.height, state.width))
    else:
        state.atoms[-2] = _moved(first, top, (state.height, first_width))
        state.atoms[-1] = _moved(second, left, (state.height, state.width))
    return True


def _moved(axis: Atom, offset: int, size: tuple[int, int]) -> Atom:
    values = (*axis.values[:5], axis.values[5] + offset, *axis.values[6:])
    return axis._replace(size=size, values=values)


@lowers("pil.crop")
def _crop_pil(state: Lowering, box: tuple[int, int, int, int]) -> None:
    left, upper, right, lower_ = box
    _shift(state, upper, left, lower_ - upper, right - left)


@lowers("v1.crop", "v2.crop", "v1.crop_beyond", "v2.crop_beyond")
def _crop(state: Lowering, top: int, left: int, height: int, width: int) -> None:
    _shift(state, top, left, height, width)


_PAD_KINDS = {"edge": Kind.EDGE, "reflect": Kind.REFLECT, "symmetric": Kind.SYMMETRIC}


@lowers("pil.pad", "v1.pad", "v2.pad")
def _pad(state: Lowering, sides: tuple[int, int, int, int], fill: Any, mode: str) -> None:
    if mode == "constant":
        left, top, right, bottom = sides
        _shift(state, -top, -left, state.height + top + bottom, state.width + left + right, fill)
    else:
        _repeat_border(state, sides, mode)


def _repeat_border(state: Lowering, sides: Sides, mode: str) -> None:
    """EDGE, REFLECT, SYMMETRIC: (left, top, input width, input height), added as for SHIFT, then brought inside.

    Negative sides crop first.
    """
    if min(sides) < 0:
        _shift(state, max(-sides[1], 0), max(-sides[0], 0), *cropped_size(sides, state.height, state.width))
    left, top, right, bottom = (max(side, 0) for side in sides)
    if not any((left, top, right, bottom)):
        return
    if padding_fits((left, top, right, bottom), mode, state.height, state.width):
        old_height, old_width = state.resize_to(state.height + top + bottom, state.width + left + right)
        state.add(_PAD_KINDS[mode], -left, -top, old_width, old_height)
        return
    x_table = mirrored_positions(state.width, left, right, mode)
    remap(state, x_table, mirrored_positions(state.height, top, bottom, mode))


@functools.lru_cache(maxsize=256)
def mirrored_positions(size: int, before: int, after: int, mode: str) -> np.ndarray:
    """Source index of each output position, int32, where more is padded than there is to mirror, as `numpy.pad`."""
    return np.pad(np.arange(size, dtype=np.int32), (before, after), mode)  # type: ignore[call-overload]


def _flip(state: Lowering, x: bool, y: bool) -> None:
    """FLIP: (flip x, flip y, width, height)."""
    state.add(Kind.FLIP, int(x), int(y), state.width, state.height)


lowers("v1.hflip", "v2.horizontal_flip")(functools.partial(_flip, x=True, y=False))
lowers("v1.vflip", "v2.vertical_flip")(functools.partial(_flip, x=False, y=True))


@lowers("pil.transpose")
def transpose(state: Lowering, method: int) -> None:
    if method in (Transpose.FLIP_LEFT_RIGHT, Transpose.FLIP_TOP_BOTTOM, Transpose.ROTATE_180):
        _flip(state, x=method != Transpose.FLIP_TOP_BOTTOM, y=method != Transpose.FLIP_LEFT_RIGHT)
        return
    height, width = state.resize_to(state.width, state.height)
    # Input x from output y, input y from output x; mirrored where the turn asks for it.
    mirror_x = method in (Transpose.ROTATE_90, Transpose.TRANSVERSE)
    mirror_y = method in (Transpose.ROTATE_270, Transpose.TRANSVERSE)
    x_row = (0, -65536, (width - 1) << 16) if mirror_x else (0, 65536, 0)
    y_row = (-65536, 0, (height - 1) << 16) if mirror_y else (65536, 0, 0)
    _add_affine(state, x_row, y_row, (width, height), 0)


def remap(state: Lowering, x_table: np.ndarray, y_table: np.ndarray, fill: Any = 0) -> None:
    """REMAP: a fill, and two tables: input x by output x, input y by output y; -1 is outside."""
    state.resize_to(len(y_table), len(x_table))
    state.add(Kind.REMAP, fill=_fill(state, fill), tables=(x_table, y_table))


_WARP_FILTERS = (Resampling.NEAREST, Resampling.BILINEAR, Resampling.BICUBIC)


def transform_fits(method: int, data: Sequence[float], resample: int, size: Sequence[int]) -> bool:
    """True for a call of `Image.transform` that the kernels know.

    Not known: nearest-neighbor affine transforms that reach beyond 16.16 integers, where Pillow adds up positions.
    """
    if resample not in _WARP_FILTERS or not all(map(math.isfinite, data)) or min(size) <= 0:
        return False
    if method == Image.Transform.PERSPECTIVE:
        return len(data) >= 8
    if method != Image.Transform.AFFINE or len(data) < 6:
        return False
    if resample != Resampling.NEAREST or (data[1] == 0 and data[3] == 0):
        return True
    width, height = size
    return all(
        abs(x * a + y * b + c) < 32768.0 for x in (0, width) for y in (0, height) for a, b, c in (data[:3], data[3:6])
    )


def _fixed(value: float) -> int:
    return math.floor(value * 65536.0 + 0.5)


@lowers("pil.transform")
def _transform(
    state: Lowering, size: tuple[int, int], method: int, data: tuple[float, ...], resample: int, fill: Any
) -> None:
    """WARP: (input width, input height, filter, -, perspective), and a table of 8 float64 in two int32 each."""
    width, height = size
    perspective = method == Image.Transform.PERSPECTIVE
    if not perspective and resample == Resampling.NEAREST:
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
            _shift(state, int(a5), int(a2), height, width, fill)
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
    _add_affine(state, x_row, y_row, (old_width, old_height), fill)


def _add_affine(
    state: Lowering, x_row: tuple[int, ...], y_row: tuple[int, ...], old_size: tuple[int, int], fill: Any
) -> None:
    """AFFINE: (two rows of three coefficients in 16.16, -, -, -, input width, input height), and a fill."""
    state.add(Kind.AFFINE, *x_row, *y_row, 0, 0, 0, *old_size, fill=_fill(state, fill))


@lowers("v1.erase", "v2.erase")
def _erase(state: Lowering, top: int, left: int, height: int, width: int, value: tuple[float, ...]) -> None:
    """ERASE: (left, top, right, bottom), and a fill.

    Values that come before a table of values go through what the table holds, in stock code.
    """
    colors = three(tuple(map(int, value)) if state.is_uint8 else value)
    if not (state.is_uint8 or state.is_float):
        state.erased.append((len(state.atoms), len(state.value_ops), torch.tensor(colors, device="cpu").view(-1, 1, 1)))
    state.add(Kind.ERASE, left, top, left + width, top + height, fill=colors)


@lowers("v1.erase_pixels", "v2.erase_pixels")
def _erase_pixels(state: Lowering, top: int, left: int, height: int, width: int, pixels: TensorArgument) -> None:
    """PASTE: (left, top, right, bottom, -, pixels of the box), and its pixels, three planes of float32."""
    if not (state.is_uint8 or state.is_float):
        state.erased.append((len(state.atoms), len(state.value_ops), pixels.tensor))
    table = three_planes(pixels.tensor.float())
    state.add(Kind.PASTE, left, top, left + width, top + height, 0, height * width, tables=(table,))


def three_planes(pixels: torch.Tensor) -> np.ndarray:
    """float32 [C, H, W] as a table of bits; one channel stands for all."""
    return pixels.expand(3, -1, -1).contiguous().view(torch.int32).numpy()
