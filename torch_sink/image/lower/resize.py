"""Resizing -> atoms: one axis after the other, in whole numbers or in float32."""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional._geometry import _do_native_uint8_resize_on_cpu

from torch_sink.image.core.atoms import Atom, Kind, Lowering, ResizeWeights, lowers
from torch_sink.image.lower.geometry import remap
from torch_sink.image.lower.resample_weights import (
    PILLOW_PRECISION_BITS,
    ResampleTable,
    begins_with_rows,
    float_taps,
    nearest_table,
    pillow_table,
    tap_count,
    tap_range,
    tensor_nearest_table,
    tensor_table,
    tensor_table_without_antialias,
)

Resampling = Image.Resampling

# What makes the weights of an axis: on the host from the old size, the new one and the filter; None on the device.
Table = Callable[[int, int, int], ResampleTable]

_FILTERS = {
    InterpolationMode.BILINEAR: Resampling.BILINEAR,
    InterpolationMode.BICUBIC: Resampling.BICUBIC,
    InterpolationMode.LANCZOS: Resampling.LANCZOS,
}
NEAREST_MODES = (InterpolationMode.NEAREST, InterpolationMode.NEAREST_EXACT)
_WHOLE = (Kind.RESAMPLE_X, Kind.RESAMPLE_Y)
_FLOAT = (Kind.FILTER_X, Kind.FILTER_Y)


def integer_resize_fits(interpolation: InterpolationMode) -> bool:
    """True where stock torchvision resizes uint8 tensors in integers on this host."""
    return interpolation in _FILTERS and _do_native_uint8_resize_on_cpu(interpolation)


@lowers("pil.resize")
def _resize_pil(state: Lowering, size: tuple[int, int], resample: int) -> None:
    width, height = size
    if resample == Resampling.NEAREST:
        x_scale, y_scale = state.width / width, state.height / height
        x_table = nearest_table(x_scale * 0.5, x_scale, width, state.width)
        remap(state, x_table, nearest_table(y_scale * 0.5, y_scale, height, state.height))
        return
    table = pillow_table if resample in (Resampling.HAMMING, Resampling.LANCZOS) else None
    kinds = _WHOLE[::-1] if begins_with_rows(state.height, state.width, height, width) else _WHOLE
    for kind in kinds:
        _add_axis(state, kind, height, width, resample, PILLOW_PRECISION_BITS, table)


@lowers("v2.resize")
def _resize_bytes(state: Lowering, size: tuple[int, int], mode: InterpolationMode, antialias: bool) -> None:
    """In whole numbers, as torch does it on processors with AVX2."""
    if _resize_nearest(state, size, mode):
        return
    # torch's bicubic uses the coefficient -0.5 when it antialiases, as Pillow does.
    table = tensor_table if antialias else tensor_table_without_antialias
    for kind in _WHOLE:
        _add_axis(state, kind, *size, _FILTERS[mode], 0, table)


@lowers("v1.resize", "v1.float_resize", "v2.float_resize")
def _resize_floats(state: Lowering, size: tuple[int, int], mode: InterpolationMode, antialias: bool) -> None:
    """In float32: floats, and what v1 makes of bytes."""
    if not _resize_nearest(state, size, mode):
        for kind in _FLOAT:
            _add_axis(state, kind, *size, _FILTERS[mode], 0, None if antialias else float_taps)


def _resize_nearest(state: Lowering, size: tuple[int, int], mode: InterpolationMode) -> bool:
    if mode not in NEAREST_MODES:
        return False
    x_table = tensor_nearest_table(state.width, size[1], mode.value)
    remap(state, x_table, tensor_nearest_table(state.height, size[0], mode.value))
    return True


def _add_axis(
    state: Lowering, kind: Kind, height: int, width: int, resample: int, precision: int, table: Table | None
) -> None:
    """RESAMPLE_X, RESAMPLE_Y, FILTER_X, FILTER_Y: (last input position, full output size, taps, -, -, first output
    position, first input position that exists, precision), and weights on the device, or two tables: first input
    positions, and weights [taps, output positions]. Where float32 values are mirrored at the border, precision is 1."""
    if kind in (Kind.RESAMPLE_X, Kind.FILTER_X):
        old, new, state.width = state.width, width, width
    else:
        old, new, state.height = state.height, height, height
    if old == new and (kind in _WHOLE or state.is_float):
        return
    if table is None:
        taps = tap_count(old, new, resample)
        weights = ResizeWeights(old, new, taps, int(resample), precision)
        state.add(kind, old - 1, new, taps, 0, 0, 0, 0, precision, weights=weights)
    else:
        first, taps_first, precision = table(old, new, int(resample))
        state.add(kind, old - 1, new, len(taps_first), 0, 0, 0, 0, precision, tables=(first, taps_first))


def needed_rows(down: Atom) -> tuple[int, int]:
    """Input rows [begin, end) that a RESAMPLE_Y or FILTER_Y atom reads for the output rows it makes."""
    last_row, first = down.values[0], down.values[5]
    last = first + down.size[0] - 1
    if down.weights is not None:
        begin, end = tap_range(down.weights.in_size, down.weights.out_size, down.weights.resample, first, last)
        # Ranges that are rounded in float32 may hold one row more.
        more = int(down.kind == Kind.FILTER_Y)
        return max(begin - more, 0), min(end + more, last_row + 1)
    if down.kind == Kind.FILTER_Y and down.values[7]:
        return 0, last_row + 1
    starts, weights = down.tables
    return max(int(starts[first]), 0), min(int(starts[last]) + len(weights), last_row + 1)
