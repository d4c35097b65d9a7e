"""Crops, flips, pads, resizes and warps."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode as Mode
from torchvision.transforms import functional as F
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import _geometry as v2_geometry

from torch_sink.image.core.arguments import color_of
from torch_sink.image.core.ops import Op, recorder
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.operations.resize import FILTERS_BY_NAME
from torch_sink.image.steps.draft import Draft
from torch_sink.image.steps.draws import (
    as_drawn,
    chance,
    is_probability,
    kept,
    log_ratio,
    real,
    resized_crop,
    two_wholes,
    whole,
)
from torch_sink.image.steps.registry import Functional, family_of, step

# --- pads and crops

_record_pad = recorder("pil.pad")


@functools.lru_cache(maxsize=256)
def _evenly(side: int, fill: int, channels: int) -> Op:
    return Op("pil.pad", ((side,) * 4, (fill,) * 3 if channels == 3 else fill, "constant"))


def _pad_image(draft: Draft, padding: Any, fill: Any = None, mode: Any = "constant") -> Any:
    if not (type(padding) is type(fill) is int and padding >= 0 and mode == "constant"):
        return _record_pad(draft, padding, fill, mode)
    channels, height, width = draft.lazy_shape
    return draft.record(_evenly(padding, fill, channels), shape=(channels, height + 2 * padding, width + 2 * padding))


_pad = Functional("pad", _pad_image, v1="pad", v2="pad")
_crop_tensor = Functional("crop", {}, v1="crop", v2="crop")


def _crop(family: str, draft: Draft, top: int, left: int, height: int, width: int) -> Any:
    if draft.kind is LazyImage:
        return draft.crop((left, top, left + width, top + height))
    return _crop_tensor(family, draft, top, left, height, width)


_center_crop = Functional("center_crop", recorder("pil.center_crop"), v1="center_crop", v2="center_crop")


def fill_of(transform: Any, draft: Draft) -> Any:
    """The fill of a v2 transform, which may depend on the type of image."""
    return v2._utils._get_fill(transform._fill, draft.kind)


def _room(padded: Any, size: Any) -> tuple[int, int] | None:
    """Rows and columns that a crop leaves out; None where it does not fit, or its size is not two positive integers."""
    if padded is NotImplemented or type(size) not in (tuple, list) or len(size) != 2:
        return None
    if not (type(size[0]) is type(size[1]) is int and min(size) > 0):
        return None
    _, height, width = padded.lazy_shape
    room = height - size[0], width - size[1]
    return room if min(room) >= 0 else None


@step(v1.CenterCrop, v2.CenterCrop, calls="center_crop crop pad get_dimensions", takes_samples=True)
def _centered(transform: Any, draft: Draft) -> Any:
    draft.moves = {}
    return _center_crop.record(family_of(transform), draft, transform.size)


@step(v1.Pad, calls="pad crop")
def _padded_v1(pad: Any, draft: Draft) -> Any:
    return _pad.record("v1", draft, pad.padding, pad.fill, pad.padding_mode)


@step(v2.Pad, calls="pad crop", takes_samples=True)
def _padded_v2(pad: Any, draft: Draft) -> Any:
    draft.moves = {}
    return _pad.record("v2", draft, pad.padding, fill_of(pad, draft), pad.padding_mode)


@step(v1.RandomCrop, calls="pad crop get_dimensions")
def _cropped_v1(crop: Any, draft: Draft) -> Any:
    padded: Any = draft
    if crop.padding is not None:
        padded = _pad.record("v1", draft, crop.padding, crop.fill, crop.padding_mode)
    if (room := _room(padded, crop.size)) is None:
        return NotImplemented
    corner = two_wholes(room[0] + 1, room[1] + 1) if any(room) else (0, 0)
    return _crop("v1", padded, *corner, *crop.size)


@step(v2.RandomCrop, calls="pad crop", takes_samples=True)
def _cropped_v2(crop: Any, draft: Draft) -> Any:
    padded: Any = draft
    left, right, top, bottom = crop.padding or (0, 0, 0, 0)
    padding = [left, top, right, bottom]
    if any(padding):
        padded = _pad.record("v2", draft, padding, fill_of(crop, draft), crop.padding_mode)
    if (room := _room(padded, crop.size)) is None:
        return NotImplemented
    corner = [whole(free + 1) if free else 0 for free in room]
    box = dict(zip(("top", "left", "height", "width"), (*corner, *crop.size), strict=True))
    draft.moves = {"needs_crop": any(room), "needs_pad": any(padding), "padding": padding, **box}
    return _crop("v2", padded, *corner, *crop.size) if any(room) else padded


@step(v2.RandomIoUCrop, calls="crop convert_bounding_box_format", takes_samples=True)
def _cropped_near_boxes(crop: Any, draft: Draft) -> Any:
    beside = getattr(draft, "beside", ())
    if not any(isinstance(leaf, tv_tensors.BoundingBoxes) for leaf in beside):
        return NotImplemented
    draft.moves = box = crop.make_params(beside)
    return _crop("v2", draft, box["top"], box["left"], box["height"], box["width"]) if box else draft


# --- resizes


def _resize_image_v1(draft: Draft, size: Any, interpolation: Any, max_size: Any, antialias: Any) -> Any:
    sides = [size] if type(size) is int else size
    is_plain = type(sides) in (tuple, list) and len(sides) in (1, 2) and (max_size is None or len(sides) == 1)
    if not is_plain or type(interpolation) is not Mode or antialias is False:
        return NotImplemented
    height, width = F._compute_resized_output_size(draft.lazy_shape[1:], sides, max_size)
    return _resized(draft, height, width, F.pil_modes_mapping[interpolation])


def _resize_image_v2(draft: Draft, size: Any, interpolation: Any, max_size: Any, antialias: Any) -> Any:
    if type(interpolation) not in (Mode, str) or interpolation not in FILTERS_BY_NAME or antialias is False:
        return NotImplemented
    height, width = v2_geometry._compute_resized_output_size(draft.lazy_shape[1:], size=size, max_size=max_size)
    return _resized(draft, height, width, FILTERS_BY_NAME[interpolation])


_record_resize = recorder("Image.resize")


def _resized(draft: Draft, height: int, width: int, resample: int) -> Any:
    return draft if (height, width) == draft.lazy_shape[1:] else _record_resize(draft, (width, height), resample)


_resize = Functional("resize", {"v1": _resize_image_v1, "v2": _resize_image_v2}, v2="resize")
_resize_crop = Functional(
    "resized_crop", {"v1": recorder("pil.resized_crop"), "v2": recorder("pil.resized_crop_v2")}, v2="resized_crop"
)


@step(v1.Resize, v2.Resize, calls="resize get_dimensions", takes_samples=True)
def _resized_whole(resize: Any, draft: Draft) -> Any:
    draft.moves = {}
    arguments = resize.size, resize.interpolation, resize.max_size, resize.antialias
    return _resize.record(family_of(resize), draft, *arguments)


@step(v1.RandomResizedCrop, v2.RandomResizedCrop, calls="resized_crop crop resize get_dimensions", takes_samples=True)
def _resized_part(crop: Any, draft: Draft) -> Any:
    family = family_of(crop)
    logs = crop._log_ratio.tolist() if family == "v2" else log_ratio(tuple(crop.ratio))
    box = resized_crop(*draft.lazy_shape[1:], crop.scale, crop.ratio, logs, kept)
    draft.moves = {"top": box[0], "left": box[1], "height": box[2], "width": box[3]}
    return _resize_crop(family, draft, *box, crop.size, crop.interpolation, crop.antialias)


_NOTHING = torch.empty(1, 1, 1)


def sized(draft: Draft) -> torch.Tensor:
    """What `make_params` of v2 asks for a size."""
    return _NOTHING.expand(1, *draft.lazy_shape[1:])


@step(v2.RandomResize, v2.RandomShortestSize, v2.ScaleJitter, calls="resize get_size", takes_samples=True)
def _resized_at_random(resize: Any, draft: Draft) -> Any:
    draft.moves = resize.make_params([sized(draft)])
    return _resize("v2", draft, draft.moves["size"], resize.interpolation, None, resize.antialias)


@step(v2.RandomZoomOut, calls="pad get_size", takes_samples=True)
def _zoomed_out(zoom: Any, draft: Draft) -> Any:
    if not is_probability(zoom.p):
        return NotImplemented
    if chance() >= as_drawn(zoom.p):
        return draft
    draft.moves = zoom.make_params([sized(draft)])
    return _pad("v2", draft, draft.moves["padding"], fill_of(zoom, draft))


# --- flips

_MIRROR, _TURN_OVER = (Op("pil.transpose", (int(method),)) for method in (
    Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM,
))  # fmt: skip
_flips = {
    "RandomHorizontalFlip": Functional("hflip", lambda draft: draft.record(_MIRROR), v1="hflip", v2="horizontal_flip"),
    "RandomVerticalFlip": Functional("vflip", lambda draft: draft.record(_TURN_OVER), v1="vflip", v2="vertical_flip"),
}


@step(v1.RandomHorizontalFlip, v1.RandomVerticalFlip, calls="hflip vflip")
@step(v2.RandomHorizontalFlip, v2.RandomVerticalFlip, calls="horizontal_flip vertical_flip", takes_samples=True)
def _flipped(flip: Any, draft: Draft) -> Any:
    if not is_probability(flip.p):
        return NotImplemented
    if chance() >= as_drawn(flip.p):
        return draft
    draft.moves = {}
    return _flips[type(flip).__name__](family_of(flip), draft)


# --- warps

_record_transform = recorder("Image.transform")
_FILTERS = (Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
_AFFINE = int(Image.Transform.AFFINE)
# torchvision's own functions, and the same with the few matrices of automatic augmentations kept.
_MATRICES = {"v1": F._get_inverse_affine_matrix, "v2": v2_geometry._get_inverse_affine_matrix}
_KEPT_MATRICES = {family: functools.lru_cache(maxsize=4096)(matrix) for family, matrix in _MATRICES.items()}


def warped(draft: Draft, method: int, data: Sequence[float], fill: Any, interpolation: Any) -> Any:
    """Records `Image.transform` of a whole Pillow image."""
    channels, height, width = draft.lazy_shape
    color = fill if type(fill) is int else color_of(fill, channels)
    color = (color,) * 3 if channels == 3 and type(color) is int else color
    resample = FILTERS_BY_NAME.get(interpolation)
    if color is None or resample is None:
        return NotImplemented
    if method == _AFFINE and resample in _FILTERS:
        a, b, c, d, e, f = data
        if max(width * abs(a) + height * abs(b) + abs(c), width * abs(d) + height * abs(e) + abs(f)) < 32768:
            op = Op("pil.transform", ((width, height), _AFFINE, (a, b, c, d, e, f), int(resample), color))
            return Draft(draft.origin, (*draft.ops, op), draft.lazy_shape, draft.kind, draft.lazy_dtype)
    return _record_transform(draft, draft.size, method, data, resample, 1, color)  # which looks closer


def _affine_image(
    matrices: Any, draft: Draft, angle: float, translate: Any, scale: float, shear: Any, interpolation: Any, fill: Any,
    center: Any = None,
) -> Any:  # fmt: skip
    _, height, width = draft.lazy_shape
    middle = (width * 0.5, height * 0.5) if center is None else tuple(center)
    return warped(draft, _AFFINE, matrices(middle, angle, tuple(translate), scale, tuple(shear)), fill, interpolation)


def _rotate_image(draft: Draft, angle: float, interpolation: Any, expand: Any, center: Any, fill: Any) -> Any:
    _, height, width = draft.lazy_shape
    if center is None and not expand and angle % 90:  # as `Image.rotate` does it
        turn, x, y = -math.radians(angle % 360.0), width / 2, height / 2
        cos, sin = round(math.cos(turn), 15), round(math.sin(turn), 15)
        matrix = cos, sin, cos * -x + sin * -y + 0.0 + x, -sin, cos, -sin * -x + cos * -y + 0.0 + y
        return warped(draft, _AFFINE, matrix, fill, interpolation)
    color, resample = color_of(fill, draft.lazy_shape[0]), FILTERS_BY_NAME.get(interpolation)
    if color is None or resample is None:
        return NotImplemented
    return Image.Image.rotate(draft, angle, resample, expand, center, None, color)  # type: ignore[arg-type]


affine, _affine_drawn = (
    Functional("affine", {each: functools.partial(_affine_image, by[each]) for each in by}, v2="affine")
    for by in (_KEPT_MATRICES, _MATRICES)
)
rotate = Functional("rotate", _rotate_image, v2="rotate")


def fill_of_warp(transform: Any, draft: Draft) -> Any:
    """The fill of a warp; `NotImplemented` for tensors in v1, where it becomes floats."""
    if family_of(transform) == "v2":
        return fill_of(transform, draft)
    return transform.fill if draft.kind is LazyImage else NotImplemented


@step(v1.RandomRotation, v2.RandomRotation, calls="rotate get_dimensions affine", takes_samples=True)
def _rotated(rotation: Any, draft: Draft) -> Any:
    if (fill := fill_of_warp(rotation, draft)) is NotImplemented:
        return fill
    angle = real(*rotation.degrees)
    draft.moves = {"angle": angle}
    return rotate(family_of(rotation), draft, angle, rotation.interpolation, rotation.expand, rotation.center, fill)


@step(v1.RandomAffine, v2.RandomAffine, calls="rotate get_dimensions affine", takes_samples=True)
def _moved(moves: Any, draft: Draft) -> Any:
    if (fill := fill_of_warp(moves, draft)) is NotImplemented:
        return fill
    angle, (width, height), shift = real(*moves.degrees), draft.size, [0, 0]
    if moves.translate is not None:
        most = float(moves.translate[0] * width), float(moves.translate[1] * height)
        shift = [round(real(-side, side)) for side in most]
    scale = 1.0 if moves.scale is None else real(*moves.scale)
    shear = [0.0, 0.0]
    if moves.shear is not None:
        shear[0] = real(*moves.shear[:2])
        shear[1] = real(*moves.shear[2:]) if len(moves.shear) == 4 else 0.0
    draft.moves = {"angle": angle, "translate": tuple(shift), "scale": scale, "shear": tuple(shear)}
    arguments = angle, shift, scale, shear, moves.interpolation, fill, moves.center
    return _affine_drawn(family_of(moves), draft, *arguments)
