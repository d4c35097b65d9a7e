"""Recording on tensors: normalization and dtypes. How a recorder works is said in `tensor.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torch_sink.image.core.arguments import is_number
from torch_sink.image.core.exactness import is_from_bytes, is_scaled_bytes
from torch_sink.image.core.ops import WIDE_TYPES, InPlaceOp, Op
from torch_sink.image.handles.shared_memory import aliases, record_in_place
from torch_sink.image.handles.tensor import LazyTVImage


def _statistics(values: Any, channels: int) -> tuple[float, ...] | None:
    """mean or std as a tuple of floats, or None where stock code should look at it."""
    if isinstance(values, (torch.Tensor, np.ndarray)) and values.ndim == 1:
        values = values.tolist()
    if not isinstance(values, (list, tuple)) or len(values) not in (1, channels):
        return None
    values = tuple(value.item() if isinstance(value, np.generic) else value for value in values)
    return values if all(map(is_number, values)) else None


# Less may be zero in the image's dtype, which stock code refuses.
_SMALLEST_STD = 1e-6


def normalize(family: str, handle: Any, mean: Any, std: Any, inplace: bool = False) -> Any:
    if family == "v2" and handle.sink_dtype == torch.float32 and not inplace:
        handle = _spread(handle, mean, std)
    channels = handle.sink_shape[0]
    mean, std = _statistics(mean, channels), _statistics(std, channels)
    if mean is None or std is None or not handle.sink_dtype.is_floating_point:
        return NotImplemented
    if handle.sink_dtype != torch.float32 and not is_from_bytes(handle):
        return NotImplemented
    if min(map(abs, std)) < _SMALLEST_STD or (inplace and not changes_in_place(handle)):
        return NotImplemented
    result = record_maybe_in_place(handle, inplace, f"{family}.normalize", (mean, std))
    # What the methods of a `tv_tensors.Image` change in place they return as a pure tensor of the same memory.
    is_pure = inplace and family == "v1" and type(handle) is LazyTVImage
    return result.as_subclass(torch.Tensor) if is_pure else result


def record_maybe_in_place(handle: Any, inplace: bool, name: str, args: tuple[Any, ...]) -> Any:
    """Records a call that gives a new handle, or changes what the handle and its aliases stand for."""
    if not inplace:
        return handle.record(Op(name, args))
    record_in_place(aliases(handle) or [handle], InPlaceOp(name, args))
    return handle


def changes_in_place(handle: Any) -> bool:
    """True where a call in place can be recorded: nobody holds a part of what it changes."""
    return aliases(handle) is not None and not _is_expanded(handle)


def _is_expanded(handle: Any) -> bool:
    """True where the channels of stock code's tensor may share memory, which it does not write to in place."""
    for op in reversed(handle.sink_ops):
        name = op.name.split(".")[-1]
        if name != "crop":  # a view
            return name == "grayscale_to_rgb" or (name == "rgb_to_grayscale" and op.args[0] == 3)
    return False


def _spread(handle: Any, mean: Any, std: Any) -> Any:
    """A gray image with as many channels as there are statistics: the kernel of `transforms.v2` makes so many."""
    channels, height, width = handle.sink_shape
    if channels != 1 or _statistics(mean, 3) is None or _statistics(std, 3) is None or len(mean) == len(std) == 1:
        return handle
    return handle.record(Op("v2.grayscale_to_rgb"), shape=(3, height, width))


def convert_dtype(handle: Any, dtype: torch.dtype = torch.float32) -> Any:
    return _to_dtype(handle, dtype, Op("v1.convert_image_dtype", (dtype,)))


def to_dtype_v2(handle: Any, dtype: torch.dtype = torch.float32, scale: bool = False) -> Any:
    return _to_dtype(handle, dtype, Op("v2.to_dtype", (dtype, scale)))


def _to_dtype(handle: Any, dtype: torch.dtype, op: Op) -> Any:
    if handle.sink_dtype == dtype:
        return handle
    if dtype not in _CONVERSIONS.get(handle.sink_dtype, ()):
        return NotImplemented
    if handle.sink_dtype == torch.float32 and dtype == torch.uint8 and not is_scaled_bytes(handle):
        return NotImplemented
    return handle.record(op, dtype=dtype)


# dtype -> those that the kernels can make of it; other types than uint8 and float32 are computed with in tables alone.
_CONVERSIONS = {
    torch.uint8: (torch.float32, torch.float16, torch.bfloat16, *WIDE_TYPES),
    torch.float32: (torch.uint8, torch.float16, torch.bfloat16),
}
