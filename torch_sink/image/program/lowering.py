"""Recorded calls -> the atoms of an image.

What follows the conversion to a float tensor is often a function of one uint8 value and becomes a table of 256 entries
a channel, made by the stock code itself. Where a call needs more (other channels, neighbors, a fill), the image goes
on in float32 from there.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from torch_sink.image.core.atoms import Lowering, float_bits
from torch_sink.image.core.fallback import executing
from torch_sink.image.core.ops import LOWER, PIXEL_CALLS, VALUE_CALLS, Op, makes_bytes, makes_floats, replay
from torch_sink.triton_kernels.rows import Kind

_NAME = operator.itemgetter(0)  # of a call


def lower(size: tuple[int, int], channels: int, ops: Sequence[Op]) -> Lowering:
    """What an image goes through.

    Args:
        size: width and height of the decoded source, pixels.
        channels: 1 or 3.
        ops: the calls that are recorded on it.
    """
    width, height = size
    state = Lowering(height, width, channels)
    for at, op in enumerate(ops):
        if not state.is_uint8:
            _lower_call(state, op)
        elif op.name in PIXEL_CALLS:
            LOWER[op.name](state, *op.args)
        elif not state.value_ops and VALUE_CALLS.issuperset(map(_NAME, ops[at:])):
            state.extend(_ending(state.channels, tuple(ops[at:])))
            return state
        else:
            _lower_call(state, op)
    _look_up_values(state)
    return state


def _lower_call(state: Lowering, op: Op) -> None:
    """Lowers one call, whatever comes before it."""
    if makes_bytes(op) and (op.name == "to_pil_image" or not state.is_uint8):
        # Bytes that were at most scaled and moved are what they were.
        state.value_ops[:] = [] if op.name == "to_pil_image" else [Op("pil_to_tensor")]
        state.is_uint8 = True
    elif op.operation.is_value and not state.is_float:
        state.value_ops.append(op)
        state.is_uint8 = state.is_uint8 and not makes_floats(op)
    elif op.name in LOWER:  # others say nothing about values
        if not state.is_uint8 and not op.operation.moves:
            _look_up_values(state)
        LOWER[op.name](state, *op.args)


@functools.lru_cache(maxsize=256)
def _ending(channels: int, ops: tuple[Op, ...]) -> Lowering:
    """Calls on bytes that make one value of each, lowered for an image of any size."""
    state = Lowering(1, 1, channels)
    state.value_ops += ops
    state.is_uint8 = not any(map(makes_floats, ops))
    _look_up_values(state)
    return state


def _look_up_values(state: Lowering) -> None:
    """VALUES: (bits of the largest value that follows,), and a table [3, 256] of float32: bytes become floats."""
    if not (state.is_uint8 or state.is_float):
        tables = value_planes(state.channels, tuple(state.value_ops))
        state.add(Kind.VALUES, *float_bits(1.0), tables=tables)
        state.is_float = True
    state.value_ops.clear()


@functools.lru_cache(maxsize=256)
def value_planes(channels: int, value_ops: tuple[Op, ...]) -> tuple[np.ndarray, ...]:
    """What stock code makes of each uint8 value of each of three channels: float32 by their bits as int32 [256].

    The stock functions run on an image whose columns are the values 0 to 255, so the table holds their very bits.
    """
    ramp = np.tile(np.arange(256, dtype=np.uint8)[None, :, None], (1, 1, channels))
    image = Image.fromarray(ramp if channels == 3 else ramp[:, :, 0])
    with executing():
        made = replay(image, value_ops).as_subclass(torch.Tensor)
    return tuple(made[:, 0].float().expand(3, -1).contiguous().view(torch.int32).numpy())
