"""Resizes, and crops that are resized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from PIL import Image
from torchvision.transforms import InterpolationMode as Mode
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms.v2 import functional as F_v2
from torchvision.transforms.v2.functional._geometry import _check_interpolation, _compute_resized_output_size

from torch_sink.image.core.arguments import whole_sides
from torch_sink.image.core.ops import CLOSE, EXACT, MOVED, RECORDERS, Op, Operation, Promise
from torch_sink.image.lower.resize import NEAREST_MODES, integer_resize_fits
from torch_sink.image.operations.examples import Arguments, Example, interpolations, sample

SMOOTH_MODES = (Mode.BILINEAR, Mode.BICUBIC)
_PILLOW_FILTERS = frozenset(range(6))  # Pillow 13 knows more; those are not recorded


def _resize_image(
    image: Any, size: Any, resample: int | None = None, box: Any = None, reducing_gap: float | None = None
) -> Any:
    if resample is None:
        resample = Image.Resampling.BICUBIC
    sides = whole_sides(size)
    if resample not in _PILLOW_FILTERS or box is not None or reducing_gap is not None or sides is None:
        return NotImplemented
    if sides == image.size:
        return image.copy()
    return image.record(Op("pil.resize", (sides, int(filter_of(image, resample)))), size=sides)


def filter_of(image: Any, resample: int) -> int:
    """The filter that Pillow uses: no color lies between two numbers of colors."""
    return Image.Resampling.NEAREST if image.mode == "P" else resample


def _resize_v1(family: str, handle: Any, size: Any, interpolation: Any = "bilinear", antialias: Any = True) -> Any:
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        return NotImplemented
    try:
        mode = Mode(interpolation)
    except ValueError:
        return NotImplemented
    if handle.sink_dtype == torch.uint8:
        if not _is_size(size) or mode not in (*NEAREST_MODES, *SMOOTH_MODES) or _is_unsure(size, mode, antialias):
            return NotImplemented
        return _record("v1.resize", handle, tuple(size), mode, antialias)
    return _resize_floats(family, handle, tuple(size), mode, antialias)


def _resize_v2(
    family: str, handle: Any, size: Any, interpolation: Any = Mode.BILINEAR, max_size: Any = None,
    antialias: bool | None = True,
) -> Any:  # fmt: skip
    channels, *old_size = handle.sink_shape
    new_size = tuple(_compute_resized_output_size(old_size, size=size, max_size=max_size))
    if new_size == tuple(old_size):
        return handle
    mode = Mode(_check_interpolation(interpolation))
    if handle.sink_dtype != torch.uint8:
        return _resize_floats(family, handle, new_size, mode, antialias)
    if not _is_size(new_size) or not (mode in NEAREST_MODES or integer_resize_fits(mode)):
        return NotImplemented
    if mode == Mode.LANCZOS and not antialias:
        return NotImplemented
    if antialias and new_size == (1, 1) and channels == 3:
        return NotImplemented  # which torch refuses, or not, by how pixels lie in memory
    return _record("v2.resize", handle, new_size, mode, antialias)


def _resize_floats(family: str, handle: Any, size: tuple[Any, ...], mode: Mode, antialias: Any) -> Any:
    if handle.sink_dtype != torch.float32 or not _is_size(size):
        return NotImplemented
    if size == tuple(handle.sink_shape[1:]):
        return handle
    if mode not in (*NEAREST_MODES, *SMOOTH_MODES) or _is_unsure(size, mode, antialias):
        return NotImplemented
    return _record(f"{family}.float_resize", handle, size, mode, antialias)


def _is_size(size: Any) -> bool:
    return all(type(side) is int and side > 0 for side in size)


def _is_unsure(size: Any, mode: Mode, antialias: Any) -> bool:
    """True for a resize to one column, of which torch's result depends on how pixels lie in memory."""
    return bool(antialias) and size[1] == 1 and mode not in NEAREST_MODES


def _record(name: str, handle: Any, size: tuple[int, int], mode: Mode, antialias: Any) -> Any:
    return handle.record(Op(name, (size, mode, bool(antialias))), shape=(handle.sink_shape[0], *size))


def _resized_crop(
    family: str, handle: Any, top: Any, left: Any, height: Any, width: Any, size: Any,
    interpolation: Any = Mode.BILINEAR, antialias: bool | None = True,
) -> Any:  # fmt: skip
    cropped = RECORDERS["v2.crop"](handle, top, left, height, width)
    if cropped is NotImplemented:
        return cropped
    return _resize_v2(family, cropped, size, interpolation, None, antialias)


def _promise(op: Op) -> Promise:
    _, mode, antialias = op.args
    if mode in NEAREST_MODES:
        return EXACT
    if op.name == "v1.resize":
        # torch without AVX2 adds in another order; with it the bits are equal.
        return Promise(1, 0.99, is_rounded=not antialias)
    return EXACT if op.name == "v2.resize" else Promise(floats=CLOSE if antialias else MOVED)


def _examples(a: Arguments) -> Iterator[Example]:
    modes = (Mode.BILINEAR, *(mode for mode in Mode if mode != Mode.BILINEAR))
    for mode in modes:
        yield Example("resize", (a.other, mode), label=mode.name)
        yield Example("resized_crop", (*a.corner(), *a.smaller, a.other, mode), label=mode.name)
    for mode in SMOOTH_MODES if not a.is_pillow else ():
        yield Example("resize", (a.other, mode), {"antialias": False}, f"{mode.name}, antialias=False")
    yield Example("resize", ([max(min(a.other) - 2, 1)],), {"max_size": max(a.other) + 3}, "max_size")
    yield Example("resize", ([a.height, 1],), label="to one column")


def _stock_v1(image: Any, size: tuple[int, int], mode: Mode, antialias: bool) -> Any:
    return F_tensor.resize(image, list(size), mode.value, antialias)


def _stock_v2(image: Any, size: tuple[int, int], mode: Mode, antialias: bool) -> Any:
    return F_v2.resize_image(image, list(size), mode, antialias=antialias)


Operation(
    "resize",
    stock={
        "pil.resize": lambda image, size, resample: image.resize(size, resample),
        **{"v1.resize": _stock_v1, "v1.float_resize": _stock_v1, "v2.resize": _stock_v2, "v2.float_resize": _stock_v2},
    },
    record={
        "v1.resize": _resize_v1, "v2.resize": _resize_v2, "v2.resized_crop": _resized_crop,
        "Image.resize": _resize_image,
    },
    promise=_promise,
    examples=_examples,
    transforms={
        "RandomResize": interpolations(6, 12, usual="BILINEAR"),
        "RandomResizedCrop": interpolations(8, usual="BILINEAR"),
        "RandomShortestSize": interpolations(8, usual="BILINEAR"),
        "Resize": [
            *interpolations((8, 12), usual="BILINEAR"), sample((8, 12), antialias=False, label="antialias=False"),
            sample((8, 1), label="to one column"),
        ],
        "ScaleJitter": interpolations((12, 12), usual="BILINEAR"),
    },
    overshoots=lambda op: "float" in op.name and op.args[1] == Mode.BICUBIC,
    keeps_info=lambda op: True,
)  # fmt: skip
