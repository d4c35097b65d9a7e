"""Flips and turns: pixels move, and their values stay."""

from __future__ import annotations

import functools
from typing import Any

import torch
from PIL import Image
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms.v2 import functional as F_v2

from torch_sink.image.core.lowering import LoweredImage, byte_fill
from torch_sink.image.core.ops import Op, Operation, ViewOp, always
from torch_sink.image.core.recording import Recording
from torch_sink.triton_kernels.rows import Kind

# --- to kernel work


def _lower_flip(lowered: LoweredImage, x: bool, y: bool) -> None:
    """FLIP: (flip x, flip y, width, height)."""
    lowered.add(Kind.FLIP, int(x), int(y), lowered.width, lowered.height)


# The methods of `transpose` that keep the size of the image.
_HALF_TURNS = (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM, Image.Transpose.ROTATE_180)


def _lower_transpose(lowered: LoweredImage, method: int) -> None:
    if method in _HALF_TURNS:
        _lower_flip(lowered, x=method != Image.Transpose.FLIP_TOP_BOTTOM, y=method != Image.Transpose.FLIP_LEFT_RIGHT)
        return
    height, width = lowered.resize_to(lowered.width, lowered.height)
    # The input's x comes from the output's y and the other way around, mirrored for some of the methods.
    mirror_x = method in (Image.Transpose.ROTATE_90, Image.Transpose.TRANSVERSE)
    mirror_y = method in (Image.Transpose.ROTATE_270, Image.Transpose.TRANSVERSE)
    x_row = (0, -65536, (width - 1) << 16) if mirror_x else (0, 65536, 0)
    y_row = (-65536, 0, (height - 1) << 16) if mirror_y else (65536, 0, 0)
    add_affine(lowered, x_row, y_row, (width, height), 0)


def add_affine(
    lowered: LoweredImage, x_row: tuple[int, ...], y_row: tuple[int, ...], old_size: tuple[int, int], fill: Any
) -> None:
    """AFFINE: (two rows of three coefficients in 16.16, -, -, -, input width, input height), and a fill."""
    lowered.add(Kind.AFFINE, *x_row, *y_row, 0, 0, 0, *old_size, fill=byte_fill(fill))


# --- flips


def flip(family: str, image: Recording) -> Any:
    return image.record(Op("v1.hflip" if family == "v1" else "v2.horizontal_flip"))


def flip_vertically(family: str, image: Recording) -> Any:
    return image.record(Op("v1.vflip" if family == "v1" else "v2.vertical_flip"))


for _word, _letter, _record in (("horizontal", "h", flip), ("vertical", "v", flip_vertically)):
    Operation(
        f"{_word} flip",
        stock={
            f"v1.{_letter}flip": getattr(F_tensor, f"{_letter}flip"),
            f"v2.{_word}_flip": getattr(F_v2, f"{_word}_flip_image"),
        },
        record={f"v1.{_letter}flip": _record, f"v2.{_word}_flip": _record},
        lower=functools.partial(_lower_flip, x=_letter == "h", y=_letter == "v"),
        moves=True,
    )


def _axes(*dims: Any) -> tuple[int, ...]:
    """Dimensions, given one by one or as a sequence, as the axes 0 to 2; () where they are others, or one twice."""
    given = dims[0] if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else dims
    axes = tuple(dim % 3 for dim in given if type(dim) is int and -3 <= dim < 3)
    return axes if len({*axes}) == len(given) else ()


def _flip(image: Recording, *dims: Any) -> Any:
    axes = _axes(*dims)
    for axis, name in enumerate(("flip of channels", "v1.vflip", "v1.hflip")):
        image = image.record(Op(name)) if axis in axes else image
    return image if axes else NotImplemented


def _lower_flip_of_channels(lowered: LoweredImage) -> None:
    if lowered.channels == 3:
        lowered.add(Kind.PERMUTE, 2, 1, 0)


Operation(
    "flip of tensors",
    # Not a permutation, whose result has other strides.
    stock={"flip of channels": lambda image: image.flip(0)},
    record={torch.flip: lambda image, dims: _flip(image, dims), torch.Tensor.flip: _flip},
    lower=_lower_flip_of_channels,
)

# --- turns

_METHODS = frozenset(Image.Transpose)


