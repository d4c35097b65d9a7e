"""Atoms: the few kinds of work that the kernels know, and the programs made of them.

Four classes (`Kind.role`):
    map: output position -> input position, each axis by itself. Crops, pads, flips, nearest resizing, translation.
    point: pixel -> pixel. Color operations.
    gather: reads several pixels or arbitrary positions. One axis of a resize, warps, sharpness, blur.
    statistic: needs to know the whole image first, then works on pixels. Contrast, autocontrast, equalize.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_sink.image.core.ops import Op
from torch_sink.triton_kernels import rows


class Kind(enum.IntEnum):
    """Kinds of atom; the numbers are the kernels' operation codes."""

    SHIFT = rows.SHIFT
    FLIP = rows.FLIP
    EDGE = rows.EDGE
    REFLECT = rows.REFLECT
    SYMMETRIC = rows.SYMMETRIC
    REMAP = rows.REMAP
    ERASE = rows.ERASE
    PASTE = rows.PASTE
    BRIGHTNESS = rows.BRIGHTNESS
    SATURATION = rows.SATURATION
    INVERT = rows.INVERT
    POSTERIZE = rows.POSTERIZE
    SOLARIZE = rows.SOLARIZE
    GRAY = rows.GRAY
    HUE = rows.HUE
    PERMUTE = rows.PERMUTE
    NORMALIZE = rows.NORMALIZE
    TO_BYTE = rows.TO_BYTE
    CLAMP = rows.CLAMP
    LOOKUP = rows.LOOKUP
    VALUES = rows.VALUES
    CONTRAST = rows.CONTRAST
    AUTOCONTRAST = rows.AUTOCONTRAST
    EQUALIZE = rows.EQUALIZE
    BLEND_MEAN = rows.BLEND_MEAN
    RESAMPLE_X = rows.RESAMPLE_X
    RESAMPLE_Y = rows.RESAMPLE_Y
    AFFINE = rows.AFFINE
    SHARPNESS = rows.SHARPNESS
    MIX = rows.MIX
    FILTER_X = rows.FILTER_X
    FILTER_Y = rows.FILTER_Y
    GRID = rows.GRID
    WARP = rows.WARP
    BOX_BLUR = rows.BOX_BLUR

    @functools.cached_property
    def role(self) -> str:
        """ "map", "point", "statistic" or "gather"."""
        return "map" if self < 10 else "point" if self < 23 else "statistic" if self < 30 else "gather"


class Formula(enum.IntEnum):
    """Whose arithmetic an operation follows: Pillow's, or that of torchvision's kernels for tensors."""

    PILLOW = rows.PILLOW
    TENSOR_V1 = rows.TENSOR_V1
    TENSOR_V2 = rows.TENSOR_V2


class ResizeWeights(NamedTuple):
    """Weights of one axis of a resize, which the device makes before the stages.

    Attributes:
        in_size: pixels.
        out_size: pixels.
        taps: at most so many positions are read for one of the output.
        resample: number of the filter.
        precision: bits after the point of whole weights; 0: float32 as torch rounds them.
    """

    in_size: int
    out_size: int
    taps: int
    resample: int
    precision: int


class Atom(NamedTuple):
    """One piece of kernel work.

    Attributes:
        kind: what it does.
        size: (height, width) of its output.
        values: integers for the kernel; their meaning is said where each kind is made below.
        factor: a float32 parameter.
        tables: int32 arrays that the kernel looks things up in.
        formula: whose arithmetic it follows.
        branches: what it mixes with its input.
        fill: what it writes where it has no pixels, a value for each of three channels; () where it has none.
        weights: of a resize; None where they are in `tables`.
    """

    kind: Kind
    size: tuple[int, int]
    values: tuple[int, ...] = ()
    factor: float = 0.0
    tables: tuple[np.ndarray, ...] = ()
    formula: Formula = Formula.PILLOW
    branches: tuple[Branch, ...] = ()
    fill: tuple[float, ...] = ()
    weights: ResizeWeights | None = None


