"""Geometry -> atoms: crops, pads, flips, resizing, warps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional._geometry import _do_native_uint8_resize_on_cpu

from torch_sink.image.core.arguments import Sides, cropped_size, padding_fits
from torch_sink.image.core.atoms import Atom, Kind, Lowering, lowers, packed_color
from torch_sink.image.core.tensor_argument import TensorArgument
from torch_sink.image.lower.resample_weights import (
    PILLOW_PRECISION_BITS,
    ResampleTable,
    begins_with_rows,
    float_table,
    nearest_table,
    pillow_table,
    tap_count,
    tap_range,
    tensor_nearest_table,
    tensor_table,
    tensor_table_without_antialias,
)

Resampling, Transpose = Image.Resampling, Image.Transpose


def _shift(state: Lowering, top: int, left: int, height: int, width: int, fill: Any = 0) -> None:
    """SHIFT: (left, top, input width, input height, fill). Input position = output position + (left, top)."""
    old_height, old_width = state.resize_to(height, width)
    inside = top >= 0 and left >= 0 and top + height <= old_height and left + width <= old_width
    if inside and narrow_resize(state, top, left):
        return
    if (top, left, height, width) != (0, 0, old_height, old_width):
        state.add(Kind.SHIFT, left, top, old_width, old_height, packed_color(fill))


def narrow_resize(state: Any, top: int, left: int) -> bool:
    """A crop right after a resize of both axes: only the pixels inside the crop are computed at all."""
    if {atom.kind.name for atom in state.atoms[-2:]} != {"RESAMPLE_X", "RESAMPLE_Y"}:
        return False
    first, second = state.atoms[-2:]
    first_height, first_width = first.size
    if first.kind.name == "RESAMPLE_X":
        state.atoms[-2] = _moved(first, left, (first_height, state.width))
        state.atoms[-1] = _moved(second, top, (state.height, state.width))
    else:
        state.atoms[-2] = _moved(first, top, (state.height, first_width))
        state.atoms[-1] = _moved(second, left, (state.height, state.width))
    return True


def _moved(resample: Atom, offset: int, size: tuple[int, int]) -> Atom:
    values = (*resample.values[:3], resample.values[3] + offset, *resample.values[4:])
    return resample._replace(size=size, values=values)


@lowers("pil.crop")
def _crop_pil(state: Lowering, box: tuple[int, int, int, int]) -> None:
    left, upper, right, lower_ = box
    _shift(state, upper, left, lower_ - upper, right - left)


@lowers("v1.crop", "v2.crop")
def _crop(state: Lowering, top: int, left: int, height: int, width: int) -> None:
    _shift(state, top, left, height, width)


_PAD_KINDS = {"edge": Kind.EDGE, "reflect": Kind.REFLECT, "symmetric": Kind.SYMMETRIC}


@lowers("pil.pad", "v1.pad", "v2.pad")
def _pad(state: Lowering, sides: tuple[int, int, int, int], fill: Any, mode: str) -> None:
    if mode == "constant":
        left, top, right, bottom = sides
        _shift(state, -top, -left, state.height + top + bottom, state.width + left + right, fill)
    else:
        repeat_border(state, sides, mode, _shift)


def repeat_border(state: Any, sides: Sides, mode: str, crop: Callable[[Any, int, int, int, int], None]) -> None:
    """EDGE, REFLECT, SYMMETRIC: (left, top, input width, input height), added as for SHIFT, then brought inside.

    Negative sides crop first: `crop` of the state, top, left, height and width.
    """
    if min(sides) < 0:
        crop(state, max(-sides[1], 0), max(-sides[0], 0), *cropped_size(sides, state.height, state.width))
    left, top, right, bottom = (max(side, 0) for side in sides)
    if not any((left, top, right, bottom)):
        return
    if padding_fits((left, top, right, bottom), mode, state.height, state.width):
        old_height, old_width = state.resize_to(state.height + top + bottom, state.width + left + right)
        state.add(_PAD_KINDS[mode], -left, -top, old_width, old_height)
        return
    x_table = mirrored_positions(state.width, left, right, mode)
    _remap(state, x_table, mirrored_positions(state.height, top, bottom, mode), 0)


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
    state.add(Kind.AFFINE, *x_row, *y_row, width, height, 0)


def _remap(state: Lowering, x_table: np.ndarray, y_table: np.ndarray, fill: Any) -> None:
    """REMAP: (-, -, -, -, fill) and two tables: input x by output x, input y by output y; -1 is outside."""
    state.resize_to(len(y_table), len(x_table))
    state.add(Kind.REMAP, 0, 0, 0, 0, packed_color(fill), tables=(x_table, y_table))


@lowers("pil.resize")
def _resize_pil(state: Lowering, size: tuple[int, int], resample: int) -> None:
    """RESAMPLE_X, RESAMPLE_Y: (input size, full output size, taps, first output position, first input position that
    exists, filter, precision); with a table of first taps and one of weights where the filter is not computed in the
    kernel (filter -1)."""
    width, height = size
    if resample == Resampling.NEAREST:
        x_scale, y_scale = state.width / width, state.height / height
        _remap(
            state,
            nearest_table(x_scale * 0.5, x_scale, width, state.width),
            nearest_table(y_scale * 0.5, y_scale, height, state.height),
            0,
        )
        return
    table = pillow_table if resample in (Resampling.HAMMING, Resampling.LANCZOS) else None
    _resample(state, height, width, resample, table, begins_with_rows(state.height, state.width, height, width))


def _resample(
    state: Lowering,
    height: int,
    width: int,
    resample: int,
    table: Callable[..., ResampleTable] | None,
    rows_first: bool,
) -> None:
    order = (Kind.RESAMPLE_Y, Kind.RESAMPLE_X) if rows_first else (Kind.RESAMPLE_X, Kind.RESAMPLE_Y)
    for kind in order:
        if kind == Kind.RESAMPLE_X:
            old, new, state.width = state.width, width, width
        else:
            old, new, state.height = state.height, height, height
        if old == new:
            continue
        if table is None:
            values = (old, new, tap_count(old, new, resample), 0, 0, int(resample), PILLOW_PRECISION_BITS)
            state.add(kind, *values)
        else:
            first, weights, precision = table(old, new, int(resample))
            values = (old, new, weights.shape[1], 0, 0, -1, precision)
            state.add(kind, *values, tables=(first, weights))


_TENSOR_FILTERS = {
    InterpolationMode.BILINEAR: Resampling.BILINEAR,
    InterpolationMode.BICUBIC: Resampling.BICUBIC,
    InterpolationMode.LANCZOS: Resampling.LANCZOS,
}
NEAREST_MODES = (InterpolationMode.NEAREST, InterpolationMode.NEAREST_EXACT)


def integer_resize_fits(interpolation: InterpolationMode) -> bool:
    """True where stock torchvision resizes uint8 tensors in integers on this host."""
    return interpolation in _TENSOR_FILTERS and _do_native_uint8_resize_on_cpu(interpolation)


@lowers("v1.resize")
def _resize_as_floats(
    state: Lowering, size: tuple[int, int], interpolation: InterpolationMode, antialias: bool
) -> None:
    """RESIZE_X, RESIZE_Y: (input size, taps), and tables: first taps, taps of two roundings, float32 weights."""
    if interpolation in NEAREST_MODES:
        _resize_tensor(state, size, interpolation, antialias)
        return
    resample, (old_height, old_width) = int(_TENSOR_FILTERS[interpolation]), (state.height, state.width)
    state.width = size[1]
    first, grouped, weights = float_table(old_width, size[1], resample)
    state.add(Kind.RESIZE_X, old_width, weights.shape[1], tables=(first, grouped, weights))
    state.height = size[0]
    first, grouped, weights = float_table(old_height, size[0], resample)
    state.add(Kind.RESIZE_Y, old_height, weights.shape[1], tables=(first, grouped, weights))


@lowers("v2.resize")
def _resize_tensor(state: Lowering, size: tuple[int, int], interpolation: InterpolationMode, antialias: bool) -> None:
    height, width = size
    if interpolation in NEAREST_MODES:
        mode = interpolation.value
        x_table = tensor_nearest_table(state.width, width, mode)
        _remap(state, x_table, tensor_nearest_table(state.height, height, mode), 0)
        return
    # torch's bicubic uses the coefficient -0.5 when it antialiases, as Pillow does.
    table = tensor_table if antialias else tensor_table_without_antialias
    _resample(state, height, width, _TENSOR_FILTERS[interpolation], table, rows_first=False)


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
    """WARP: (input width, input height, fill, filter, perspective), and a table of 8 float64 in two int32 each."""
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
    values = (old_width, old_height, packed_color(fill), resample, int(perspective))
    state.add(Kind.WARP, *values, tables=(coefficients.view(np.int32),))


def _affine_nearest(state: Lowering, height: int, width: int, matrix: tuple[float, ...], fill: Any) -> None:
    """AFFINE: (a0..a5 in 16.16, input width, input height, fill)."""
    a0, a1, a2, a3, a4, a5 = matrix[:6]
    if a1 == 0 and a3 == 0:
        if a0 == a4 == 1.0 and a2.is_integer() and a5.is_integer():
            _shift(state, int(a5), int(a2), height, width, fill)
            return
        _remap(
            state,
            nearest_table(a2 + a0 * 0.5, a0, width, state.width),
            nearest_table(a5 + a4 * 0.5, a4, height, state.height),
            fill,
        )
        return
    old_height, old_width = state.resize_to(height, width)
    x_row = _fixed(a0), _fixed(a1), _fixed(a2 + a0 * 0.5 + a1 * 0.5)
    y_row = _fixed(a3), _fixed(a4), _fixed(a5 + a3 * 0.5 + a4 * 0.5)
    state.add(Kind.AFFINE, *x_row, *y_row, old_width, old_height, packed_color(fill))


@lowers("v1.erase", "v2.erase")
def _erase(state: Lowering, top: int, left: int, height: int, width: int, value: tuple[float, ...]) -> None:
    """ERASE: (left, top, right, bottom, fill, is float, three float32 values as they are stored in the result).

    While the image is still uint8 the fill is a color; afterwards the values go through what follows, in stock code.
    """
    colors = value * 3 if len(value) == 1 else value
    box = left, top, left + width, top + height
    if state.is_uint8:
        state.add(Kind.ERASE, *box, packed_color(tuple(int(color) for color in colors)), 0)
    else:
        state.add(Kind.ERASE, *box, 0, 1)
        values = torch.tensor(colors, device="cpu").view(-1, 1, 1)
        state.erased.append((len(state.atoms) - 1, len(state.value_ops), values))


@lowers("v1.erase_pixels", "v2.erase_pixels")
def _erase_pixels(state: Lowering, top: int, left: int, height: int, width: int, pixels: TensorArgument) -> None:
    """PASTE: (left, top, right, bottom, pixels of the box, is float), and its pixels as they are in the result, three
    planes; float32 by their bits."""
    box = left, top, left + width, top + height
    if state.is_uint8:
        state.add(Kind.PASTE, *box, height * width, 0, tables=(three_planes(pixels.tensor.int()),))
    else:
        state.add(Kind.PASTE, *box, height * width, 1)
        state.erased.append((len(state.atoms) - 1, len(state.value_ops), pixels.tensor))


def three_planes(pixels: torch.Tensor) -> np.ndarray:
    """int32 [C, H, W] as a table; one channel stands for all."""
    return pixels.expand(3, -1, -1).contiguous().numpy()


def needed_rows(down: Atom) -> tuple[int, int]:
    """Input rows [begin, end) that a RESAMPLE_Y atom reads for the output rows it makes."""
    in_size, out_size, _, first, _, resample, _ = down.values
    last = first + down.size[0] - 1
    if resample >= 0:
        return tap_range(in_size, out_size, resample, first, last)
    starts, weights = down.tables
    return int(starts[first]), min(int(starts[last]) + weights.shape[1], in_size)
