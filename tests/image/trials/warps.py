"""Affine and perspective transforms, rotations and elastic deformation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torchvision.transforms import InterpolationMode as Mode

from image.examples import Arguments, Example, Examples, interpolations, sample


def _examples(name: str, arguments: Callable[[Arguments], tuple[Any, ...]]) -> Callable[[Arguments], Iterator[Example]]:
    """Calls of a functional with each interpolation, and a fill."""
    modes = Mode.NEAREST, Mode.BILINEAR, Mode.BICUBIC
    return lambda a: (
        Example(name, arguments(a), {"interpolation": mode, "fill": a.fill()}, mode.name) for mode in modes
    )


def _affine_arguments(a: Arguments) -> tuple[Any, ...]:
    angle, shift = a.chance.uniform(-180, 180), [a.chance.randint(-3, 3), a.chance.randint(-3, 3)]
    return angle, shift, a.chance.uniform(0.6, 1.6), [a.chance.uniform(-20, 20), a.chance.uniform(-20, 20)]


EXAMPLES: dict[str, Examples] = {
    "affine": _examples("affine", _affine_arguments),
    "rotate": lambda a: [
        *_examples("rotate", lambda a: (a.chance.uniform(-180, 180),))(a),
        Example("rotate", (a.chance.uniform(10, 80),), {"expand": True}, "NEAREST, expand=True"),
    ],
    "perspective": _examples("perspective", lambda a: a.corners()),
    "elastic": _examples("elastic_transform", lambda a: (a.displacement(),)),
}
TRANSFORMS = {
    "RandomAffine": [
        *interpolations(10, translate=(0.1, 0.1), scale=(0.8, 1.2), shear=5, usual="NEAREST"),
        sample(0, translate=(0.2, 0.2), label="translation alone"),
    ],
    "RandomRotation": [
        *interpolations((20, 30), usual="NEAREST"), sample((20, 30), expand=True, label="expand=True"),
    ],
    "RandomPerspective": [sample(p=1.0)],
    "ElasticTransform": interpolations(sigma=1.0, usual="BILINEAR"),
}  # fmt: skip
