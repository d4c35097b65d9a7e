"""Grids of source positions, of which the kernels sample an image as `grid_sample` does.

torch makes a grid of source positions in [-1, 1] and samples it with `grid_sample`. The matrices are scaled here, in
float32 as torch does it; the kernel makes the grid from them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torchvision.transforms.v2.functional import _geometry as v2_geometry

from torch_sink.image.core.atoms import FORMULAS, Formula, Kind, Lowering, three
from torch_sink.image.core.tensor_argument import TensorArgument

# What the kernel reads of the kind of a grid, and of how the fill is worked in: not at all, or as v1 or v2 do it.
AFFINE, PERSPECTIVE, DISPLACED = range(3)


NO_FILL = Formula.PILLOW


# The number of a mode is its place here.
MODES = ("nearest", "bilinear")


def affine_matrix(
    height: int, width: int, angle: float, translate: Any, scale: float, shear: Any, center: Any
) -> list[float]:
    """The inverse of an affine transform, as the kernels of `transforms.v2` compute it."""
    middle = [0.0, 0.0]
    if center is not None:
        middle = [at - side * 0.5 for at, side in zip(center, (width, height), strict=True)]
    translation = [float(value) for value in translate]
    return v2_geometry._get_inverse_affine_matrix(middle, angle, translation, scale, list(shear))


def rotation_matrix(height: int, width: int, angle: float, center: Any) -> list[float]:
    """The inverse of a rotation, as the kernels of `transforms.v2` compute it."""
    return affine_matrix(height, width, -angle, (0.0, 0.0), 1.0, (0.0, 0.0), center)


class Grid(NamedTuple):
    """Source positions of an image, as tables for the kernel.

    Attributes:
        kind: AFFINE, PERSPECTIVE or DISPLACED.
        tables: float32 bits as int32. AFFINE and PERSPECTIVE: one table, the position of the first column and row, and
            three rows of three coefficients (across, down, and what both are divided by). DISPLACED: the undisplaced
            positions of all columns, then of all rows; and the displacement [H, W, 2].
    """

    kind: int
    tables: tuple[np.ndarray, ...]


def _bits(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.int32).flatten().numpy()


def _floats(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def affine_grid(matrix: Sequence[float], height: int, width: int, new_height: int, new_width: int) -> Grid:
    """The grid of an affine transform; the origin is the middle of the image, before and after it."""
    theta = _floats(matrix).view(2, 3) / _floats([[0.5 * width], [0.5 * height]])
    origin = _floats([(1 - new_width) * 0.5, (1 - new_height) * 0.5])
    return Grid(AFFINE, (_bits(torch.cat([origin, theta.flatten(), _floats([0, 0, 0])])),))


def perspective_grid(coefficients: Sequence[float], height: int, width: int) -> Grid:
    """The grid of a perspective transform, in pixels whose centers are at halves."""
    *numerators, g, h = coefficients
    theta = _floats(numerators).view(2, 3) / _floats([[0.5 * width], [0.5 * height]])
    origin, divisor = _floats([0.5, 0.5]), _floats([g, h, 1.0])
    return Grid(PERSPECTIVE, (_bits(torch.cat([origin, theta.flatten(), divisor])),))


def displaced_grid(displacement: torch.Tensor, height: int, width: int) -> Grid:
    """The grid of an elastic deformation; `displacement` float32 [1, H, W, 2]."""
    return Grid(DISPLACED, (_identity_positions(height, width), _bits(displacement)))


@functools.lru_cache(maxsize=64)
def _identity_positions(height: int, width: int) -> np.ndarray:
    ends = [((1 - side) / side, (side - 1) / side, side) for side in (width, height)]
    return _bits(torch.cat([torch.linspace(*end, dtype=torch.float32, device="cpu") for end in ends]))


def lower_grid(
    family: str, state: Lowering, grid: Grid, mode: str, fill: tuple[float, ...] | None, size: tuple[int, int]
) -> None:
    """GRID: (input width, input height, mode, -, -, kind of grid), a fill, and the tables of the grid."""
    height, width = state.resize_to(*size)
    rule = NO_FILL if fill is None else FORMULAS[family]
    fills = three((0.0,) if fill is None else fill)
    values = width, height, MODES.index(mode), 0, 0, grid.kind
    state.add(Kind.GRID, *values, fill=fills, formula=rule, tables=grid.tables)


def same_size(family: str, make: Callable[..., Grid]) -> Callable[..., None]:
    """Lowers a call of (parameters of `make`, mode, fill), whose result has the size of its input."""

    def lower(state: Lowering, *args: object) -> None:
        *parameters, mode, fill = args
        size = state.height, state.width
        lower_grid(family, state, make(*parameters, *size), mode, fill, size)  # type: ignore[arg-type]

    return lower


def grid_v1(matrix: Sequence[float], height: int, width: int) -> Grid:
    return affine_grid(matrix, height, width, height, width)


def grid_v2(
    angle: float, translate: tuple[int, int], scale: float, shear: tuple[float, float],
    center: tuple[float, float] | None, height: int, width: int,
) -> Grid:  # fmt: skip
    return grid_v1(affine_matrix(height, width, angle, translate, scale, shear, center), height, width)


def displaced(displacement: TensorArgument, height: int, width: int) -> Grid:
    return displaced_grid(displacement.tensor, height, width)
