"""Automatic augmentations: RandAugment, AutoAugment and TrivialAugmentWide."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torchvision.transforms import autoaugment as v1
from torchvision.transforms import v2

from torch_sink.image.core.ops import recorder
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.steps.draft import Draft
from torch_sink.image.steps.draws import as_drawn, chance, whole
from torch_sink.image.steps.moves import affine, fill_of, rotate
from torch_sink.image.steps.registry import Functional, step


def _shear(angle: float) -> float:
    return math.degrees(math.atan(angle))


# Takes the family, an image, a magnitude, an interpolation and a fill; returns the changed image.
_Apply = Callable[[str, Any, float, Any, Any], Any]
_MOVES: dict[str, _Apply] = {
    "ShearX": lambda family, image, by, *how: affine(family, image, 0.0, [0, 0], 1.0, [_shear(by), 0.0], *how, [0, 0]),
    "ShearY": lambda family, image, by, *how: affine(family, image, 0.0, [0, 0], 1.0, [0.0, _shear(by)], *how, [0, 0]),
    "TranslateX": lambda family, image, by, *how: affine(family, image, 0.0, [int(by), 0], 1.0, [0.0, 0.0], *how),
    "TranslateY": lambda family, image, by, *how: affine(family, image, 0.0, [0, int(by)], 1.0, [0.0, 0.0], *how),
    "Rotate": lambda family, image, by, mode, fill: rotate(family, image, by, mode, False, None, fill),
}


def _colors() -> dict[str, tuple[Functional, Callable[[float], tuple[Any, ...]]]]:
    """{name of an augmentation: its functional, and a function from a magnitude to its arguments}."""

    def functional(name: str) -> Functional:
        return Functional(name, recorder(f"pil.{name}"), v2=name)

    factors = {"Brightness": "brightness", "Color": "saturation", "Contrast": "contrast", "Sharpness": "sharpness"}
    none = {"AutoContrast": "autocontrast", "Equalize": "equalize", "Invert": "invert"}
    return {
        **{key: (functional(f"adjust_{name}"), lambda magnitude: (1.0 + magnitude,)) for key, name in factors.items()},
        **{key: (functional(name), lambda magnitude: ()) for key, name in none.items()},
        "Posterize": (functional("posterize"), lambda magnitude: (int(magnitude),)),
        "Solarize": (functional("solarize"), lambda magnitude: (magnitude,)),
    }


_COLORS = _colors()
_NAMES = {*_COLORS, *_MOVES, "Identity"}
_CALLS = (
    "affine rotate adjust_brightness adjust_saturation adjust_contrast adjust_sharpness posterize solarize "
    "autocontrast equalize invert get_dimensions"
)


def _applied(family: str, image: Any, name: str, magnitude: float, mode: Any, fill: Any) -> Any:
    if name in _COLORS:
        functional, arguments = _COLORS[name]
        return functional(family, image, *arguments(magnitude))
    return image if name == "Identity" else _MOVES[name](family, image, magnitude, mode, fill)


# --- transforms


@step(v1.RandAugment, calls=_CALLS)
def _rand_augment_v1(augment: Any, draft: Draft) -> Any:
    space = augment._augmentation_space(augment.num_magnitude_bins, draft.lazy_shape[1:])
    if draft.kind is not LazyImage or not _NAMES.issuperset(space):
        return NotImplemented
    names, image = list(space), draft
    for _ in range(augment.num_ops):
        image = _applied_v1(augment, image, space, names[whole(len(names))], lambda magnitudes: augment.magnitude)
    return image


@step(v1.TrivialAugmentWide, calls=_CALLS)
def _trivial_augment_v1(augment: Any, draft: Draft) -> Any:
    space = augment._augmentation_space(augment.num_magnitude_bins)
    if draft.kind is not LazyImage or not _NAMES.issuperset(space):
        return NotImplemented
    name = list(space)[whole(len(space))]
    return _applied_v1(augment, draft, space, name, lambda magnitudes: whole(len(magnitudes)))


def _applied_v1(augment: Any, image: Any, space: Any, name: str, choose: Callable[[Any], int]) -> Any:
    magnitudes, signed = space[name]
    magnitude = float(magnitudes[choose(magnitudes)].item()) if magnitudes.ndim > 0 else 0.0
    if signed and whole(2):
        magnitude *= -1.0
    return _applied("v1", image, name, magnitude, augment.interpolation, augment.fill)


@step(v1.AutoAugment, calls=_CALLS)
def _auto_augment_v1(augment: Any, draft: Draft) -> Any:
    space = augment._augmentation_space(10, draft.lazy_shape[1:])
    if draft.kind is not LazyImage or not _NAMES.issuperset(space):
        return NotImplemented
    policy, image = augment.policies[whole(len(augment.policies))], draft
    draws, signs = (chance(), chance()), (whole(2), whole(2))
    for (name, probability, at), draw, sign in zip(policy, draws, signs, strict=False):
        if draw <= as_drawn(probability):
            magnitudes, signed = space[name]
            magnitude = float(magnitudes[at].item()) if at is not None else 0.0
            magnitude = -magnitude if signed and sign == 0 else magnitude
            image = _applied("v1", image, name, magnitude, augment.interpolation, augment.fill)
    return image


@step(v2.RandAugment, calls=_CALLS)
def _rand_augment_v2(augment: Any, draft: Draft) -> Any:
    space = augment._AUGMENTATION_SPACE
    if not _takes_v2(draft, space):
        return NotImplemented
    names, image = list(space), draft
    for _ in range(augment.num_ops):
        name = names[whole(len(names))]
        image = _applied_v2(augment, image, draft, name, augment.num_magnitude_bins, lambda: augment.magnitude)
    return image


@step(v2.TrivialAugmentWide, calls=_CALLS)
def _trivial_augment_v2(augment: Any, draft: Draft) -> Any:
    space, bins = augment._AUGMENTATION_SPACE, augment.num_magnitude_bins
    if not _takes_v2(draft, space):
        return NotImplemented
    return _applied_v2(augment, draft, draft, list(space)[whole(len(space))], bins, lambda: whole(bins))


@step(v2.AutoAugment, calls=_CALLS)
def _auto_augment_v2(augment: Any, draft: Draft) -> Any:
    if not _takes_v2(draft, augment._AUGMENTATION_SPACE):
        return NotImplemented
    image = draft
    for name, probability, at in augment._policies[whole(len(augment._policies))]:
        if chance() <= as_drawn(probability):
            image = _applied_v2(augment, image, draft, name, 10, functools.partial(int, at))
    return image


def _takes_v2(draft: Draft, space: Any) -> bool:
    """False for floats, for which the threshold of Solarize has another range, and for unknown augmentations."""
    return draft.lazy_dtype == torch.uint8 and _NAMES.issuperset(space)


def _applied_v2(augment: Any, image: Any, draft: Draft, name: str, bins: int, choose: Callable[[], Any]) -> Any:
    make, signed = augment._AUGMENTATION_SPACE[name]
    magnitudes, magnitude = make(bins, *draft.lazy_shape[1:]), 0.0
    if magnitudes is not None:
        magnitude = float(magnitudes[choose()])
        if signed and chance() <= 0.5:
            magnitude *= -1
    magnitude = 255.0 * magnitude if name == "Solarize" else magnitude
    return _applied("v2", image, name, magnitude, augment.interpolation, fill_of(augment, draft))
