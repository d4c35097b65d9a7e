"""Pipelines with AugMix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from image.cases import encoded, opener
from image.check import Opener, Pipeline

SIZE = (14, 17)
NEAREST = InterpolationMode.NEAREST


def images(number: int) -> list[Opener]:
    return [opener(encoded(30 + at, 22 + 2 * at, at)) for at in range(number)]


_STATISTICS = ("AutoContrast", "Equalize", "Contrast")
_SPACE = v2.AugMix._AUGMENTATION_SPACE


class OnlyStatistics(v2.AugMix):
    """Draws only operations that need the histogram of the whole image."""

    _AUGMENTATION_SPACE = {name: _SPACE[name] for name in _STATISTICS}  # noqa: RUF012


class NoStatistics(v2.AugMix):
    """Draws only operations that need no histogram."""

    _AUGMENTATION_SPACE = {name: entry for name, entry in _SPACE.items() if name not in _STATISTICS}  # noqa: RUF012


def _v1(*transforms: Any) -> Pipeline:
    return v1.Compose([v1.Resize(SIZE), *transforms])


def _v2(*transforms: Any) -> Pipeline:
    return v2.Compose([v2.Resize(SIZE), *transforms])


# Each calls for another way through the plan.
WAYS: dict[str, Callable[[], Pipeline]] = {
    "v1, resized": lambda: _v1(v1.AugMix(10), v1.ToTensor(), v1.Normalize((0.5,), (0.25,))),
    "v2, cropped alone": lambda: v2.Compose(
        [v2.PILToTensor(), v2.RandomCrop(SIZE), v2.RandomHorizontalFlip(1.0), v2.AugMix(8, 2)]
    ),
    "v2, histograms shared by branches": lambda: v2.Compose(
        [v2.PILToTensor(), v2.CenterCrop(SIZE), OnlyStatistics(mixture_width=4, chain_depth=2)]
    ),
    "v1, next to other images": lambda: _v1(
        v1.RandomApply([v1.AugMix(6, 2)]), v1.Grayscale(), v1.RandomApply([v1.AugMix(6, 2)]), v1.ToTensor()
    ),
    "v2, floats after it": lambda: _v2(
        v2.ToImage(), v2.AugMix(mixture_width=1), v2.ToDtype(torch.float32, scale=True), v2.ColorJitter(0.4, 0, 0.4)
    ),
    "v2, twice": lambda: _v2(v2.AugMix(), v2.RandomHorizontalFlip(1.0), v2.AugMix(9, 1), v2.Resize(9), v2.ToImage()),
}

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "partial": {"all_ops": False, "severity": 10},
    "depth 2, width 5": {"chain_depth": 2, "mixture_width": 5, "severity": 7},
    "width 1, depth 5": {"chain_depth": 5, "mixture_width": 1, "alpha": 0.2},
    "nearest": {"interpolation": NEAREST, "fill": 7.5, "severity": 9, "alpha": 3.0},
    "a color": {"fill": [1, 2, 3.5], "severity": 9},
}
INPUTS: dict[str, Callable[[dict[str, Any]], Pipeline]] = {
    "v1 Pillow images": lambda options: _v1(v1.AugMix(**options), v1.ToTensor()),
    "v1 tensors": lambda options: _v1(v1.PILToTensor(), v1.AugMix(**options)),
    "v1 on tv_tensors": lambda options: _v1(v2.ToImage(), v1.AugMix(**options)),
    "v2 Pillow images": lambda options: _v2(v2.AugMix(**options), v2.ToImage()),
    "v2 tensors": lambda options: _v2(v2.PILToTensor(), v2.AugMix(**options)),
    "v2 tv_tensors": lambda options: _v2(v2.ToImage(), v2.AugMix(**options), v2.ToDtype(torch.float32, scale=True)),
}
FILL_BY_TYPE = {tv_tensors.Image: 200, torch.Tensor: 90, "others": 3}
