"""Geometry on float32 images -> atoms. Maps are those of `geometry.py`, with float fills in columns 7 to 9."""

from __future__ import annotations

import functools

import torch
from PIL import Image
from torchvision.transforms import InterpolationMode

from torch_sink.image.core.atoms import LOWER, Atom, FloatKind, Kind
from torch_sink.image.core.tensor_argument import TensorArgument
from torch_sink.image.lower import warp as lower_warp  # noqa: F401  it fills `LOWER`
from torch_sink.image.lower.floats import FloatLowering, bits, lowers_float, three
from torch_sink.image.lower.geometry import narrow_resize, repeat_border, three_planes
from torch_sink.image.lower.resample_weights import (
    cubic_table,
    tap_count,
    tap_range,
    tensor_nearest_table,
)

Resampling = Image.Resampling


def _shift(
    state: FloatLowering, top: int, left: int, height: int, width: int, fill: tuple[float, ...] = (0.0,)
) -> None:
    """SHIFT: (left, top, input width, input height, -, -, three fills)."""
    old_height, old_width = state.resize_to(height, width)
    inside = top >= 0 and left >= 0 and top + height <= old_height and left + width <= old_width
    if inside and narrow_resize(state, top, left):
        return
    if (top, left, height, width) != (0, 0, old_height, old_width):
        state.add(Kind.SHIFT, left, top, old_width, old_height, 0, 0, *bits(*three(fill)))


lowers_float("v1.crop", "v2.crop", "v1.crop_beyond", "v2.crop_beyond")(_shift)


@lowers_float("v1.pad", "v2.pad")
def _pad(state: FloatLowering, sides: tuple[int, int, int, int], fill: float | tuple[float, ...], mode: str) -> None:
    if mode == "constant":
        left, top, right, bottom = sides
        fills = fill if isinstance(fill, (tuple, list)) else (fill,)
        _shift(state, -top, -left, state.height + top + bottom, state.width + left + right, tuple(fills))
    else:
        repeat_border(state, sides, mode, _shift)


def _flip(state: FloatLowering, x: bool, y: bool) -> None:
    state.add(Kind.FLIP, int(x), int(y), state.width, state.height)


@lowers_float("v2.quarter_turns")
def _turn(state: FloatLowering, turns: int) -> None:
    """TURN: (step, offset) of the input column in the output row, then of the input row in the output column."""
    if turns == 2:
        _flip(state, x=True, y=True)
    elif turns:
        height, width = state.resize_to(state.width, state.height)
        across, down = ((-1, width - 1), (1, 0)) if turns == 1 else ((1, 0), (-1, height - 1))
        state.add(FloatKind.TURN, *across, *down)


lowers_float("v1.hflip", "v2.horizontal_flip")(functools.partial(_flip, x=True, y=False))
lowers_float("v1.vflip", "v2.vertical_flip")(functools.partial(_flip, x=False, y=True))


for _name in (
    "v1.affine", "v1.rotate_expanded", "v1.perspective", "v1.elastic_transform",
    "v2.affine", "v2.rotate", "v2.perspective", "v2.elastic",
):  # fmt: skip
    lowers_float(_name)(LOWER[_name])


@lowers_float("v1.erase", "v2.erase")
def _erase(state: FloatLowering, top: int, left: int, height: int, width: int, value: tuple[float, ...]) -> None:
    """ERASE: (left, top, right, bottom, -, -, three fills)."""
    state.add(Kind.ERASE, left, top, left + width, top + height, 0, 0, *bits(*three(value)))


@lowers_float("v1.erase_pixels", "v2.erase_pixels")
def _erase_pixels(state: FloatLowering, top: int, left: int, height: int, width: int, pixels: TensorArgument) -> None:
    """PASTE: (left, top, right, bottom, pixels of the box), and its pixels, three planes of float32 by their bits."""
    table = three_planes(pixels.tensor.contiguous().view(torch.int32))
    state.add(Kind.PASTE, left, top, left + width, top + height, height * width, tables=(table,))


_FILTERS = {
    InterpolationMode.BILINEAR: Resampling.BILINEAR,
    InterpolationMode.BICUBIC: Resampling.BICUBIC,
}


@lowers_float("v1.float_resize", "v2.float_resize")
def _resize(state: FloatLowering, size: tuple[int, int], mode: InterpolationMode, antialias: bool) -> None:
    """RESAMPLE_X, RESAMPLE_Y: (input size, full output size, taps, first output position, first input position that
    exists, filter). BILINEAR: (input width, output width, input height, output
    height). CUBIC: two tables of taps."""
    height, width = size
    old_height, old_width = state.height, state.width
    if mode not in _FILTERS:
        tables = (
            tensor_nearest_table(old_width, width, mode.value),
            tensor_nearest_table(old_height, height, mode.value),
        )
        state.resize_to(height, width)
        state.add(Kind.REMAP, tables=tables)
        return
    if not antialias and mode == InterpolationMode.BICUBIC:
        state.resize_to(height, width)
        state.add(FloatKind.CUBIC, tables=(cubic_table(old_width, width), cubic_table(old_height, height)))
        return
    if not antialias:
        state.resize_to(height, width)
        state.add(FloatKind.BILINEAR, old_width, width, old_height, height)
        return
    resample = _FILTERS[mode]
    if width != old_width:
        state.width = width
        taps = tap_count(old_width, width, resample)
        state.add(FloatKind.RESAMPLE_X, old_width, width, taps, 0, 0, int(resample))
    if height != old_height:
        state.height = height
        taps = tap_count(old_height, height, resample)
        state.add(FloatKind.RESAMPLE_Y, old_height, height, taps, 0, 0, int(resample))


def needed_float_rows(down: Atom) -> tuple[int, int]:
    """Input rows [begin, end) that a RESAMPLE_Y atom may read; its ranges are rounded in float32, so one row more."""
    in_size, out_size, _, first, _, resample = down.values
    begin, end = tap_range(in_size, out_size, resample, first, first + down.size[0] - 1)
    return max(begin - 1, 0), min(end + 1, in_size)
