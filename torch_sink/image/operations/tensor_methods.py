"""What programs do to images with tensors' own methods: `image.float() / 255`, `image[:, :224]`, `image.flip(-1)`.

Each is recorded as the functional of torchvision that gives its very values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torch_sink.image.core.examples import Arguments, Example
from torch_sink.image.core.ops import RECORDERS, Op, Operation
from torch_sink.image.operations.colors import lower_to_rgb, permute_channels, spread
from torch_sink.image.operations.conversions import to_dtype

# --- types


def _to(handle: Any, dtype: Any = None, non_blocking: Any = False) -> Any:
    return _typed(handle, dtype) if isinstance(dtype, torch.dtype) else NotImplemented


def _typed(handle: Any, dtype: torch.dtype) -> Any:
    # What v2 makes of floats in half precision, or of bytes that it does not scale, is the type alone as well.
    return to_dtype("v2", handle, dtype)


Operation(
    "types of tensors",
    stock={},
    record={
        torch.Tensor.to: _to,
        torch.Tensor.float: lambda handle: _typed(handle, torch.float32),
        torch.Tensor.half: lambda handle: _typed(handle, torch.float16),
        torch.Tensor.bfloat16: lambda handle: _typed(handle, torch.bfloat16),
    },
)

# --- parts, and other places


def _index(handle: Any, index: Any) -> Any:
    """All channels in another order, or a box of all channels."""
    parts = index if type(index) is tuple else (index,)
    if type(parts[0]) is list and all(part in (Ellipsis, slice(None)) for part in parts[1:]) and len(parts) <= 3:
        return permute_channels("v2", handle, parts[0])
    box = _box(handle, parts)
    return NotImplemented if box is None else RECORDERS["v1.crop"](handle, *box)


def _assign(handle: Any, index: Any, value: Any) -> Any:
    """`image[:, top:bottom, left:right] = values`, as other libraries erase a box."""
    box = _box(handle, index) if type(index) is tuple and type(value) is torch.Tensor else None
    return NotImplemented if box is None else RECORDERS["v1.erase"](handle, *box, value, inplace=True)


def _box(handle: Any, parts: tuple[Any, ...]) -> tuple[int, int, int, int] | None:
    """The box (top, left, height, width) of all channels that an index means; None where it means something else."""
    places = [at for at, part in enumerate(parts) if part is Ellipsis]
    at = places[0] if places else len(parts)
    before, behind = parts[:at], parts[at + 1 :]
    missing = 3 - len(before) - len(behind)
    slices = [*before, *[slice(None)] * missing, *behind]
    is_plain = len(places) < 2 and missing >= 0
    if not is_plain or not all(type(part) is slice and part.step in (None, 1) for part in slices):
        return None
    ends = [part.indices(side) for part, side in zip(slices, handle.sink_shape, strict=True)]
    (first, last, _), (top, bottom, _), (left, right, _) = ends
    is_box = (first, last) == (0, handle.sink_shape[0]) and bottom > top and right > left
    return (top, left, bottom - top, right - left) if is_box else None


def _flip(handle: Any, dims: Any, second: Any = None) -> Any:
    """A flip of channels alone would have other strides than a choice of channels has."""
    given = (dims,) if type(dims) is int else tuple(dims) if isinstance(dims, (list, tuple)) else ()
    given += () if second is None else (second,)
    axes = {dim % 3 for dim in given if type(dim) is int and -3 <= dim < 3}
    if len(axes) != len(given) or not axes or 0 in axes:
        return NotImplemented
    for axis, name in ((1, "v1.vflip"), (2, "v1.hflip")):
        handle = handle.record(Op(name)) if axis in axes else handle
    return handle


Operation(
    "parts and flips of tensors",
    stock={},
    record={
        torch.Tensor.__getitem__: _index,
        torch.Tensor.__setitem__: _assign,
        **dict.fromkeys((torch.flip, torch.Tensor.flip), _flip),
    },
)

# --- gray images with three channels


def _repeat(handle: Any, channels: Any, down: Any = None, across: Any = None) -> Any:
    sizes = tuple(channels) if isinstance(channels, (list, tuple)) else (channels, down, across)
    return spread(handle, "repeat") if sizes == (3, 1, 1) else NotImplemented


def _expand(handle: Any, channels: Any, height: Any = None, width: Any = None) -> Any:
    sizes = tuple(channels) if isinstance(channels, (list, tuple)) else (channels, height, width)
    kept = zip(sizes[1:], handle.sink_shape[1:], strict=False)
    fits = len(sizes) == 3 and sizes[0] == 3 and all(size in (-1, side) for size, side in kept)
    return spread(handle, "expand") if fits else NotImplemented


def _spread_examples(a: Arguments) -> Iterator[Example]:
    if a.is_pillow:
        return
    yield Example(
        "repeat", label="gray images", run=lambda image: a.functional.rgb_to_grayscale(image, 1).repeat(3, 1, 1)
    )
    yield Example(
        "expand", label="gray images", run=lambda image: a.functional.rgb_to_grayscale(image, 1).expand(3, -1, -1)
    )


Operation(
    "three equal channels",
    stock={"repeat": lambda image: image.repeat(3, 1, 1), "expand": lambda image: image.expand(3, -1, -1)},
    examples=_spread_examples,
    record={torch.Tensor.repeat: _repeat, torch.Tensor.expand: _expand},
    lower=lower_to_rgb,
)
