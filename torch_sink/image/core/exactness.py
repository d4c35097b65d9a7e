"""What is known of the values that a handle stands for: how close the kernels come to them, and their range.

torch's own float kernels round differently on different processors, so after some calls the kernels agree with stock
code to within a rounding only. A call that turns such a difference into a large one, a threshold for instance, is not
recorded there: it falls back to stock torchvision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_sink.image.core.ops import Op, makes_bytes, makes_floats


def is_rounded_by_torch(handle: Any) -> bool:
    """True for a handle whose uint8 values torch computes through floats whose last bits depend on the processor.

    Inside AugMix, whose promise is one of how many values are equal, it is False.
    """
    return not getattr(handle, "is_branch_of_augmix", False) and any(op.promise.is_rounded for op in handle.sink_ops)


def since_conversion(handle: Any) -> tuple[Op, ...]:
    """The call that last turned bytes into floats, and those after it."""
    ops = handle.sink_ops
    end_of_bytes = max((at for at, op in enumerate(ops) if makes_bytes(op)), default=-1) + 1
    begin = next(at for at in range(end_of_bytes, len(ops)) if makes_floats(ops[at]))
    return tuple(ops[begin:])


def is_from_bytes(handle: Any) -> bool:
    """True where the type of the handle's floats is the one that bytes were turned into."""
    conversion = since_conversion(handle)[0]
    return conversion.operation.result(conversion) == handle.sink_dtype


def is_scaled_bytes(handle: Any) -> bool:
    """True while floats are bytes that were only scaled and moved, so that turning them back is exact."""
    return all(op.operation.moves for op in since_conversion(handle)[1:])


def may_overshoot(handle: Any) -> bool:
    """True where values may leave [0, 1] by what a bicubic filter adds."""
    return any(op.operation.overshoots(op) for op in _since_clamp(handle))


def is_normalized(handle: Any) -> bool:
    """True where values may lie anywhere, as after `Normalize`, and not in [0, 1] or close to it."""
    return any(op.operation.leaves_range(op) for op in _since_clamp(handle))


def _since_clamp(handle: Any) -> Sequence[Op]:
    ops = since_conversion(handle)
    clamped = max((at for at, op in enumerate(ops) if op.operation.clamps(op)), default=-1)
    return ops[clamped + 1 :]


def is_tabled(op: Op) -> bool:
    """True for a call on floats that a table and a map stand for, also where the image goes on in floats behind it."""
    return op.operation.is_tabled(op) and "erase" not in op.name
