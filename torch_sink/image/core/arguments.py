"""For recorders: arguments of torchvision's functionals in one form, and what is known of an image's values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torch_sink.image.core.ops import Op, calls_from_bytes, makes_bytes, makes_floats
from torch_sink.image.core.recording import Recording

# Left, top, right and bottom of a padding, in pixels.
Sides = tuple[int, int, int, int]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def color_of(fill: Any, channels: int) -> Any:
    """A fill of a Pillow image as stock code reads it: an int, or one int a channel; None if unsupported."""
    if fill is None:
        fill = 0
    if isinstance(fill, (list, tuple)):
        if not all(map(is_number, fill)) or len(fill) not in (1, channels):
            return None
        fill = tuple(int(value) for value in fill) * (channels if len(fill) == 1 else 1)
        return fill if channels > 1 else fill[0]
    if not is_number(fill):
        return None
    return (int(fill),) * channels if channels > 1 else int(fill)


def fill_of_each_channel(image: Recording, fill: Any) -> Any:
    """A fill of a tensor as one float a channel, None where there is none, or `NotImplemented` if unsupported."""
    if fill is None:
        return None
    values = tuple(fill) if isinstance(fill, (list, tuple)) else (fill,)
    channels = image.shape[0]
    if len(values) not in (1, channels) or not all(map(is_number, values)) or has_minus_zero(values):
        return NotImplemented
    if image.dtype == torch.uint8 and not all(0 <= value <= 255 for value in values):
        return NotImplemented
    return tuple(map(float, values)) * (channels if len(values) == 1 else 1)


def permutation_of(permutation: Any, channels: int) -> tuple[int, ...] | None:
    """A permutation as the channel of the input for each channel of the output, or None if unsupported."""
    if isinstance(permutation, torch.Tensor) and permutation.dtype == torch.int64:
        permutation = permutation.tolist()
    if not isinstance(permutation, (list, tuple)) or len(permutation) != channels:
        return None
    return tuple(permutation) if all(type(index) is int and 0 <= index < channels for index in permutation) else None


def sides_of(padding: Any) -> Sides | None:
    """(left, top, right, bottom) of a padding argument, or None if unsupported."""
    if type(padding) is int:
        return (padding,) * 4
    if not isinstance(padding, (list, tuple)) or not all(type(side) is int for side in padding):
        return None
    if len(padding) == 1:
        return (padding[0],) * 4
    if len(padding) == 2:
        return padding[0], padding[1], padding[0], padding[1]
    return tuple(padding) if len(padding) == 4 else None  # type: ignore[return-value]


def size_of(size: Any) -> tuple[int, int] | None:
    """(height, width) of a size argument, or None if unsupported."""
    sides = (size,) if type(size) is int else size
    if not isinstance(sides, (list, tuple)) or len(sides) not in (1, 2):
        return None
    return (sides[0], sides[-1]) if all(type(side) is int and side > 0 for side in sides) else None


def padding_fits(sides: Sides, mode: str, height: int, width: int) -> bool:
    """True for a padding that kernels make: no side is negative, or as large as the image where it is mirrored."""
    # A mirror that stands on the border pixel does not repeat it.
    beside = {"reflect": 1, "symmetric": 0}.get(mode)
    if min(sides) < 0 or beside is None:
        return min(sides) >= 0 and mode in ("constant", "edge")
    return max(sides[0], sides[2]) <= width - beside and max(sides[1], sides[3]) <= height - beside


def is_computed_in_float32(family: str, image: Recording) -> bool:
    """True where stock code computes in float32, or in Pillow; a script's default dtype changes that for bytes."""
    return family == "pil" or image.dtype != torch.uint8 or torch.get_default_dtype() == torch.float32


def is_constant(value: Any) -> bool:
    """True for a tensor of which calls can keep a copy: on the CPU, and none whose gradient stock code would track."""
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.requires_grad


def is_factor(factor: Any) -> bool:
    """True for a factor of tensors that kernels compute with. Others, which float32 may not hold, are stock code's."""
    return is_number(factor) and 0 <= factor < _LARGEST_FACTOR


_LARGEST_FACTOR = 2.0**127


def has_minus_zero(values: Sequence[Any]) -> bool:
    """True where a value is -0.0, which caches of calls confuse with 0.0; such calls run in stock code."""
    return 0 in values and any(value == 0 and math.copysign(1.0, value) < 0 for value in values)


def fits_range(written: Any) -> bool:
    """True where all of the values that a call writes lie in [0, 1]."""
    return all(0 <= value <= 1 for value in (written if isinstance(written, (tuple, list)) else (written,)))


# --- what is known of the values that an image stands for
#
# torch's own float kernels round differently on different processors, so after some calls the kernels agree with stock
# code to within a rounding only. A call that turns such a difference into a large one, a threshold for instance, is not
# recorded there: it falls back to stock torchvision.


def is_rounded_by_torch(image: Recording) -> bool:
    """True for an image whose uint8 values torch computes through floats whose last bits depend on the processor."""
    return any(op.promise.is_rounded for op in image.calls)


def _since_conversion(image: Recording) -> tuple[Op, ...]:
    """The call that last turned bytes into floats, and those after it."""
    ops = image.calls
    end_of_bytes = max((at for at, op in enumerate(ops) if makes_bytes(op)), default=-1) + 1
    return ops[next(at for at in range(end_of_bytes, len(ops)) if makes_floats(ops[at])) :]


def is_tabled(image: Recording) -> bool:
    """True for floats that a table of 256 values makes of bytes, with stock code's bits in every float type."""
    return calls_from_bytes(image.calls) is not None


def is_scaled_bytes(image: Recording) -> bool:
    """True for float32 values that are bytes divided by 255, in any position: converted back they are these bytes."""
    conversion, *others = _since_conversion(image)
    is_scaled = image.dtype == torch.float32 and not conversion.operation.leaves_range(conversion)
    return is_scaled and all(op.operation.moves for op in others)


def leaves_range(image: Recording, also_by_overshoot: bool = False) -> bool:
    """True where float32 values may lie anywhere, as after `Normalize`, or close to [0, 1] by a bicubic filter."""
    if image.dtype != torch.float32:
        return False
    ops = _since_conversion(image)
    clamped = max((at for at, op in enumerate(ops) if op.operation.clamps(op)), default=-1)
    return any(
        op.operation.leaves_range(op) or (also_by_overshoot and op.operation.overshoots(op))
        for op in ops[clamped + 1 :]
    )


def parsed_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, torch.memory_format | None]:
    """(device, dtype, memory format) from the arguments of `Tensor.to`; torch's own parser does not take `copy`."""
    by_position = 3 if args and isinstance(args[0], (torch.dtype, torch.Tensor)) else 4
    if len(args) == by_position and "copy" not in kwargs:
        args = args[:-1]
    kwargs.pop("copy", None)
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype, memory_format
