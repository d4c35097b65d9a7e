"""The state while calls on float32 images become atoms, and the registry of what turns each call into them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torch_sink.image.core.atoms import Atom, FloatKind, Kind


class FloatLowering:
    """The state while the calls of one image on its float32 values are lowered, in order.

    Attributes:
        height: of the image so far.
        width: of the image so far.
        channels: 1 or 3.
        atoms: kernel work so far.
        grid_kind: the kind of atom that samples an image at the positions of a grid.
    """

    grid_kind = FloatKind.WARP

    def __init__(self, height: int, width: int, channels: int) -> None:
        self.height, self.width, self.channels = height, width, channels
        self.atoms: list[Atom] = []

    def add(self, kind: Kind | FloatKind, *values: int, tables: tuple[np.ndarray, ...] = ()) -> None:
        self.atoms.append(Atom(kind, (self.height, self.width), values, tables=tables))

    def resize_to(self, height: int, width: int) -> tuple[int, int]:
        """Sets the new size and returns the old one."""
        old = self.height, self.width
        self.height, self.width = height, width
        return old


# name of a recorded call -> what turns it into atoms
LOWER_FLOAT: dict[str, Callable[..., None]] = {}


def lowers_float(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(function: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            if name in LOWER_FLOAT:
                raise ValueError(f"operation {name!r} is lowered twice")
            LOWER_FLOAT[name] = function
        return function

    return register


def bits(*values: float) -> tuple[int, ...]:
    """Floats, rounded to float32, as the integers of their bits: how the kernels read them."""
    return tuple(np.array(values, dtype=np.float64).astype(np.float32).view(np.int32).tolist())


def three(values: tuple[float, ...]) -> tuple[float, ...]:
    """One value a channel; one alone stands for all."""
    return values * 3 if len(values) == 1 else values
