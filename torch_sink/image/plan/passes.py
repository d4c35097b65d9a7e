"""Recorded calls -> passes: runs of calls that each begin with bytes.

Calls that turn floats back into bytes end a pass; the next one takes its result as it would take a decoded image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchvision.transforms import InterpolationMode

from torch_sink.image.core.ops import Op, makes_bytes, makes_floats

_SMOOTH = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC)


def passes_of(ops: Sequence[Op]) -> list[tuple[Op, ...]]:
    """The calls of each pass; one that begins with the bytes of a tensor begins with "pil_to_tensor"."""
    passes: list[list[Op]] = [[]]
    in_floats = False
    for op in ops:
        ends = becomes_image = False
        if op.name == "contiguous":
            continue  # which says nothing about values
        if makes_floats(op):
            in_floats = True
        elif in_floats and makes_bytes(op):
            in_floats, ends = False, True
            becomes_image = op.name == "to_pil_image"
            op = Op("to_pil_bytes") if becomes_image else op
        elif op.name == "v1.resize" and resizes_in_floats(op):
            # The kernel of v1 resizes bytes as floats where it does not antialias.
            passes[-1] += [Op("v2.to_dtype", (torch.float32, False)), Op("v1.float_resize", op.args)]
            op, ends = Op("round_to_bytes"), True
        passes[-1].append(op)
        if ends:
            passes.append([] if becomes_image else [Op("pil_to_tensor")])
    if len(passes) > 1 and passes[-1] == [Op("pil_to_tensor")]:
        passes.pop()
    return [tuple(calls) for calls in passes]


def resizes_in_floats(resize: Op) -> bool:
    """True for a call of "v1.resize" that interpolates without antialiasing."""
    _, mode, antialias = resize.args
    return mode in _SMOOTH and not antialias