class Branch(NamedTuple):
    """What becomes of an image on one of several ways, before they are mixed; it keeps its size.

    Attributes:
        weight: of its result in the mix, float32.
        atoms: kernel work, in order.
    """

    weight: float
    atoms: tuple[Atom, ...]


class Program(NamedTuple):
    """What one image goes through.

    Attributes:
        atoms: kernel work, in order.
        value_ops: calls that turn each uint8 value that the kernels leave into one of a type that they do not write.
        channels: 1 or 3, of the source.
        out_channels: 1 or 3, of the result.
        size: (height, width) of the result.
    """

    atoms: tuple[Atom, ...]
    value_ops: tuple[Op, ...]
    channels: int
    out_channels: int
    size: tuple[int, int]


def float_bits(*values: float) -> tuple[int, ...]:
    """Floats, rounded to float32, as the integers of their bits: how the kernels read them."""
    try:
        return struct.unpack(f"={len(values)}i", struct.pack(f"={len(values)}f", *values))
    except OverflowError:  # NumPy makes them infinite
        return tuple(np.array(values, dtype=np.float64).astype(np.float32).view(np.int32).tolist())


class Lowering:
    """The state while the calls of one image are lowered, in order.

    Attributes:
        height: of the image so far.
        width: of the image so far.
        channels: 1 or 3.
        is_uint8: True while the image is of bytes; False from a conversion to floats on.
        is_float: True where the values are float32 in the kernels. Where both are False, a table of 256 values still
            has to turn the bytes of the kernels into floats: `value_ops`.
        atoms: kernel work so far.
        value_ops: calls that only change values, not in `atoms` yet.
        erased: for each erased box of such floats: its atom, how many value calls came before it, its values
            [C, H, W] or [C, 1, 1].
    """

    def __init__(self, height: int, width: int, channels: int) -> None:
        self.height, self.width, self.channels = height, width, channels
        self.is_uint8, self.is_float = True, False
        self.atoms: list[Atom] = []
        self.value_ops: list[Op] = []
        self.erased: list[tuple[int, int, torch.Tensor]] = []

    def add(self, kind: Kind, *values: int, **fields: Any) -> None:
        """Adds an atom whose output has the size of the image so far; `fields` are those of `Atom`."""
        self.atoms.append(Atom(kind, (self.height, self.width), values, **fields))

    def fill_of(self, fill: Any) -> tuple[float, ...]:
        """A fill as the kernels have it: bytes, or floats as they are."""
        if not self.is_float:
            return color_of(tuple(fill) if isinstance(fill, list) else fill)
        return three(fill if isinstance(fill, (tuple, list)) else (fill,))

    def resize_to(self, height: int, width: int) -> tuple[int, int]:
        """Sets the new size and returns the old one."""
        old = self.height, self.width
        self.height, self.width = height, width
        return old


FORMULAS = {"pil": Formula.PILLOW, "v1": Formula.TENSOR_V1, "v2": Formula.TENSOR_V2}
FAMILIES = tuple(FORMULAS)


def by_formula(name: str, function: Callable[..., None], families: Sequence[str] = ("v1", "v2")) -> dict[str, Any]:
    """What turns calls of one name into atoms, for each family: `function` with the family's formula."""
    return {f"{family}.{name}": functools.partial(function, formula=FORMULAS[family]) for family in families}


@functools.lru_cache(maxsize=1024)
def color_of(fill: Any) -> tuple[float, ...]:
    """A fill of bytes: a value for each of three channels, cut off at 0 and 255 as Pillow does; None is black."""
    values = fill if isinstance(fill, tuple) else (0 if fill is None else fill,)
    return three(tuple(float(int(min(max(value, 0), 255))) for value in values))


def three(values: Any) -> tuple[float, ...]:
    """One value a channel; one alone stands for all."""
    return tuple(values) * 3 if len(values) == 1 else tuple(values)
