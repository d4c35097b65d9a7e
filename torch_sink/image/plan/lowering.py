"""Recorded calls -> the atoms of an image.

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

from torch_sink.image.core.atoms import VALUES_OF_BYTES, Kind, Lowering, float_bits
from torch_sink.image.core.fallback import executing
from torch_sink.image.core.ops import LOWER, PIXEL_CALLS, VALUE_CALLS, Op, makes_bytes, makes_floats, replay
from torch_sink.image.operations.erase import three_planes
from torch_sink.triton_kernels.rows import FILL


def lower(height: int, width: int, channels: int, ops: Sequence[Op]) -> Lowering:
    """What an image goes through.

    Args:
        height: of the decoded source, pixels.
        width: of the decoded source, pixels.
        channels: 1 or 3.
        ops: the calls that are recorded on it.
    """
    state = Lowering(height, width, channels)
    for at, op in enumerate(ops):
        if not state.is_uint8:
            _lower_call(state, op)
        elif op.name in PIXEL_CALLS:
            LOWER[op.name](state, *op.args)
        elif not state.value_ops and VALUE_CALLS.issuperset([later.name for later in ops[at:]]):
            state.extend(_ending(state.channels, tuple(ops[at:])))
            return state
        else:
            _lower_call(state, op)
    return _finished(state)


def _lower_call(state: Lowering, op: Op) -> None:
    """Lowers one call, whatever comes before it."""
    if op.name == "contiguous":
        return  # which says nothing about values
    if not state.is_uint8 and makes_bytes(op):
        _to_bytes(state, op)
    elif op.name == "to_pil_image":
        state.value_ops.clear()
    elif op.operation.is_value and not state.is_float and not (state.is_uint8 and _is_work_on_bytes(op)):
        state.value_ops.append(op)
        state.is_uint8 = state.is_uint8 and not makes_floats(op)
    elif op.operation.is_point and not state.is_uint8 and _is_half(state):
        state.value_ops.append(op)
    else:
        if not state.is_uint8 and not state.is_float and not op.operation.is_tabled(op):
            _look_up_values(state)
            state.is_float = True
        LOWER[op.name](state, *op.args)


def _finished(state: Lowering) -> Lowering:
    """The state after all calls."""
    if state.is_uint8 or state.is_float:
        state.value_ops.clear()
    else:
        _look_up_values(state)
    return state


@functools.lru_cache(maxsize=256)
def _ending(channels: int, ops: tuple[Op, ...]) -> Lowering:
    """Calls on bytes that make one value of each, lowered for an image of any size."""
    state = Lowering(1, 1, channels)
    for op in ops:
        _lower_call(state, op)
    return _finished(state)


def _is_work_on_bytes(op: Op) -> bool:
    return op.name in LOWER and not makes_floats(op)


def _is_half(state: Lowering) -> bool:
    return not state.is_float and value_table(state.channels, tuple(state.value_ops)).dtype.itemsize == 2


def _to_bytes(state: Lowering, op: Op) -> None:
    """A call that turns floats back into bytes."""
    is_image = op.name == "to_pil_image"
    op = Op("to_pil_bytes") if is_image else op
    if state.is_float:
        LOWER[op.name](state, *op.args)
    else:
        state.value_ops.append(op)
        _look_up_values(state, 255.0)
    state.is_uint8, state.is_float = True, False
    state.value_ops = [] if is_image else [Op("pil_to_tensor")]


def _look_up_values(state: Lowering, top: float = 1.0) -> None:
    """VALUES: (bits of the largest value that follows,), and a table [3, 256] of float32.

    Where boxes were erased since, the atom is there already. The boxes hold what stock code makes of their values.
    """
    chain = tuple(state.value_ops)
    at = state.erased[0][0] - 1 if state.erased else len(state.atoms)
    if not state.erased:
        state.add(Kind.VALUES)
    state.atoms[at][1:2] = float_bits(top)
    state.codes[at] = int(Kind.VALUES) if top == 1.0 else VALUES_OF_BYTES
    state.tables[at] = value_planes(state.channels, chain)
    for box, before, values in state.erased:
        with executing():
            written = replay(values.to(value_table(state.channels, chain[:before]).dtype), chain[before:]).float()
        if state.codes[box] == Kind.PASTE:
            state.tables[box] = (three_planes(written),)
        else:
            state.atoms[box][FILL : FILL + 3] = float_bits(*written.flatten().tolist())
    state.value_ops.clear()
    state.erased.clear()


@functools.lru_cache(maxsize=256)
def value_table(channels: int, value_ops: tuple[Op, ...]) -> torch.Tensor:
    """What stock code makes of each uint8 value: [channels, 256], in the dtype of the result.

    The stock functions run on an image whose columns are the values 0 to 255, so the table holds their very bits.
    """
    ramp = np.tile(np.arange(256, dtype=np.uint8)[None, :, None], (1, 1, channels))
    image = Image.fromarray(ramp if channels == 3 else ramp[:, :, 0])
    with executing():
        return replay(image, value_ops).as_subclass(torch.Tensor)[:, 0, :].contiguous()


@functools.lru_cache(maxsize=256)
def value_planes(channels: int, value_ops: tuple[Op, ...]) -> tuple[np.ndarray, ...]:
    """`value_table` for each of three channels, float32 by their bits as int32 [256]."""
    table = value_table(channels, value_ops).float().expand(3, -1).contiguous()
    return tuple(table.view(torch.int32).numpy())
