"""Crops, parts, pads, flips, turns and copies: pixels move, and their values stay."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms.v2 import functional as F_v2
from torchvision.transforms.v2.functional._geometry import (
    _center_crop_compute_crop_anchor,
    _center_crop_compute_padding,
)

from torch_sink.image.core.arguments import Sides, color_of, fits_range, is_number, padding_fits, sides_of, size_of
from torch_sink.image.core.lowering import ATOM, ATOM_BYTES, OUTPUT_HEIGHT, OUTPUT_WIDTH, LoweredImage, byte_fill
from torch_sink.image.core.ops import RECORDERS, Op, Operation, ViewOp, always, both
from torch_sink.image.core.recording import Recording
from torch_sink.image.operations.colors import permute_channels
from torch_sink.image.operations.functionals import functional
from torch_sink.image.operations.pointwise import fill_where, is_mask
from torch_sink.triton_kernels.rows import FIRST_OUTPUT, Kind

# --- to kernel work


def shift(lowered: LoweredImage, top: int, left: int, height: int, width: int, fill: Any = 0) -> None:
    """SHIFT: (left, top, input width, input height), and a fill. Input position = output position + (left, top)."""
    old_height, old_width = lowered.height, lowered.width
    lowered.height, lowered.width = height, width
    inside = top >= 0 and left >= 0 and top + height <= old_height and left + width <= old_width
    if inside and len(lowered.codes) > 1 and narrow_resize(lowered, top, left):
        return
    if left or top or width != old_width or height != old_height:
        lowered.add(Kind.SHIFT, left, top, old_width, old_height, fill=() if inside else lowered.fill_of(fill))


_ACROSS_FIRST = [Kind.RESAMPLE_X, Kind.RESAMPLE_Y], [Kind.FILTER_X, Kind.FILTER_Y]
_DOWN_FIRST = [Kind.RESAMPLE_Y, Kind.RESAMPLE_X], [Kind.FILTER_Y, Kind.FILTER_X]


def narrow_resize(lowered: LoweredImage, top: int, left: int) -> bool:
    """Applies a crop to the resize or blur right before it, which then makes only these pixels.

    Returns False where no such filter comes before.
    """
    kinds, size = lowered.codes[-2:], [lowered.height, lowered.width]
    one, other = (list(lowered.atom(len(lowered.codes) - back)) for back in (2, 1))
    if kinds in _ACROSS_FIRST:
        offsets, one[OUTPUT_WIDTH] = (left, top), lowered.width
    elif kinds in _DOWN_FIRST:
        offsets, one[OUTPUT_HEIGHT] = (top, left), lowered.height
    else:
        return False
    one[FIRST_OUTPUT] += offsets[0]
    other[FIRST_OUTPUT] += offsets[1]
    other[OUTPUT_HEIGHT:] = size
    lowered.atoms[-2 * ATOM_BYTES :] = ATOM.pack(*one) + ATOM.pack(*other)
    return True


def _lower_crop_image(lowered: LoweredImage, box: tuple[int, int, int, int]) -> None:
    left, upper, right, lower_ = box
    shift(lowered, upper, left, lower_ - upper, right - left)


_PAD_KINDS = {"edge": Kind.EDGE, "reflect": Kind.REFLECT, "symmetric": Kind.SYMMETRIC}


def _lower_pad(lowered: LoweredImage, sides: Sides, fill: Any, mode: str) -> None:
    """EDGE, REFLECT, SYMMETRIC: (left, top, input width, input height), added as for SHIFT, then brought inside."""
    left, top, right, bottom = sides
    height, width = lowered.height + top + bottom, lowered.width + left + right
    if mode == "constant":
        shift(lowered, -top, -left, height, width, fill)
    elif any(sides):
        old_height, old_width = lowered.resize_to(height, width)
        lowered.add(_PAD_KINDS[mode], -left, -top, old_width, old_height)


def remap(lowered: LoweredImage, x_table: np.ndarray, y_table: np.ndarray, fill: Any = 0) -> None:
    """REMAP: a fill, and two tables: input x by output x, input y by output y; -1 is outside."""
    lowered.resize_to(len(y_table), len(x_table))
    lowered.add(Kind.REMAP, fill=lowered.fill_of(fill), tables=(x_table, y_table))


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


# --- crops


class _Sized:
    """What `Image.crop` needs of an image, without pixels."""

    _crop = Image.Image._crop

    def __init__(self, size: tuple[int, int]) -> None:
        self.size, self.im = size, self

    def crop(self, *_: Any) -> None:
        """Stands for the methods that Pillow calls."""

    load = copy = _new = crop


def check_size(size: tuple[int, int], box: tuple[int, int, int, int]) -> None:
    """Warns and raises as Pillow does where it crops: a box with more than `Image.MAX_IMAGE_PIXELS` may be an attack.

    `size` is that of the image, (width, height).
    """
    most, (left, upper, right, lower) = Image.MAX_IMAGE_PIXELS, box
    if most is not None and (right - left) * (lower - upper) > most:
        Image.Image.crop(_Sized(size), box)  # type: ignore[arg-type]


def _cropped_image(image: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
    """As `image.crop`, without the check of the size, which was made when the call was recorded."""
    image.load()
    return image._new(image.im.crop(box))


def crop(family: str, image: Recording, top: Any, left: Any, height: Any, width: Any) -> Any:
    """Records a crop of a tensor."""
    channels, old_height, old_width = image.shape
    if not {int, bool}.issuperset(map(type, (top, left, height, width))):
        return NotImplemented
    inside = top >= 0 and left >= 0 and top + height <= old_height and left + width <= old_width
    # What stock code makes of a box that ends above the image or left of it has another size than the box.
    fits = height > 0 and width > 0 and top + height >= 0 and left + width >= 0
    if not fits or not (inside or image.dtype == torch.uint8):
        return NotImplemented
    kind = ViewOp if inside else Op
    return image.record(kind(f"{family}.crop", (top, left, height, width)), (channels, height, width))


def _crop_image(image: Recording, box: Any = None) -> Any:
    if box is None:
        return image.copied()
    if not isinstance(box, (tuple, list)) or len(box) != 4:
        return NotImplemented
    left, upper, right, lower = map(int, map(round, box))
    if right <= left or lower <= upper:
        return NotImplemented
    check_size(image.size, inner := (left, upper, right, lower))
    return image.record(Op("pil.crop", (inner,)), (image.shape[0], lower - upper, right - left))


def _crop_pillow(image: Recording, top: Any, left: Any, height: Any, width: Any) -> Any:
    return _crop_image(image, (left, top, left + width, top + height))


def _center_crop(family: str, image: Recording, output_size: Any) -> Any:
    size, (_, height, width) = size_of(output_size), image.shape
    if size is None:
        return NotImplemented
    if size[0] > height or size[1] > width:
        image = _pad(family, image, _center_crop_compute_padding(*size, height, width))
        if image is NotImplemented or image.shape[1:] == size:
            return image
        _, height, width = image.shape
    top, left = _center_crop_compute_crop_anchor(*size, height, width)
    if family == "pil":
        return _crop_image(image, (left, top, left + size[1], top + size[0]))
    return crop(family, image, top, left, *size)


Operation(
    "crop",
    stock={
        "pil.crop": _cropped_image,
        **{"v1.crop": F_tensor.crop, "v2.crop": F_v2.crop_image},
    },
    lower={"pil.crop": _lower_crop_image, **both("crop", shift)},
    record={
        **both("crop", crop),
        **both("center_crop", _center_crop),
        "Image.crop": _crop_image,
        "pil.crop": _crop_pillow,
        # torchvision's `center_crop` of Pillow images calls its own `pad`, which has no stand-in.
        "pil.center_crop": functools.partial(_center_crop, "pil"),
    },
    changes_layout=always,
    takes_palettes=True,
    moves=True,
)

# --- parts of tensors


def part(image: Recording, index: Any) -> Any:
    """Records an index of a tensor that puts the channels in another order, or takes a box of all channels."""
    parts = index if type(index) is tuple else (index,)
    if type(parts[0]) is list and all(part in (Ellipsis, slice(None)) for part in parts[1:]) and len(parts) <= 3:
        return permute_channels("v2", image, parts[0])
    box = _box(image, parts)
    return NotImplemented if box is None else RECORDERS["v1.crop"](image, *box)


def _assign(image: Recording, index: Any, value: Any) -> Any:
    """Records `image[:, top:bottom, left:right] = values`, as some libraries erase a box, or `image[mask] = value`."""
    if is_mask(index):
        return fill_where(image, index, value, in_place=True)
    box = _box(image, index) if type(index) is tuple and type(value) is torch.Tensor else None
    return NotImplemented if box is None else RECORDERS["v1.erase"](image, *box, value, inplace=True)


def _box(image: Recording, parts: tuple[Any, ...]) -> tuple[int, int, int, int] | None:
    """The box (top, left, height, width) of all channels that an index means; None where it means something else."""
    ellipses = [at for at, part in enumerate(parts) if part is Ellipsis]
    at = ellipses[0] if ellipses else len(parts)
    before, behind = parts[:at], parts[at + 1 :]
    missing = 3 - len(before) - len(behind)
    slices = [*before, *[slice(None)] * missing, *behind]
    is_plain = len(ellipses) < 2 and missing >= 0
    if not is_plain or not all(type(part) is slice and part.step in (None, 1) for part in slices):
        return None
    ends = [part.indices(side) for part, side in zip(slices, image.shape, strict=True)]
    (first, last, _), (top, bottom, _), (left, right, _) = ends
    is_box = (first, last) == (0, image.shape[0]) and bottom > top and right > left
    return (top, left, bottom - top, right - left) if is_box else None


Operation("parts of tensors", stock={}, record={torch.Tensor.__setitem__: _assign})

# --- pads


def _pad(family: str, image: Recording, padding: Any, fill: Any = None, padding_mode: Any = "constant") -> Any:
    sides, (channels, height, width) = sides_of(padding), image.shape
    if sides is None or not padding_fits(sides, padding_mode, height, width):
        return NotImplemented
    left, top, right, bottom = sides
    height, width = height + top + bottom, width + left + right
    if family == "pil":
        unused = padding_mode != "constant" and isinstance(fill, (int, float, tuple, list))
        color = color_of(0 if unused else fill, channels)
        if color is None:
            return NotImplemented
        return image.record(Op("pil.pad", (sides, color, padding_mode)), (channels, height, width))
    fills = _fills(family, image, fill, padding_mode == "constant")
    if fills is None or (padding_mode != "constant" and len(fills) > 1):
        return NotImplemented
    op = Op(f"{family}.pad", (sides, fills if len(fills) > 1 else fills[0], padding_mode))
    return image.record(op, (channels, height, width))


def _fills(family: str, image: Recording, fill: Any, is_used: bool) -> tuple[Any, ...] | None:
    """The fill of a pad of tensors as one value, or one a channel; None if unsupported."""
    if family == "v1" and isinstance(fill, (list, tuple)):
        return None
    values = (0,) if fill is None else tuple(fill) if isinstance(fill, (list, tuple)) else (fill,)
    if len(values) not in (1, image.shape[0]) or not all(map(is_number, values)):
        return None
    if image.dtype == torch.float32:
        return values
    values = tuple(map(int, values))
    are_bytes = image.dtype == torch.uint8 and 0 <= min(values) <= max(values) <= 255
    return values if are_bytes or not is_used else None


functional(
    "pad",
    _pad,
    _lower_pad,
    takes_palettes=True,
    leaves_range=lambda op: op.args[2] == "constant" and not fits_range(op.args[1]),
    loses_info=always,
)

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
    made: Any = image if axes else NotImplemented
    for axis, name in enumerate(("flip of channels", "v1.vflip", "v1.hflip")):
        if axis in axes and made is not NotImplemented:
            made = made.record(Op(name))
    return made


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
    if not isinstance(method, int) or method not in _METHODS:
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
