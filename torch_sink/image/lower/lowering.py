"""Recorded calls -> the program of an image.

What follows the conversion to a float tensor is often a function of one uint8 value and becomes a table of 256 entries
a channel, made by the stock code itself. Where a call needs more (other channels, neighbors, a fill), the image goes
on in float32 from there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from torch_sink.image.core.atoms import LOWER, Atom, Kind, Lowering, Program
from torch_sink.image.core.fallback import executing
from torch_sink.image.core.ops import Op, replay
from torch_sink.image.lower import (  # noqa: F401  they fill the registries
    augmix,
    blur,
    color,
    float_blur,
    float_color,
    float_geometry,
    geometry,
    tensor_color,
    warp,
)
from torch_sink.image.lower.floats import LOWER_FLOAT, FloatLowering
from torch_sink.image.lower.geometry import three_planes

# Calls that only change values, from the conversion to a tensor on.
VALUE_OPS = frozenset(
    (
        "to_tensor",
        "pil_to_tensor",
        "to_image",
        "v1.normalize",
        "v1.convert_image_dtype",
        "v2.normalize",
        "v2.to_dtype",
        "mul",
        "to_pil_bytes",
    )
)


# Calls that turn uint8 into floats.
_CONVERSIONS = frozenset(("to_tensor", "v1.convert_image_dtype", "v2.to_dtype"))

# Calls on floats whose result depends on one value alone, besides `VALUE_OPS`.
_POINT_OPS = frozenset(f"{family}.{name}" for family in ("v1", "v2") for name in ("adjust_brightness", "invert"))

# Calls on floats that only move values, or write given ones.
_MOVING_OPS = frozenset(
    (
        "v1.hflip",
        "v1.vflip",
        "v2.horizontal_flip",
        "v2.vertical_flip",
        "v1.crop",
        "v2.crop",
        "v1.erase",
        "v2.erase",
        "v1.erase_pixels",
        "v2.erase_pixels",
    )
)


def _needs_floats(op: Op) -> bool:
    """True for a call on floats that no table of 256 values can stand for."""
    if op.name in ("v1.pad", "v2.pad"):
        return op.args[2] == "constant"
    return op.name not in VALUE_OPS and op.name not in _POINT_OPS and op.name not in _MOVING_OPS


def is_tabled(op: Op) -> bool:
    """True for a call on floats that a table and a map stand for, also where the image goes on in floats behind it."""
    return not _needs_floats(op) and "erase" not in op.name


def _first_float_op(ops: Sequence[Op], in_floats: bool) -> int | None:
    """Position of the first call that runs on float32 values; None where a table stands for all of them.

    A product is in the table where it can be, which holds stock code's bits.
    """
    converted = next((at for at, op in enumerate(ops, 1) if op.name in _CONVERSIONS), None)
    if converted is None:
        return len(ops) if in_floats else None
    if not (in_floats or any(map(_needs_floats, ops[converted:]))):
        return None
    tabled = next((at for at in range(converted, len(ops)) if not is_tabled(ops[at])), len(ops))
    begin = max((at for at, op in enumerate(ops[:tabled], 1) if op.name == "mul"), default=converted)
    while begin < len(ops) and ops[begin].name in VALUE_OPS and ops[begin].name != "mul":
        begin += 1
    return begin


def lower(height: int, width: int, channels: int, ops: Sequence[Op], in_floats: bool = False) -> Program:
    """The program of one pass of an image.

    Args:
        height: of the decoded source, pixels.
        width: of the decoded source, pixels.
        channels: 1 or 3.
        ops: the calls of a pass, as `passes_of` gives them.
        in_floats: end in float32 values also where a table could stand for them.
    """
    state = Lowering(height, width, channels)
    begin = _first_float_op(ops, in_floats)
    for op in ops[:begin]:
        if op.name in VALUE_OPS or (op.name in _POINT_OPS and not state.is_uint8):
            state.value_ops.append(op)
        elif op.name == "to_pil_image":
            state.value_ops.clear()  # bytes again, as they were before the conversion to a tensor
        else:
            LOWER[op.name](state, *op.args)
    for atom, values_before, values in state.erased:
        before, after = tuple(state.value_ops[:values_before]), tuple(state.value_ops[values_before:])
        with executing():
            written = replay(values.to(value_table(state.channels, before).dtype), after)
        state.atoms[atom] = _with_values(state.atoms[atom], written.float())
    floats = FloatLowering(state.height, state.width, state.channels)
    for op in ops[len(ops) if begin is None else begin :]:
        LOWER_FLOAT[op.name](floats, *op.args)
    return Program(
        tuple(state.atoms),
        tuple(state.value_ops),
        channels,
        state.channels,
        floats.channels,
        (floats.height, floats.width),
        None if begin is None else tuple(floats.atoms),
    )


def _with_values(erase: Atom, values: torch.Tensor) -> Atom:
    """An erased box with its values [C, H, W] or [3, 1, 1], as they are in the result."""
    bits = values.contiguous().view(torch.int32)
    if erase.kind == Kind.PASTE:
        return erase._replace(tables=(three_planes(bits),))
    return erase._replace(values=(*erase.values, *bits.flatten().tolist()))


@functools.lru_cache(maxsize=256)
def value_table(channels: int, value_ops: tuple[Op, ...]) -> torch.Tensor:
    """What stock code makes of each uint8 value: [channels, 256], in the dtype of the result.

    The stock functions run on an image whose columns are the values 0 to 255, so the table holds their very bits.
    """
    ramp = np.tile(np.arange(256, dtype=np.uint8)[None, :, None], (1, 1, channels))
    image = Image.fromarray(ramp if channels == 3 else ramp[:, :, 0])
    return replay(image, value_ops).as_subclass(torch.Tensor)[:, 0, :].contiguous()
