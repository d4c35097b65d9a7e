"""Flips, crops, pads and turns: pixels move, and their values stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from PIL import Image
from torchvision.transforms import _functional_pil as F_pil
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms.v2 import functional as F_v2
from torchvision.transforms.v2.functional._geometry import (
    _center_crop_compute_crop_anchor,
    _center_crop_compute_padding,
)

from torch_sink.image.core.arguments import (
    color_of,
    crop_fits,
    cropped_size,
    is_number,
    padding_fits,
    sides_of,
    size_of,
)
from torch_sink.image.core.ops import NUMERIC, Op, Operation, both
from torch_sink.image.operations.examples import Arguments, Example, Sample, of_method, sample

# --- flips


def _flip_examples(name: str) -> Any:
    return lambda a: iter([Example(name)])


def _flip(family: str, handle: Any) -> Any:
    return handle.record(Op("v1.hflip" if family == "v1" else "v2.horizontal_flip"))


def _flip_vertically(family: str, handle: Any) -> Any:
    return handle.record(Op("v1.vflip" if family == "v1" else "v2.vertical_flip"))


Operation(
    "horizontal flip",
    stock={"v1.hflip": F_tensor.hflip, "v2.horizontal_flip": F_v2.horizontal_flip_image},
    record={"v1.hflip": _flip, "v2.horizontal_flip": _flip},
    examples=_flip_examples("hflip"),
    transforms={"RandomHorizontalFlip": [sample(p=1.0)]},
    moves=True,
)
Operation(
    "vertical flip",
    stock={"v1.vflip": F_tensor.vflip, "v2.vertical_flip": F_v2.vertical_flip_image},
    record={"v1.vflip": _flip_vertically, "v2.vertical_flip": _flip_vertically},
    examples=_flip_examples("vflip"),
    transforms={"RandomVerticalFlip": [sample(p=1.0)]},
    moves=True,
)

_METHODS = frozenset(Image.Transpose)
# Those that keep the shape.
_HALF_TURNS = (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM, Image.Transpose.ROTATE_180)


def _transpose(image: Any, method: Any) -> Any:
    if method not in _METHODS:
        return NotImplemented
    width, height = image.size
    size = (width, height) if method in _HALF_TURNS else (height, width)
    return image.record(Op("pil.transpose", (int(method),)), size=size)


Operation(
    "transpose",
    stock={"pil.transpose": lambda image, method: image.transpose(method)},
    record={"Image.transpose": _transpose},
    examples=lambda a: of_method(a, "transpose", {method.name: (method,) for method in Image.Transpose}),
    keeps_info=lambda op: True,
)


# --- crops


def _crop(family: str, handle: Any, top: Any, left: Any, height: Any, width: Any) -> Any:
    channels, old_height, old_width = handle.sink_shape
    if not all(isinstance(value, int) for value in (top, left, height, width)):
        return NotImplemented
    inside = top >= 0 and left >= 0 and top + height <= old_height and left + width <= old_width
    if not crop_fits(top, left, height, width) or not (inside or handle.sink_dtype in NUMERIC):
        return NotImplemented
    beyond = not inside and handle.sink_dtype == torch.float32
    op = Op(f"{family}.crop_beyond" if beyond else f"{family}.crop", (top, left, height, width))
    return handle.record(op, shape=(channels, height, width), is_view=inside)


def _crop_image(image: Any, box: Any = None) -> Any:
    if box is None:
        return image.copy()
    if len(box) != 4:
        return NotImplemented
    left, upper, right, lower = map(int, map(round, box))
    if right <= left or lower <= upper:
        return NotImplemented
    return image.record(Op("pil.crop", ((left, upper, right, lower),)), size=(right - left, lower - upper))


def _center_crop(family: str, handle: Any, output_size: Any) -> Any:
    size = size_of(output_size)
    if size is None:
        return NotImplemented
    _, height, width = handle.sink_shape
    if size[0] > height or size[1] > width:
        handle = _pad("v2", handle, _center_crop_compute_padding(*size, height, width))
        if handle is NotImplemented or handle.sink_shape[1:] == size:
            return handle
        _, height, width = handle.sink_shape
    top, left = _center_crop_compute_crop_anchor(*size, height, width)
    return _crop("v2", handle, top, left, *size)


def _center_crop_image(image: Any, output_size: Any) -> Any:
    """The kernel of `v2.functional.center_crop` on Pillow images, which binds stock code's `pad`."""
    size = size_of(output_size)
    if size is None:
        return NotImplemented
    width, height = image.size
    if size[0] > height or size[1] > width:
        image = _pad_image(image, _center_crop_compute_padding(*size, height, width))
        width, height = image.size
        if size == (height, width):
            return image
    top, left = _center_crop_compute_crop_anchor(*size, height, width)
    return image.crop((left, top, left + size[1], top + size[0]))


def _five_crop(family: str, handle: Any, size: Any) -> Any:
    sides = size_of(size)
    if sides is None or sides[0] > handle.sink_shape[1] or sides[1] > handle.sink_shape[2]:
        return NotImplemented
    below, right = handle.sink_shape[1] - sides[0], handle.sink_shape[2] - sides[1]
    corners = (0, 0), (0, right), (below, 0), (below, right)
    return *(_crop(family, handle, top, left, *sides) for top, left in corners), _center_crop(family, handle, size)


def _ten_crop(family: str, handle: Any, size: Any, vertical_flip: bool = False) -> Any:
    crops = _five_crop(family, handle, size)
    if crops is NotImplemented:
        return crops
    return crops + _five_crop(family, (_flip_vertically if vertical_flip else _flip)(family, handle), size)


