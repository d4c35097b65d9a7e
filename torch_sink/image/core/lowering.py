"""Recorded calls -> atoms: the few kinds of work that the kernels know.

What follows the conversion to a float tensor is often a function of one uint8 value and becomes a table of 256 entries
a channel, made by the stock code itself. Where a call needs more (other channels, neighbors, a fill), the image goes
on in float32 from there.

Atoms are of four classes (`Kind.role`):
    map: output position -> input position, each axis by itself. Crops, pads, flips, nearest resizing, translation.
    point: pixel -> pixel. Color operations.
    gather: reads several pixels or arbitrary positions. One axis of a resize, warps, sharpness, blur.
    statistic: needs to know the whole image first, then works on pixels. Contrast, autocontrast, equalize.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_sink.image.core.fallback import executing, image_of
from torch_sink.image.core.ops import LOWER, PIXEL_CALLS, VALUE_CALLS, Op, makes_bytes, makes_floats, replay
from torch_sink.triton_kernels import rows
from torch_sink.triton_kernels.rows import Formula, Kind


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


_NAME = operator.itemgetter(0)  # of a call
_FLOATS, _BITS = ([struct.Struct(f"={count}{kind}") for count in range(rows.OPERATION_COLUMNS)] for kind in "fi")


def float_bits(*values: float) -> tuple[int, ...]:
    """Floats, rounded to float32, as the integers of their bits: how the kernels read them."""
    count = len(values)
    try:
        return _BITS[count].unpack(_FLOATS[count].pack(*values))
    except OverflowError:  # NumPy makes them infinite
        return tuple(np.array(values, dtype=np.float64).astype(np.float32).view(np.int32).tolist())


_LARGEST_FLOAT = float(np.finfo(np.float32).max)  # of float32

# The code of an atom is its kind, and its formula above these bits.
KIND_BITS = 6
KIND_MASK = (1 << KIND_BITS) - 1

# Columns of an atom while it is lowered: behind those of the kernels, height and width of its output.
OUTPUT_HEIGHT, OUTPUT_WIDTH, ATOM_COLUMNS = (rows.OPERATION_COLUMNS + more for more in range(3))
ATOM = struct.Struct(f"={ATOM_COLUMNS}i")
ATOM_BYTES = ATOM.size
# A kind, so many values, zeros, the formula and the factor, and the size of the output; more values take their places.
_ROWS = [struct.Struct(f"={1 + count}i{4 * (rows.FORMULA - 1 - count)}xif2i") for count in range(rows.FORMULA)]
_LONG_ROWS = [struct.Struct(f"={1 + count}i{4 * (OUTPUT_HEIGHT - 1 - count)}x2i") for count in range(OUTPUT_HEIGHT)]


class LoweredImage:
    """The calls of one image, lowered in order: the atoms that it goes through, as the kernels read them.

    Attributes:
        height: of the image so far.
        width: of the image so far.
        channels: 1 or 3.
        is_uint8: True while the image is of bytes; False from a conversion to floats on.
        is_float: True where the values are float32 in the kernels. Where both are False, a table of 256 values that
            turns the bytes of the kernels into floats is still to come: `value_ops`.
        atoms: int32 [atoms, ATOM_COLUMNS]; what each kind reads in its row is said where it is made.
        codes: all that the stages depend on but for sizes: the kind and the formula of each atom.
        tables: {position of an atom: int32 arrays that it looks things up in}.
        weights: {position of an atom: the weights of a resize that it reads, made on the device}.
        value_ops: calls on bytes that only change values, not in `atoms` yet.
    """

    __slots__ = (
        *("height", "width", "channels", "is_uint8", "is_float", "atoms", "codes"),
        *("tables", "weights", "value_ops"),
    )

    def __init__(self, height: int, width: int, channels: int) -> None:
        self.height, self.width, self.channels = height, width, channels
        self.is_uint8, self.is_float = True, False
        self.atoms = bytearray()
        self.codes: list[int] = []
        self.tables: dict[int, tuple[np.ndarray, ...]] = {}
        self.weights: dict[int, ResizeWeights] = {}
        self.value_ops: list[Op] = []

    def add(
        self, kind: int, *values: int, factor: float = 0.0, formula: int = 0, fill: Sequence[float] = (),
        tables: tuple[np.ndarray, ...] = (), weights: ResizeWeights | None = None,
    ) -> None:  # fmt: skip
        """Adds an atom whose output has the size of the image so far.

        Args:
            kind: what it does.
            values: integers for the kernel.
            factor: a float32 parameter.
            formula: whose arithmetic it follows.
            fill: what it writes where it has no pixels, a value for each of three channels.
            tables: int32 arrays that the kernel looks things up in.
            weights: of a resize, where they are not in `tables`.
        """
        atoms, begin, codes, count = self.atoms, len(self.atoms), self.codes, len(values)
        if count >= rows.FORMULA:
            atoms += _LONG_ROWS[count].pack(kind, *values, self.height, self.width)
        elif -_LARGEST_FLOAT <= factor <= _LARGEST_FLOAT:
            atoms += _ROWS[count].pack(kind, *values, formula, factor, self.height, self.width)
        else:
            atoms += _ROWS[count].pack(kind, *values, formula, np.float32(factor), self.height, self.width)
        if fill:
            _BITS[3].pack_into(atoms, begin + 4 * rows.FILL, *float_bits(*fill))
        if tables:
            self.tables[len(codes)] = tables
        elif weights is not None:
            self.weights[len(codes)] = weights
        codes.append(kind | formula << KIND_BITS)

    def extend(self, other: LoweredImage) -> None:
        """Adds atoms that were lowered for an image of another size, and keep the size of any image."""
        for at, tables in other.tables.items():
            self.tables[len(self.codes) + at] = tables
        size = _BITS[2].pack(self.height, self.width)
        for end in range(ATOM_BYTES, len(other.atoms) + 1, ATOM_BYTES):
            self.atoms += other.atoms[end - ATOM_BYTES : end - len(size)] + size
        self.codes += other.codes

    def atom(self, at: int) -> tuple[int, ...]:
        """The row of one."""
        return ATOM.unpack_from(self.atoms, ATOM_BYTES * at)

    def fill_of(self, fill: Any) -> tuple[float, ...]:
        """A fill as the kernels have it: bytes, or floats as they are."""
        if not self.is_float:
            return byte_fill(tuple(fill) if isinstance(fill, list) else fill)
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
def byte_fill(fill: Any) -> tuple[float, ...]:
    """A fill of bytes: a value for each of three channels, cut off at 0 and 255 as Pillow does; None is black."""
    values = fill if isinstance(fill, tuple) else (0 if fill is None else fill,)
    return three(tuple(float(int(min(max(value, 0), 255))) for value in values))


def three(values: Any) -> tuple[Any, ...]:
    """One value a channel; one alone stands for all."""
    return tuple(values) * 3 if len(values) == 1 else tuple(values)


def lower(size: tuple[int, int], channels: int, ops: Sequence[Op]) -> LoweredImage:
    """The atoms that an image goes through.

    Args:
        size: width and height of the decoded source, pixels.
        channels: 1 or 3.
        ops: the calls that are recorded on it.
    """
    width, height = size
    lowered = LoweredImage(height, width, channels)
    for at, op in enumerate(ops):
        if not lowered.is_uint8:
            _lower_call(lowered, op)
        elif op.name in PIXEL_CALLS:
            LOWER[op.name](lowered, *op.args)
        elif not lowered.value_ops and VALUE_CALLS.issuperset(map(_NAME, ops[at:])):
            lowered.extend(_ending(lowered.channels, tuple(ops[at:])))
            return lowered
        else:
            _lower_call(lowered, op)
    _look_up_values(lowered)
    return lowered


def _lower_call(lowered: LoweredImage, op: Op) -> None:
    """Lowers a call that is no call on the pixels of bytes."""
    if makes_bytes(op) and op.name in LOWER:
        LOWER[op.name](lowered, *op.args)  # with the calls whose table is still to come
    elif makes_bytes(op) and (op.name == "to_pil_image" or not lowered.is_uint8):
        # Bytes that were at most scaled and moved are what they were.
        lowered.value_ops[:] = [] if op.name == "to_pil_image" else [Op("pil_to_tensor")]
        lowered.is_uint8 = True
    elif op.operation.is_value and not lowered.is_float:
        lowered.value_ops.append(op)
        lowered.is_uint8 = lowered.is_uint8 and not makes_floats(op)
    elif op.name in LOWER:  # others, such as `clone`, change no pixel
        if not lowered.is_uint8 and not op.operation.moves:
            _look_up_values(lowered)
        LOWER[op.name](lowered, *op.args)


@functools.lru_cache(maxsize=256)
def _ending(channels: int, ops: tuple[Op, ...]) -> LoweredImage:
    """Calls on bytes that make one value of each, lowered for an image of any size."""
    lowered = LoweredImage(1, 1, channels)
    lowered.value_ops += ops
    lowered.is_uint8 = not any(map(makes_floats, ops))
    _look_up_values(lowered)
    return lowered


def _look_up_values(lowered: LoweredImage) -> None:
    """VALUES: (bits of the largest value that follows,), and a table [3, 256] of float32: bytes become floats."""
    if not (lowered.is_uint8 or lowered.is_float):
        tables = value_planes(lowered.channels, tuple(lowered.value_ops))
        lowered.add(Kind.VALUES, *float_bits(1.0), tables=tables)
        lowered.is_float = True
    lowered.value_ops.clear()


@functools.lru_cache(maxsize=256)
def value_planes(channels: int, value_ops: tuple[Op, ...]) -> tuple[np.ndarray, ...]:
    """What stock code makes of each uint8 value of each of three channels: float32 by their bits as int32 [256]."""
    made = made_of_bytes(channels, value_ops)
    return tuple(made[:, 0].float().expand(3, -1).contiguous().view(torch.int32).numpy())


# The calls that make tensors of Pillow images.
CONVERSIONS = ("to_tensor", "pil_to_tensor", "to_image")


@functools.lru_cache(maxsize=1024)
def made_of_bytes(channels: int, value_ops: tuple[Op, ...]) -> torch.Tensor:
    """What stock code makes of each uint8 value of each channel, [C, 1, 256]: its very bits; never written to.

    The stock functions run on an image whose columns are the values 0 to 255, each on what those before it made, which
    is kept: often the last call alone has arguments of its own for each image.
    """
    *before, last = value_ops if value_ops and value_ops[0].name in CONVERSIONS else (Op("pil_to_tensor"), *value_ops)
    if before:
        image: Any = made_of_bytes(channels, tuple(before))
    else:
        ramp = np.tile(np.arange(256, dtype=np.uint8)[None, :, None], (1, 1, channels))
        image = image_of(ramp if channels == 3 else ramp[:, :, 0])
    with executing():
        return replay(image, (last,)).as_subclass(torch.Tensor)
