"""Recorded calls -> the program of an image.

What follows the conversion to a float tensor is a function of one uint8 value and becomes a table of 256 entries a
channel, made by the stock code itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from torch_sink.image import lower_blur, lower_colour, lower_geometry  # noqa: F401  they fill the registry
from torch_sink.image.atoms import LOWER, Atom, Lowering, Program
from torch_sink.image.ops import Op, replay

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
    )
)


def lower(height: int, width: int, channels: int, ops: Sequence[Op]) -> Program:
    """The program of one image.

    Args:
        height: of the decoded source, pixels.
        width: of the decoded source, pixels.
        channels: 1 or 3.
        ops: calls recorded on it.
    """
    state = Lowering(height, width, channels)
    for op in ops:
        if op.name in VALUE_OPS:
            state.value_ops.append(op)
        elif op.name == "to_pil_image":
            state.value_ops.clear()  # bytes again, as they were before the conversion to a tensor
        else:
            LOWER[op.name](state, *op.args)
    for atom, values_before, colours in state.erased:
        state.atoms[atom] = _with_values(state.atoms[atom], colours, tuple(state.value_ops[values_before:]))
    return Program(tuple(state.atoms), tuple(state.value_ops), channels, state.channels, (state.height, state.width))


def _with_values(erase: Atom, colours: tuple[float, ...], value_ops: tuple[Op, ...]) -> Atom:
    """An erased box with its values as they are in the result."""
    values = replay(torch.tensor(colours).view(-1, 1, 1), value_ops).float().flatten()
    return erase._replace(values=(*erase.values, *values.view(torch.int32).tolist()))


@functools.lru_cache(maxsize=256)
def value_table(channels: int, value_ops: tuple[Op, ...]) -> torch.Tensor:
    """What stock code makes of each uint8 value: [channels, 256], in the dtype of the result.

    The stock functions run on an image whose columns are the values 0 to 255, so the table holds their very bits.
    """
    ramp = np.tile(np.arange(256, dtype=np.uint8)[None, :, None], (1, 1, channels))
    image = Image.fromarray(ramp if channels == 3 else ramp[:, :, 0])
    return replay(image, value_ops).as_subclass(torch.Tensor)[:, 0, :].contiguous()
