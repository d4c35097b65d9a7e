"""Atoms: the few kinds of work that the kernels know, and the programs made of them.

Four classes (`Kind.role`):
    map: output position -> input position, each axis by itself. Crops, pads, flips, nearest resizing, translation.
    point: pixel -> pixel. Color operations.
    gather: reads several pixels or arbitrary positions. One axis of a resize, warps, sharpness, blur.
    statistic: needs the histogram of the whole image first, then works on pixels. Contrast, autocontrast, equalize.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_sink.image.core.ops import Op


class Kind(enum.IntEnum):
    """Kinds of atom; the numbers are the kernels' operation codes."""

    SHIFT = 1
    FLIP = 2
    EDGE = 3
    REFLECT = 4
    SYMMETRIC = 5
    REMAP = 6
    ERASE = 7
    PASTE = 8
    BRIGHTNESS = 10
    SATURATION = 11
    INVERT = 12
    POSTERIZE = 13
    SOLARIZE = 14
    GRAY = 15
    HUE = 16
    LOOKUP = 17
    PERMUTE = 18
    CONTRAST = 20
    AUTOCONTRAST = 21
    EQUALIZE = 22
    RESAMPLE_X = 31
    RESAMPLE_Y = 32
    AFFINE = 33
    SHARPNESS = 34
    WARP = 35
    BLUR = 40
    BLUR_X = 41
    BLUR_Y = 42
    RESIZE_X = 44
    RESIZE_Y = 45
    MIX = 46
    BOX_BLUR = 47
    GRID = 43

    @property
    def role(self) -> str:
        """ "map", "point", "statistic" or "gather"."""
        return "map" if self < 10 else "point" if self < 20 else "statistic" if self < 30 else "gather"


class Formula(enum.IntEnum):
    """Whose arithmetic an operation follows: Pillow's, or that of torchvision's kernels for tensors."""

    PILLOW = 0
    TENSOR_V1 = 1
    TENSOR_V2 = 2


class FloatKind(enum.IntEnum):
    """Kinds of atom on float32 images, besides the maps of `Kind`; the numbers are the kernel's operation codes."""

    NORMALIZE = 50
    SCALE = 51
    INVERT = 52
    GRAY = 55
    SATURATION = 56
    HUE = 57
    PERMUTE = 58
    TO_BYTE = 59
    CONTRAST = 70
    RESAMPLE_X = 80
    RESAMPLE_Y = 81
    BILINEAR = 82
    WARP = 83
    BLUR = 84
    SHARPNESS = 85
    TURN = 86
    CUBIC = 87

    @property
    def role(self) -> str:
        """ "point", "statistic" or "gather"."""
        return "point" if self < 70 else "statistic" if self < 80 else "gather"


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
    """

    kind: Kind | FloatKind
    size: tuple[int, int]
    values: tuple[int, ...] = ()
    factor: float = 0.0
    tables: tuple[np.ndarray, ...] = ()
    formula: Formula = Formula.PILLOW
    branches: tuple[Branch, ...] = ()


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
        value_ops: the calls from the conversion to a tensor on that change values.
        channels: 1 or 3, of the source.
        value_channels: 1 or 3, where `value_ops` apply.
        out_channels: 1 or 3, of the result.
        size: (height, width) of the result.
        float_atoms: kernel work on the float32 values that `value_ops` make, in order; None where they are the result.
    """

    atoms: tuple[Atom, ...]
    value_ops: tuple[Op, ...]
    channels: int
    value_channels: int
    out_channels: int
    size: tuple[int, int]
    float_atoms: tuple[Atom, ...] | None = None


_UINT8_CONVERSIONS = frozenset(("pil_to_tensor", "to_image"))


class Lowering:
    """The state while the calls of one image are lowered, in order.

    Attributes:
        height: of the image so far.
        width: of the image so far.
        channels: 1 or 3.
        atoms: kernel work so far.
        value_ops: calls so far that only change values.
        grid_kind: the kind of atom that samples an image at the positions of a grid.
        erased: for each erased box of floats: its atom, how many value calls came before it, its values [C, H, W] or
            [C, 1, 1].
    """

    grid_kind = Kind.GRID

    def __init__(self, height: int, width: int, channels: int) -> None:
        self.height, self.width, self.channels = height, width, channels
        self.atoms: list[Atom] = []
        self.value_ops: list[Op] = []
        self.erased: list[tuple[int, int, torch.Tensor]] = []

    def add(
        self,
        kind: Kind | FloatKind,
        *values: int,
        factor: float = 0.0,
        tables: tuple[np.ndarray, ...] = (),
        formula: Formula = Formula.PILLOW,
    ) -> None:
        self.atoms.append(Atom(kind, (self.height, self.width), values, factor, tables, formula))

    @property
    def is_uint8(self) -> bool:
        """True while no call has turned the values into floats."""
        return all(op.name in _UINT8_CONVERSIONS for op in self.value_ops)

    def resize_to(self, height: int, width: int) -> tuple[int, int]:
        """Sets the new size and returns the old one."""
        old = self.height, self.width
        self.height, self.width = height, width
        return old


# name of a recorded call -> what turns it into atoms
LOWER: dict[str, Callable[..., None]] = {}


def lowers(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(function: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            if name in LOWER:
                raise ValueError(f"operation {name!r} is lowered twice")
            LOWER[name] = function
        return function

    return register


def packed_color(fill: Any) -> int:
    """A color as the kernels read it: 8 bits a channel, the first lowest; one value fills all channels.

    Pillow cuts values off at 0 and 255.
    """
    if fill is None:
        return 0
    values = [min(max(value, 0), 255) for value in (fill if isinstance(fill, tuple) else (fill,))]
    red, green, blue = values * 3 if len(values) == 1 else values
    return red | green << 8 | blue << 16