def _crop_examples(a: Arguments) -> Iterator[Example]:
    yield Example("crop", (*a.corner(), *a.smaller))
    yield Example("crop", (*a.corner_outside(), *a.smaller), label="partly outside")
    yield Example("center_crop", (a.smaller,))
    yield Example("center_crop", ([a.height + 3, a.width + 4],), label="larger")
    yield Example("five_crop", (a.smaller,))
    yield Example("ten_crop", (a.smaller,))


Operation(
    "crop",
    stock={
        "pil.crop": lambda image, box: image.crop(box),
        **{"v1.crop": F_tensor.crop, "v2.crop": F_v2.crop_image},
        # Of floats: what lies outside of the image is no value of a table.
        **{"v1.crop_beyond": F_tensor.crop, "v2.crop_beyond": F_v2.crop_image},
    },
    record={
        **both("crop", _crop),
        "v2.center_crop": _center_crop,
        "v2.five_crop": _five_crop,
        "v2.ten_crop": _ten_crop,
        "Image.crop": _crop_image,
        "pil.center_crop": _center_crop_image,
    },
    examples=_crop_examples,
    transforms={
        "CenterCrop": [sample(8), sample(32, label="larger than the image")],
        "FiveCrop": [sample(8)],
        "RandomCrop": [
            sample(8), sample(8, padding=2, label="padding"),
            sample(32, pad_if_needed=True, label="pad_if_needed=True"),
        ],
        "TenCrop": [sample(8)],
    },
    takes_palettes=True,
    moves=True,
    keeps_info=lambda op: True,
)  # fmt: skip
# --- pads


def _pad(family: str, handle: Any, padding: Any, fill: Any = None, padding_mode: Any = "constant") -> Any:
    channels, height, width = handle.sink_shape
    sides, fills = sides_of(padding), _fills(family, handle, fill, padding_mode == "constant")
    if sides is None or fills is None or not padding_fits(sides, padding_mode, height, width):
        return NotImplemented
    if padding_mode != "constant" and len(fills) > 1:
        return NotImplemented
    left, top, right, bottom = sides
    op = Op(f"{family}.pad", (list(sides), fills if len(fills) > 1 else fills[0], padding_mode))
    return handle.record(op, shape=(channels, height + top + bottom, width + left + right))


def _fills(family: str, handle: Any, fill: Any, is_used: bool) -> tuple[Any, ...] | None:
    """A fill as one value, or one a channel; None if unsupported."""
    if family == "v1" and isinstance(fill, (list, tuple)):
        return None
    values = (0,) if fill is None else tuple(fill) if isinstance(fill, (list, tuple)) else (fill,)
    if len(values) not in (1, handle.sink_shape[0]) or not all(map(is_number, values)):
        return None
    if handle.sink_dtype == torch.float32:
        return values
    values = tuple(map(int, values))
    return values if not is_used or (handle.sink_dtype == torch.uint8 and _are_bytes(values)) else None


def _are_bytes(values: tuple[int, ...]) -> bool:
    return min(values) >= 0 and max(values) <= 255


def _pad_image(image: Any, padding: Any, fill: Any = 0, padding_mode: Any = "constant") -> Any:
    sides = sides_of(padding)
    if sides is None or padding_mode not in ("constant", "edge", "reflect", "symmetric"):
        return NotImplemented
    width, height = image.size
    unused = padding_mode != "constant" and (fill is None or isinstance(fill, (int, float, tuple, list)))
    color = color_of(0 if unused else fill, 3 if image.mode == "RGB" else 1)
    size = width + sides[0] + sides[2], height + sides[1] + sides[3]
    if color is None or min(size) <= 0 or min(cropped_size(sides, height, width)) <= 0:
        return NotImplemented
    return image.record(Op("pil.pad", (sides, color, padding_mode)), size=size)


def _pad_examples(a: Arguments) -> Iterator[Example]:
    yield Example("pad", (a.padding,), {"fill": a.chance.randrange(256) * a.scale})
    for mode in ("edge", "reflect", "symmetric"):
        yield Example("pad", (a.padding,), {"padding_mode": mode}, mode)
    yield Example("pad", (a.padding,), {"fill": tuple(a.fill()) if a.is_pillow else a.fill()}, "a color")


Operation(
    "pad",
    stock={"pil.pad": F_pil.pad, "v1.pad": F_tensor.pad, "v2.pad": F_v2.pad_image},
    record={**both("pad", _pad), "pil.pad": _pad_image},
    examples=_pad_examples,
    transforms={
        "Pad": [
            sample(2), sample(2, fill=(1, 2, 3), label="fill of one value a channel"),
            *(Sample((2,), {"padding_mode": mode}, f"padding_mode={mode!r}") for mode in ("edge", "reflect")),
        ],
        "RandomZoomOut": [sample(p=1.0)],
    },
    takes_palettes=True,
    leaves_range=lambda op: op.args[2] == "constant" and not fits_range(op.args[1]),
)  # fmt: skip


def fits_range(written: Any) -> bool:
    """True where all of the values that a call writes lie in [0, 1]."""
    return all(0 <= value <= 1 for value in (written if isinstance(written, (tuple, list)) else (written,)))


# --- memory


def _contiguous(handle: Any, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    if memory_format != torch.contiguous_format:
        return NotImplemented
    return handle.record(Op("contiguous"), is_view=True)


Operation(
    "contiguous",
    stock={"contiguous": torch.Tensor.contiguous},
    record={torch.Tensor.contiguous: _contiguous},
    examples=lambda a: iter([] if a.is_pillow else [Example("contiguous", run=lambda image: image.contiguous())]),
    moves=True,
)