def _transpose(image: Recording, method: Any) -> Any:
    if method not in _METHODS:
        return NotImplemented
    channels, height, width = image.shape
    sides = (height, width) if method in _HALF_TURNS else (width, height)
    return image.record(Op("pil.transpose", (int(method),)), (channels, *sides))


Operation(
    "transpose",
    stock={"pil.transpose": lambda image, method: image.transpose(method)},
    record={
        "Image.transpose": _transpose,
        "pil.hflip": functools.partial(_transpose, method=Image.Transpose.FLIP_LEFT_RIGHT),
        "pil.vflip": functools.partial(_transpose, method=Image.Transpose.FLIP_TOP_BOTTOM),
    },
    lower=_lower_transpose,
)


def turned(image: Recording, turns: int) -> Any:
    """Records `turns` quarter turns, counterclockwise."""
    channels, height, width = image.shape
    shape = (channels, width, height) if turns % 2 else (channels, height, width)
    return image.record(Op("v2.quarter_turns", (turns,)), shape)


_TURNS = {1: Image.Transpose.ROTATE_90, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_270}


def _lower_turns(lowered: LoweredImage, turns: int) -> None:
    if turns:
        _lower_transpose(lowered, _TURNS[turns])


def _rot90(image: Recording, k: Any = 1, dims: Any = (0, 1)) -> Any:
    axes = _axes(dims)
    if type(k) is not int or {*axes} != {1, 2}:
        return NotImplemented
    turns = (k if axes == (1, 2) else -k) % 4
    return turned(image, turns) if turns else _clone(image, torch.contiguous_format)


Operation(
    "quarter turns",
    stock={"v2.quarter_turns": lambda image, turns: image.rot90(turns, (-2, -1)) if turns else image.clone()},
    record=dict.fromkeys((torch.rot90, torch.Tensor.rot90), _rot90),
    lower=_lower_turns,
    moves=True,
    changes_layout=always,
)


def _transposed(image: Recording, *dims: Any) -> Any:
    """Records a view with rows and columns exchanged, for the two of them or none."""
    if dims and {*_axes(*dims)} != {1, 2}:
        return NotImplemented
    channels, height, width = image.shape
    return image.record(ViewOp("transposed"), (channels, width, height))


def _permuted(image: Recording, *dims: Any) -> Any:
    return _transposed(image) if _axes(*dims) == (0, 2, 1) else NotImplemented


_TRANSPOSED_BY = [
    getattr(owner, name) for owner in (torch, torch.Tensor) for name in ("transpose", "swapaxes", "swapdims")
]

Operation(
    "rows and columns",
    stock={"transposed": lambda image: image.transpose(-2, -1)},
    record={
        **dict.fromkeys(_TRANSPOSED_BY, lambda image, dim0, dim1: _transposed(image, dim0, dim1)),
        torch.Tensor.mT.__get__: lambda image: _transposed(image),  # type: ignore[attr-defined]
        torch.permute: lambda image, dims: _permuted(image, dims),
        torch.Tensor.permute: _permuted,
    },
    lower=functools.partial(_lower_transpose, method=Image.Transpose.TRANSPOSE),
    moves=True,
    changes_layout=always,
)

# --- memory


def _clone(image: Recording, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    known = memory_format in (torch.preserve_format, torch.contiguous_format)
    return image.record(Op("clone", (memory_format,))) if known else NotImplemented


Operation(
    "clone",
    stock={"clone": lambda image, memory_format: image.clone(memory_format=memory_format)},
    record=dict.fromkeys((torch.clone, torch.Tensor.clone), _clone),
    moves=True,
)


def _contiguous(image: Recording, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    if memory_format != torch.contiguous_format:
        return NotImplemented
    for op in reversed(image.calls):
        puts_channels_last = op.name in ("pil_to_tensor", "to_image")
        if op.name in ("to_tensor", "contiguous") or (puts_channels_last and image.shape[0] == 1):
            return image  # stock code's tensor is known to be contiguous, and `contiguous` returns the tensor itself
        if puts_channels_last or op.operation.changes_layout(op):
            break
    return image.record(ViewOp("contiguous"))


Operation(
    "contiguous",
    stock={"contiguous": torch.Tensor.contiguous},
    record={torch.Tensor.contiguous: _contiguous},
    moves=True,
)
