"""Affine transforms and rotations."""

from __future__ import annotations

import functools
from typing import Any

from PIL import Image
from torchvision.transforms import functional as F
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import _geometry as v2_geometry

from torch_sink.image.core.arguments import color_of
from torch_sink.image.core.ops import recorder
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.operations.resize import FILTERS_BY_NAME
from torch_sink.image.steps.draft import Draft
from torch_sink.image.steps.draws import real
from torch_sink.image.steps.moves import fill_of
from torch_sink.image.steps.registry import Functional, family_of, step

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
