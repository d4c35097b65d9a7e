"""Resizes, and crops that are resized."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torchvision.transforms import InterpolationMode as Mode
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms import functional as F
from torchvision.transforms.v2 import functional as F_v2
from torchvision.transforms.v2.functional import _geometry as v2_geometry

from torch_sink.image.core.lowering import LoweredImage, ResizeWeights
from torch_sink.image.core.ops import CLOSE, EXACT, MOVED, NUMERIC, Op, Operation, Promise
from torch_sink.image.core.recording import Recording
from torch_sink.image.operations import resize_tables as tables
from torch_sink.image.operations.moves import check_size, crop, remap
from torch_sink.triton_kernels.rows import Kind

NEAREST_MODES = (Mode.NEAREST, Mode.NEAREST_EXACT)
SMOOTH_MODES = (Mode.BILINEAR, Mode.BICUBIC)
_NEAREST = Image.Resampling.NEAREST
_PILLOW_FILTERS = frozenset(range(6))  # Pillow 13 knows more; those are not recorded
_FILTERS = {
    Mode.BILINEAR: Image.Resampling.BILINEAR,
    Mode.BICUBIC: Image.Resampling.BICUBIC,
    Mode.LANCZOS: Image.Resampling.LANCZOS,
}

# --- Pillow images


def _resize_image(
    image: Recording, size: Any, resample: int | None = None, box: Any = None, reducing_gap: float | None = None
) -> Any:
    if resample is None:
        resample = Image.Resampling.BICUBIC
    is_plain = resample in _PILLOW_FILTERS and box is None and reducing_gap is None
    if not is_plain or not isinstance(size, (list, tuple)) or len(size) != 2 or not _is_size(size):
        return NotImplemented
    sides = tuple(size)
    if sides == image.size:
        return image.copied()
    op = Op("pil.resize", (sides, int(filter_of(image, resample))))
    return image.record(op, (image.shape[0], sides[1], sides[0]))


def _resize_pillow(image: Recording, size: Any, interpolation: int = Image.Resampling.BILINEAR) -> Any:
    return _resize_image(image, size[::-1], interpolation) if isinstance(size, (list, tuple)) else NotImplemented


def filter_of(image: Recording, resample: int) -> int:
    """The filter that Pillow uses: no color lies between two numbers of colors."""
    return _NEAREST if image.mode == "P" else resample


# The filter that an interpolation means. Transforms of v2 keep its name, at which functionals of v1 raise.
_FILTERS_BY_MODE: dict[Any, int] = dict(F.pil_modes_mapping)
FILTERS_BY_NAME: dict[Any, int] = {**_FILTERS_BY_MODE, **{mode.value: each for mode, each in _FILTERS_BY_MODE.items()}}


def _resized_crop_image(
    filters: dict[Any, int], image: Recording, top: Any, left: Any, height: Any, width: Any, size: Any,
    interpolation: Any = Mode.BILINEAR, antialias: bool | None = True,
) -> Any:  # fmt: skip
    """A crop inside of the image, resized to a height and a width; stock code calls two methods of the image."""
    is_box = type(top) is type(left) is type(height) is type(width) is int and image.mode is not None
    resample = filters.get(interpolation) if type(interpolation) in (Mode, str) else None
    if not (is_box and isinstance(size, (list, tuple)) and len(size) == 2) or resample is None or antialias is False:
        return NotImplemented
    (new_height, new_width), (channels, old_height, old_width) = size, image.shape
    inside = 0 <= left < left + width <= old_width and 0 <= top < top + height <= old_height
    if not (inside and type(new_height) is type(new_width) is int and new_height > 0 < new_width):
        return NotImplemented
    box, most = (left, top, left + width, top + height), Image.MAX_IMAGE_PIXELS
    if most is not None and height * width > most:
        check_size((old_width, old_height), box)
    cropped = Op("pil.crop", (box,))
    if (new_height, new_width) == (height, width):
        return image.record(cropped, (channels, height, width))
    resized = Op("pil.resize", ((new_width, new_height), int(_NEAREST if image.mode == "P" else resample)))
    return image.record(resized, (channels, new_height, new_width), before=(cropped,))


# --- tensors


def _resize_v1(family: str, image: Recording, size: Any, interpolation: Any = "bilinear", antialias: Any = True) -> Any:
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        return NotImplemented
    try:
        return _in_floats("v1.resize", image, tuple(size), Mode(interpolation), antialias)
    except ValueError:
        return NotImplemented


def _resize_v2(
    family: str, image: Recording, size: Any, interpolation: Any = Mode.BILINEAR, max_size: Any = None,
    antialias: bool | None = True,
) -> Any:  # fmt: skip
    channels, *old_size = image.shape
    new_size = tuple(v2_geometry._compute_resized_output_size(old_size, size=size, max_size=max_size))
    if new_size == tuple(old_size):
        return image
    mode = Mode(v2_geometry._check_interpolation(interpolation))
    if image.dtype != torch.uint8 or not (mode in NEAREST_MODES or integer_resize_fits(mode)):
        return _in_floats("v2.resize", image, new_size, mode, antialias)
    if not _is_size(new_size):
        return NotImplemented
    # To one pixel torch refuses, or not, by how pixels lie in memory.
    if (mode == Mode.LANCZOS and not antialias) or (antialias and new_size == (1, 1) and channels == 3):
        return NotImplemented
    return _record("v2.resize", image, new_size, mode, antialias)


def integer_resize_fits(interpolation: Mode) -> bool:
    """True where stock torchvision resizes uint8 tensors in integers on this host."""
    return interpolation in _FILTERS and v2_geometry._do_native_uint8_resize_on_cpu(interpolation)


def _in_floats(name: str, image: Recording, size: tuple[Any, ...], mode: Mode, antialias: Any) -> Any:
    """What stock code computes in float32."""
    if image.dtype not in NUMERIC or not _is_size(size) or mode not in (*NEAREST_MODES, *SMOOTH_MODES):
        return NotImplemented
    if image.dtype == torch.float32 and size == tuple(image.shape[1:]):
        return image
    # To one column torch's result depends on how pixels lie in memory.
    if antialias and size[1] == 1 and mode not in NEAREST_MODES:
        return NotImplemented
    return _record(name, image, size, mode, antialias)


def _is_size(size: Sequence[Any]) -> bool:
    """Whether both sides are positive whole numbers."""
    return type(size[0]) is type(size[1]) is int and size[0] > 0 < size[1]


def _record(name: str, image: Recording, size: tuple[int, int], mode: Mode, antialias: Any) -> Any:
    return image.record(Op(name, (size, mode, bool(antialias))), (image.shape[0], *size))


def _resized_crop(
    family: str, image: Recording, top: Any, left: Any, height: Any, width: Any, size: Any,
    interpolation: Any = Mode.BILINEAR, antialias: bool | None = True,
) -> Any:  # fmt: skip
    cropped = crop("v2", image, top, left, height, width)
    if cropped is NotImplemented:
        return cropped
    return _resize_v2(family, cropped, size, interpolation, None, antialias)


# --- to kernel work

# What makes the weights of an axis: on the host from the old size, the new one and the filter; None on the device.
_Table = Callable[[int, int, int], tables.ResampleTable]
_WHOLE = (Kind.RESAMPLE_X, Kind.RESAMPLE_Y)
_FLOAT = (Kind.FILTER_X, Kind.FILTER_Y)


def _lower_image(lowered: LoweredImage, size: tuple[int, int], resample: int) -> None:
    width, height = size
    if resample == _NEAREST:
        x_scale, y_scale = lowered.width / width, lowered.height / height
        x_table = tables.nearest_table(x_scale * 0.5, x_scale, width, lowered.width)
        remap(lowered, x_table, tables.nearest_table(y_scale * 0.5, y_scale, height, lowered.height))
        return
    table = tables.pillow_table if resample in (Image.Resampling.HAMMING, Image.Resampling.LANCZOS) else None
    # Pillow resizes along y first where that saves more (found by trying all orders on 6,755 sizes).
    saved_rows, saved_columns = lowered.height - height, lowered.width - width
    begins_with_rows = saved_rows > max(0, 2 * saved_columns) and tables.pillow_chooses_its_order()
    for kind in _WHOLE[::-1] if begins_with_rows else _WHOLE:
        _add_axis(lowered, kind, height, width, resample, tables.PILLOW_PRECISION_BITS, table)


def _lower_bytes(lowered: LoweredImage, size: tuple[int, int], mode: Mode, antialias: bool) -> None:
    """In whole numbers, where stock torchvision does so on this host."""
    if lowered.is_float or not integer_resize_fits(mode):
        _lower_floats(lowered, size, mode, antialias)
        return
    # torch's bicubic uses the coefficient -0.5 when it antialiases, as Pillow does.
    table = tables.tensor_table if antialias else tables.tensor_table_without_antialias
    for kind in _WHOLE:
        _add_axis(lowered, kind, *size, _FILTERS[mode], 0, table)


def _lower_floats(lowered: LoweredImage, size: tuple[int, int], mode: Mode, antialias: bool) -> None:
    """In float32: floats, and what v1 makes of bytes; v2 as well, where this host has no AVX2."""
    if mode in NEAREST_MODES:
        x_table = tables.tensor_nearest_table(lowered.width, size[1], mode.value)
        remap(lowered, x_table, tables.tensor_nearest_table(lowered.height, size[0], mode.value))
        return
    for kind in _FLOAT:
        _add_axis(lowered, kind, *size, _FILTERS[mode], 0, None if antialias else tables.float_taps)


def _add_axis(
    lowered: LoweredImage, kind: Kind, height: int, width: int, resample: int, precision: int, table: _Table | None
) -> None:
    """RESAMPLE_X, RESAMPLE_Y, FILTER_X, FILTER_Y: (last input position, full output size, taps, -, -, first output
    position, first input position that exists, precision), and weights on the device, or two tables: first input
    positions, and weights [taps, output positions]. Where float32 values are mirrored at the border, precision is 1."""
    if kind in (Kind.RESAMPLE_X, Kind.FILTER_X):
        old, new, lowered.width = lowered.width, width, width
    else:
        old, new, lowered.height = lowered.height, height, height
    if old == new and (kind in _WHOLE or lowered.is_float):
        return
    if table is None:
        most_taps = math.ceil(tables.SUPPORT[resample] * max(old / new, 1.0)) * 2 + 1
        weights = ResizeWeights(old, new, most_taps, int(resample), precision)
        lowered.add(kind, old - 1, new, weights.taps, 0, 0, 0, 0, precision, weights=weights)
    else:
        first, taps_first, precision = table(old, new, int(resample))
        lowered.add(kind, old - 1, new, len(taps_first), 0, 0, 0, 0, precision, tables=(first, taps_first))


# --- the record


def _promise(op: Op) -> Promise:
    _, mode, antialias = op.args
    if mode in NEAREST_MODES:
        return EXACT
    floats = CLOSE if antialias else MOVED
    if op.name == "v2.resize" and integer_resize_fits(mode):
        return Promise(floats=floats)
    # torch without AVX2 adds in another order; with it the bits of antialiased bytes are equal.
    return Promise(1, 0.99, floats, is_rounded=not antialias or not integer_resize_fits(Mode.BILINEAR))


Operation(
    "resize",
    stock={
        "pil.resize": lambda image, size, resample: image.resize(size, resample),
        "v1.resize": lambda image, size, mode, antialias: F_tensor.resize(image, list(size), mode.value, antialias),
        "v2.resize": lambda image, size, mode, antialias: F_v2.resize_image(image, [*size], mode, antialias=antialias),
    },
    record={
        "v1.resize": _resize_v1, "v2.resize": _resize_v2, "v2.resized_crop": _resized_crop,
        "Image.resize": _resize_image, "pil.resize": _resize_pillow,
        "pil.resized_crop": functools.partial(_resized_crop_image, _FILTERS_BY_MODE),
        "pil.resized_crop_v2": functools.partial(_resized_crop_image, FILTERS_BY_NAME),
    },
    lower={"pil.resize": _lower_image, "v1.resize": _lower_floats, "v2.resize": _lower_bytes},
    promise=_promise,
    takes_palettes=True,
    overshoots=lambda op: op.args[1] == Mode.BICUBIC,
)  # fmt: skip
