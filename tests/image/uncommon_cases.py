"""Pipelines of what is seldom asked for: odd paddings, wide types, values out of range, statistics of numpy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import functional as F1
from torchvision.transforms.v2 import functional as F2

from image.cases import MEAN, SIZE, STD
from image.check import Pipeline


def _v1(*transforms: Any) -> Pipeline:
    return v1.Compose([v1.Resize(SIZE), *transforms])


def _v2(*transforms: Any) -> Pipeline:
    return v2.Compose([v2.Resize(SIZE), *transforms])


def _erase(values: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    return F1.erase(image, 2, 3, 5, 7, values)


def _filter(blur: Any, image: Image.Image) -> Image.Image:
    return image.filter(blur)


def _constants(image: torch.Tensor) -> torch.Tensor:
    return ((image - 0.45) / 0.225 + 3) * -0.25


UNCOMMON: dict[str, Callable[[], Pipeline]] = {
    "v1 constants": lambda: _v1(v1.ToTensor(), v1.Lambda(_constants), v1.RandomHorizontalFlip(1.0)),
    "v2 constants behind a blur": lambda: _v2(
        v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.GaussianBlur(3, 1.0), v2.Lambda(_constants),
    ),
    "v1 mirrored as a whole": lambda: _v1(v1.PILToTensor(), v1.Pad((19, 13), padding_mode="symmetric")),
    "v1 float16, normalized behind a flip": lambda: _v1(
        v1.PILToTensor(), v1.RandomInvert(), v1.ConvertImageDtype(torch.float16), v1.RandomHorizontalFlip(1.0),
        v1.Normalize(MEAN, STD), v1.CenterCrop(9),
    ),
    "v1 erased beyond the range": lambda: _v1(
        v1.PILToTensor(), v1.ConvertImageDtype(torch.float32),
        functools.partial(_erase, torch.tensor([-2.0, 0.5, 7.0]).view(3, 1, 1)),
    ),
    "v1 statistics of numpy": lambda: _v1(
        v1.ToTensor(), v1.Normalize(np.array(MEAN), np.array(STD, dtype=np.float32)),
        v1.Normalize([0.3], (np.float64(2.0),)),
    ),
    "v2 three statistics of a gray image": lambda: _v2(
        v2.Grayscale(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD), v2.Resize((9, 8))
    ),
    "tv_tensors.Image of a Pillow image": lambda: _v2(
        tv_tensors.Image, v2.RandomHorizontalFlip(), torch.Tensor.contiguous, v2.ToDtype(torch.float32)
    ),
    "tv_tensors.Image of a tensor": lambda: _v1(v1.PILToTensor(), tv_tensors.Image, v2.ColorJitter(0.3), F2.invert),
    "Pillow's Gaussian blur": lambda: _v1(
        functools.partial(_filter, ImageFilter.GaussianBlur(1.7)), v1.RandomHorizontalFlip(),
        functools.partial(_filter, ImageFilter.GaussianBlur(9)), v1.PILToTensor(),
    ),
    "Pillow's box blur": lambda: _v1(
        functools.partial(_filter, ImageFilter.BoxBlur(2)), v1.RandomHorizontalFlip(),
        functools.partial(_filter, ImageFilter.BoxBlur((0.4, 0))), functools.partial(_filter, ImageFilter.BoxBlur((0, 99.5))),
        v1.PILToTensor(),
    ),
    "Pillow's kernels of weights": lambda: _v1(
        v1.RandomCrop(SIZE, padding=4, fill=(9, 90, 200)), functools.partial(_filter, ImageFilter.SHARPEN),
        v1.RandomHorizontalFlip(), functools.partial(_filter, ImageFilter.Kernel((5, 5), [*range(-3, 22)], offset=-20)),
        v1.ColorJitter(0.3, 0.3), v1.ToTensor(), v1.Normalize(MEAN, STD),
    ),
    "v1 one pixel wide": lambda: _v1(
        v1.PILToTensor(), v1.CenterCrop((13, 1)), v1.Resize((9, 6)), v1.ConvertImageDtype(torch.float32),
        v1.Resize((14, 7), InterpolationMode.BICUBIC),
    ),
}  # fmt: skip
