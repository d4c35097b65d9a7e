"""What is known of the values that a handle stands for: how close the kernels come to them, and their range.

torch's own float kernels round differently on different processors, so after some calls the kernels agree with stock
code to within a rounding only. A call that turns such a difference into a large one, a threshold for instance, is not
recorded there: it falls back to stock torchvision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_sink.image.core.ops import Op, makes_bytes, makes_floats
from torch_sink.image.core.tensor_argument import TensorArgument

_WARPS = frozenset(("affine", "rotate", "rotate_expanded", "perspective", "elastic", "elastic_transform"))
_MOVES = frozenset(("hflip", "vflip", "horizontal_flip", "vertical_flip", "crop", "crop_beyond", "contiguous"))
# Calls on floats that end with a clamp to [0, 1].
_CLAMPED = frozenset(("adjust_brightness", "float_contrast", "adjust_saturation", "adjust_sharpness"))


def _short_name(op: Op) -> str:
    return op.name.split(".", 1)[-1]


def is_rounded_by_torch(handle: Any) -> bool:
    """True for a handle whose uint8 values torch computes through floats whose last bits depend on the processor.

    Inside AugMix, whose promise is one of how many values are equal, it is False.
    """
    return not getattr(handle, "is_branch_of_augmix", False) and any(map(rounds_by_processor, handle.sink_ops))


def rounds_by_processor(op: Op) -> bool:
    """True for a call that torch computes through floats, on whatever type it is called."""
    name = _short_name(op)
    if op.name.startswith("pil."):
        return False  # Pillow computes in integers, or rounds the same way everywhere
    if op.name == "v1.resize":
        _, mode, antialias = op.args
        return not antialias and "nearest" not in mode.value
    return name in ("gaussian_blur", "augmix") or (name in _WARPS and op.args[-2] != "nearest")


def since_conversion(handle: Any) -> tuple[Op, ...]:
    """The call that last turned bytes into floats, and those after it."""
    ops = handle.sink_ops
    end_of_bytes = max((at for at, op in enumerate(ops) if makes_bytes(op)), default=-1) + 1
    begin = next(at for at in range(end_of_bytes, len(ops)) if makes_floats(ops[at]))
    return tuple(ops[begin:])


def is_from_bytes(handle: Any) -> bool:
    """True where the type of the handle's floats is the one that bytes were turned into."""
    conversion = since_conversion(handle)[0]
    return (torch.float32 if conversion.name == "to_tensor" else conversion.args[0]) == handle.sink_dtype


def is_scaled_bytes(handle: Any) -> bool:
    """True while floats are bytes that were only scaled and moved, so that turning them back is exact."""
    return all(_short_name(op) in _MOVES for op in since_conversion(handle)[1:])


def may_overshoot(handle: Any) -> bool:
    """True where values may leave [0, 1] by what a bicubic filter adds."""
    return any(_short_name(op) == "float_resize" and op.args[1].value == "bicubic" for op in _since_clamp(handle))


def is_normalized(handle: Any) -> bool:
    """True where values may lie anywhere, as after `Normalize`, and not in [0, 1] or close to it."""
    return any(map(_leaves_the_range, _since_clamp(handle)))


def _since_clamp(handle: Any) -> Sequence[Op]:
    ops = since_conversion(handle)
    clamped = max((at for at, op in enumerate(ops) if _short_name(op) in _CLAMPED), default=-1)
    return ops[clamped + 1 :]


def _leaves_the_range(op: Op) -> bool:
    name = _short_name(op)
    if name == "pad":
        return op.args[2] == "constant" and not _fit(op.args[1])
    if name in ("erase", "erase_pixels"):
        return not _fit(op.args[4])
    if name in _WARPS:
        return not _fit(op.args[-1] or ())
    return name in ("normalize", "mul") or (op.name == "v2.to_dtype" and not op.args[1])


def _fit(written: Any) -> bool:
    """Whether all of the values that a call writes lie in [0, 1]."""
    if isinstance(written, TensorArgument):
        return bool(((written.tensor >= 0) & (written.tensor <= 1)).all())
    return all(0 <= value <= 1 for value in (written if isinstance(written, (tuple, list)) else (written,)))
