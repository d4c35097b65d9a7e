"""Affine and perspective transforms, rotations and elastic deformation of tensors.

torch makes a grid of source positions in [-1, 1] and samples it with `grid_sample`. Matrices are scaled here, as torch
does it in float32; the kernel makes the grid from them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torchvision.transforms import InterpolationMode as Mode
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms.v2 import functional as F_v2
from torchvision.transforms.v2.functional import _geometry as v2_geometry

from torch_sink.image.core.arguments import fill_of_each_channel, fits_range, is_constant
from torch_sink.image.core.lowering import FORMULAS, LoweredImage, three
from torch_sink.image.core.ops import MOVED, NEAREST, NUMERIC, Op, Operation, Promise, TensorArgument
from torch_sink.image.core.recording import Recording
from torch_sink.image.operations.moves import turned
from torch_sink.triton_kernels.rows import DISPLACED, MATRIX, NO_FILL, PERSPECTIVE, Kind

# The number of a mode is its place here.
_MODES = ("nearest", "bilinear")
_Fill = tuple[float, ...] | None

# --- what the recorders share


def _record(image: Recording, name: str, parameters: tuple[Any, ...], mode: Any, fill: Any, size: Any = None) -> Any:
    """Records `name(*parameters, mode, fill)`; `size` (height, width) where the call changes it."""
    channels, height, width = image.shape
    fills = fill_of_each_channel(image, fill)
    height, width = size or (height, width)
    if image.dtype not in NUMERIC or fills is NotImplemented or mode not in _MODES or min(height, width) <= 0:
        return NotImplemented
    return image.record(Op(name, (*parameters, mode, fills)), (channels, height, width))


def _mode_v2(interpolation: Any) -> str:
    return Mode(v2_geometry._check_interpolation(interpolation)).value


def _promise(op: Op) -> Promise:
    return NEAREST if op.args[-2] == "nearest" else Promise(1, 0.99, MOVED, is_rounded=True)


# Floats leave [0, 1] by a fill that lies outside.
_warp = functools.partial(Operation, promise=_promise, leaves_range=lambda op: not fits_range(op.args[-1] or ()))


# --- grids

# The tables of a grid. Of MATRIX and PERSPECTIVE: one, of the position of the first column and row, and three rows of
# three coefficients (across, down, and what both are divided by). Of DISPLACED: the undisplaced positions of all
# columns, then of all rows; and the displacement [H, W, 2]. All are float32 by their bits.
_Size = tuple[int, int] | None


def _lower_grid(
    family: str, lowered: LoweredImage, kind: int, tables: tuple[np.ndarray, ...], size: _Size, mode: str, fill: _Fill
) -> None:
    """GRID: (input width, input height, mode, -, -, kind of grid), a fill, and the tables of the grid."""
    height, width = lowered.resize_to(*(size or (lowered.height, lowered.width)))
    # How the fill is worked in: not at all, or as v1 or v2 do it.
    rule = NO_FILL if fill is None else FORMULAS[family]
    values = width, height, _MODES.index(mode), 0, 0, kind
    lowered.add(Kind.GRID, *values, fill=three(fill or (0.0,)), formula=rule, tables=tables)


def _lower_affine(
    family: str, lowered: LoweredImage, matrix: Sequence[float], size: _Size, mode: str, fill: _Fill
) -> None:
    """Adds the grid of an affine transform whose origin is the middle of the image, before and after it."""
    new_height, new_width = size or (lowered.height, lowered.width)
    table = _bits((1 - new_width) * 0.5, (1 - new_height) * 0.5, *_halved(lowered, matrix), 0, 0, 0)
    _lower_grid(family, lowered, MATRIX, (table,), size, mode, fill)


def _lower_perspective(
    family: str, lowered: LoweredImage, coefficients: Sequence[float], mode: str, fill: _Fill
) -> None:
    """Adds the grid of a perspective transform of positions in pixels, whose centers are at halves."""
    *matrix, g, h = coefficients
    table = _bits(0.5, 0.5, *_halved(lowered, matrix), g, h, 1)
    _lower_grid(family, lowered, PERSPECTIVE, (table,), None, mode, fill)


def _lower_elastic(family: str, lowered: LoweredImage, field: TensorArgument, mode: str, fill: _Fill) -> None:
    """Adds the grid of every position, displaced."""
    displacement = field.tensor.contiguous().view(torch.int32).flatten().numpy()
    tables = _identity_positions(lowered.height, lowered.width), displacement
    _lower_grid(family, lowered, DISPLACED, tables, None, mode, fill)


def _halved(lowered: LoweredImage, matrix: Sequence[float]) -> np.ndarray:
    """A matrix [2, 3] in pixels as float32 [6], in fractions of half the image."""
    halves = np.array([[0.5 * lowered.width], [0.5 * lowered.height]], np.float32)
    return (np.array(matrix, np.float32).reshape(2, 3) / halves).ravel()


def _bits(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.int32)


@functools.lru_cache(maxsize=64)
def _identity_positions(height: int, width: int) -> np.ndarray:
    """The positions of all columns, then of all rows, in [-1, 1]: float32 by their bits, as `linspace` rounds them."""
    ends = [((1 - side) / side, (side - 1) / side, side) for side in (width, height)]
    positions = [torch.linspace(*end, dtype=torch.float32, device="cpu") for end in ends]
    return torch.cat(positions).view(torch.int32).numpy()


# --- affine


def _affine_v1(family: str, image: Recording, matrix: Any, interpolation: str = "nearest", fill: Any = None) -> Any:
    return _record(image, "v1.affine", (tuple(matrix), None), interpolation, fill)


def _stock_v1(image: Recording, matrix: Sequence[float], size: _Size, mode: str, fill: _Fill) -> Any:
    if size is None:
        return F_tensor.affine(image, list(matrix), mode, fill)
    return F_tensor.rotate(image, list(matrix), mode, True, fill)


def _affine_v2(
    family: str, image: Recording, angle: Any, translate: Any, scale: Any, shear: Any,
    interpolation: Any = Mode.NEAREST, fill: Any = None, center: Any = None,
) -> Any:  # fmt: skip
    mode = v2_geometry._check_interpolation(interpolation)
    angle, translate, shear, center = v2_geometry._affine_parse_args(angle, translate, scale, shear, mode, center)
    parameters = angle, tuple(translate), scale, tuple(shear), None if center is None else tuple(center)
    return _record(image, "v2.affine", parameters, mode.value, fill)


def _lower_affine_v2(
    lowered: LoweredImage, angle: float, translate: Any, scale: float, shear: Any, center: Any, *sampling: Any
) -> None:
    matrix = _inverse_affine(lowered.height, lowered.width, angle, translate, scale, shear, center)
    _lower_affine("v2", lowered, matrix, None, *sampling)


def _inverse_affine(
    height: int, width: int, angle: float, translate: Any, scale: float, shear: Any, center: Any
) -> list[float]:
    """The inverse of an affine transform, as the kernels of `transforms.v2` compute it."""
    middle = [0.0, 0.0]
    if center is not None:
        middle = [at - side * 0.5 for at, side in zip(center, (width, height), strict=True)]
    translation = [float(value) for value in translate]
    return v2_geometry._get_inverse_affine_matrix(middle, angle, translation, scale, list(shear))


_warp(
    "affine",
    stock={
        "v1.affine": _stock_v1,
        "v2.affine": lambda image, angle, translate, scale, shear, center, mode, fill: F_v2.affine_image(
            image, angle, translate, scale, shear, Mode(mode), fill, center
        ),
    },
    record={"v1.affine": _affine_v1, "v2.affine": _affine_v2},
    lower={"v1.affine": functools.partial(_lower_affine, "v1"), "v2.affine": _lower_affine_v2},
)

# --- rotations


def _rotate_v1(
    family: str, image: Recording, matrix: Any, interpolation: str = "nearest", expand: bool = False, fill: Any = None
) -> Any:
    if not expand:
        return _affine_v1(family, image, matrix, interpolation, fill)
    _, height, width = image.shape
    size = F_tensor._compute_affine_output_size(matrix, width, height)[::-1]
    return _record(image, "v1.affine", (tuple(matrix), size), interpolation, fill, size)


def _rotate_v2(
    family: str, image: Recording, angle: Any, interpolation: Any = Mode.NEAREST, expand: bool = False,
    center: Any = None, fill: Any = None,
) -> Any:  # fmt: skip
    _, height, width = image.shape
    angle = angle % 360
    if center is None and (angle in (0, 180) or (angle in (90, 270) and (expand or height == width))):
        return turned(image, int(angle) // 90)
    size = None
    if expand:
        matrix = _inverse_rotation(height, width, angle, center)
        size = v2_geometry._compute_affine_output_size(matrix, width, height)[::-1]
    parameters = angle, None if center is None else tuple(center), size
    return _record(image, "v2.rotate", parameters, _mode_v2(interpolation), fill, size)


def _inverse_rotation(height: int, width: int, angle: float, center: Any) -> list[float]:
    return _inverse_affine(height, width, -angle, (0.0, 0.0), 1.0, (0.0, 0.0), center)


def _lower_rotated(lowered: LoweredImage, angle: float, center: Any, size: _Size, *sampling: Any) -> None:
    matrix = _inverse_rotation(lowered.height, lowered.width, angle, center)
    _lower_affine("v2", lowered, matrix, size, *sampling)


_warp(
    "rotate",
    stock={
        "v2.rotate": lambda image, angle, center, size, mode, fill: F_v2.rotate_image(
            image, angle, Mode(mode), size is not None, center, fill
        ),
    },
    record={"v1.rotate": _rotate_v1, "v2.rotate": _rotate_v2},
    lower={"v2.rotate": _lower_rotated},
)


# --- perspective


def _perspective_v1(
    family: str, image: Recording, perspective_coeffs: Any, interpolation: str = "bilinear", fill: Any = None
) -> Any:
    return _record(image, "v1.perspective", (tuple(perspective_coeffs),), interpolation, fill)


def _perspective_v2(
    family: str, image: Recording, startpoints: Any, endpoints: Any, interpolation: Any = Mode.BILINEAR,
    fill: Any = None, coefficients: Any = None,
) -> Any:  # fmt: skip
    values = v2_geometry._perspective_coefficients(startpoints, endpoints, coefficients)
    return _record(image, "v2.perspective", (tuple(values),), _mode_v2(interpolation), fill)


_warp(
    "perspective",
    stock={
        "v1.perspective": lambda image, values, mode, fill: F_tensor.perspective(image, list(values), mode, fill),
        "v2.perspective": lambda image, values, mode, fill: F_v2.perspective_image(
            image, None, None, Mode(mode), fill, list(values)
        ),
    },
    record={"v1.perspective": _perspective_v1, "v2.perspective": _perspective_v2},
    lower={f"{family}.perspective": functools.partial(_lower_perspective, family) for family in ("v1", "v2")},
)

# --- elastic deformation


def _elastic(
    family: str, image: Recording, displacement: Any, interpolation: Any = Mode.BILINEAR, fill: Any = None
) -> Any:
    if not is_constant(displacement) or (family == "v1" and displacement.dtype != torch.float32):
        return NotImplemented
    if displacement.shape != (1, *image.shape[1:], 2):
        return NotImplemented
    # A copy, for the caller may go on to write to its own.
    field = TensorArgument(displacement.to(torch.float32, copy=True))
    if family == "v1":
        mode = "bilinear" if interpolation is Mode.BILINEAR else interpolation
        return _record(image, "v1.elastic_transform", (field,), mode, fill)
    return _record(image, "v2.elastic", (field,), _mode_v2(interpolation), fill)


_warp(
    "elastic",
    stock={
        "v1.elastic_transform": lambda image, field, mode, fill: F_tensor.elastic_transform(
            image, field.tensor, mode, fill
        ),
        "v2.elastic": lambda image, field, mode, fill: F_v2.elastic_image(image, field.tensor, Mode(mode), fill),
    },
    record={"v1.elastic_transform": _elastic, "v2.elastic": _elastic},
    lower={name: functools.partial(_lower_elastic, name[:2]) for name in ("v1.elastic_transform", "v2.elastic")},
)
