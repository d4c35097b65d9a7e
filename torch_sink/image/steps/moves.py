"""Crops, flips, pads, resizes, and affine transforms."""

from __future__ import annotations

import functools
from typing import Any

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
from torch_sink.image.steps.draws import as_drawn, chance, is_probability, kept, log_ratio, real, resized_crop, whole
from torch_sink.image.steps.registry import Functional, family_of, step

# --- pads and crops

_pad = Functional("pad", recorder("pil.pad"), v1="pad", v2="pad")
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
    corner = (whole(room[0] + 1), whole(room[1] + 1)) if any(room) else (0, 0)
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


# --- affine transforms and rotations

_record_transform = recorder("Image.transform")


def _affine_image(
    module: Any, draft: Draft, angle: float, translate: Any, scale: float, shear: Any, interpolation: Any, fill: Any,
    center: Any = None,
) -> Any:  # fmt: skip
    color, resample = color_of(fill, draft.lazy_shape[0]), FILTERS_BY_NAME.get(interpolation)
    if color is None or resample is None:
        return NotImplemented
    width, height = draft.size
    middle = [width * 0.5, height * 0.5] if center is None else center
    matrix = module._get_inverse_affine_matrix(middle, angle, translate, scale, shear)
    return _record_transform(draft, draft.size, Image.Transform.AFFINE, matrix, resample, 1, color)


def _rotate_image(draft: Draft, angle: float, interpolation: Any, expand: Any, center: Any, fill: Any) -> Any:
    color, resample = color_of(fill, draft.lazy_shape[0]), FILTERS_BY_NAME.get(interpolation)
    if color is None or resample is None:
        return NotImplemented
    return Image.Image.rotate(draft, angle, resample, expand, center, None, color)  # type: ignore[arg-type]


affine = Functional(
    "affine",
    {"v1": functools.partial(_affine_image, F), "v2": functools.partial(_affine_image, v2_geometry)},
    v2="affine",
)
rotate = Functional("rotate", _rotate_image, v2="rotate")


def _fill(transform: Any, draft: Draft) -> Any:
    return fill_of(transform, draft) if family_of(transform) == "v2" else transform.fill


def _takes(transform: Any, draft: Draft) -> bool:
    """False for tensors in v1, where a fill becomes floats."""
    return draft.kind is LazyImage or family_of(transform) == "v2"


@step(v1.RandomRotation, v2.RandomRotation, calls="rotate get_dimensions affine", takes_samples=True)
def _rotated(rotation: Any, draft: Draft) -> Any:
    if not _takes(rotation, draft):
        return NotImplemented
    angle, fill = real(*rotation.degrees), _fill(rotation, draft)
    draft.moves = {"angle": angle}
    return rotate(family_of(rotation), draft, angle, rotation.interpolation, rotation.expand, rotation.center, fill)


@step(v1.RandomAffine, v2.RandomAffine, calls="rotate get_dimensions affine", takes_samples=True)
def _moved(moves: Any, draft: Draft) -> Any:
    if not _takes(moves, draft):
        return NotImplemented
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
    arguments = angle, shift, scale, shear, moves.interpolation, _fill(moves, draft), moves.center
    return affine(family_of(moves), draft, *arguments)
