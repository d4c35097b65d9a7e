"""Pipelines that work on uint8 tensors, which the kernels of torchvision treat unlike Pillow images."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import functional as F1
from torchvision.transforms.v2 import functional as F2

from image.cases import SIZE, encoded, opener
from image.check import Opener, Pipeline

NEAREST, NEAREST_EXACT = InterpolationMode.NEAREST, InterpolationMode.NEAREST_EXACT
BICUBIC = InterpolationMode.BICUBIC


def _v1(*transforms: Pipeline) -> Pipeline:
    return v1.Compose([v1.Resize(SIZE), v1.PILToTensor(), *transforms])


def _v2(*transforms: Pipeline) -> Pipeline:
    return v2.Compose([v2.Resize(SIZE), v2.ToImage(), *transforms])


def color_images() -> list[Opener]:
    """Noise, whose colors lie everywhere, and a photograph."""
    noise = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    return [lambda: Image.fromarray(noise), opener(encoded(61, 47, 1))]


def _fourth_of_five(crops: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return crops[-2]


UINT8_GEOMETRY: dict[str, Callable[[], Pipeline]] = {
    "v1 smaller": lambda: _v1(v1.RandomCrop(12), v1.Resize((7, 9)), v1.RandomHorizontalFlip()),
    "v1 larger": lambda: _v1(v1.RandomHorizontalFlip(1.0), v1.Resize((31, 23), BICUBIC), v1.CenterCrop((20, 17))),
    "v1 bicubic": lambda: _v1(v1.Resize((5, 9), BICUBIC), v1.RandomInvert(1.0), v1.Resize((5, 6))),
    "v1 random crop, resized": lambda: _v1(v1.RandomResizedCrop(8), v1.ColorJitter(0.2, 0.9)),
    "v1 nearest": lambda: _v1(v1.Resize((9, 31), NEAREST), v1.RandomHorizontalFlip(), v1.Resize((8, 9), NEAREST_EXACT)),
    "v2 nearest": lambda: _v2(v2.Resize((9, 31), NEAREST), v2.RandomInvert(1.0), v2.Resize((23, 8), NEAREST_EXACT)),
    "v2 without antialiasing": lambda: _v2(v2.Resize((31, 7), antialias=False), v2.RandomVerticalFlip(1.0)),
    "v2 bicubic, without antialiasing": lambda: _v2(
        v2.Resize((5, 23), BICUBIC, antialias=False),
        v2.RandomHorizontalFlip(),
        v2.Resize((11, 3), BICUBIC, antialias=False),
    ),
    "v2 one axis, without antialiasing": lambda: _v2(v2.Resize((13, 30), antialias=False), v2.CenterCrop(9)),
    "v2 max_size": lambda: _v2(v2.Resize(12, max_size=14), v2.CenterCrop((20, 9))),
    "v2 random sizes": lambda: _v2(
        v2.RandomResize(8, 20), v2.RandomShortestSize([9, 12], max_size=15), v2.CenterCrop(16)
    ),
    "v2 larger than the image": lambda: _v2(v2.CenterCrop((17, 30)), v2.CenterCrop((40, 12))),
    "v2 Pillow images, larger than the image": lambda: v2.Compose(
        [v2.Resize(SIZE), v2.CenterCrop((17, 30)), v2.CenterCrop((40, 12)), v2.CenterCrop((41, 14)), v2.ToImage()]
    ),
    "v2 five crops": lambda: _v2(v2.FiveCrop((8, 9)), _fourth_of_five),
    "v2 ten crops": lambda: _v2(v2.TenCrop(7, vertical_flip=True), _fourth_of_five),
    "v2 a fill a channel": lambda: _v2(
        v2.Pad((1, 2, 3, 4), fill=(9, 200, 30)), v2.RandomZoomOut((1, 2, 3), p=1.0), v2.CenterCrop(30)
    ),
    "v2 dtype": lambda: _v2(lambda image: F2.convert_image_dtype(image, torch.float32)),
}

UINT8_COLOR: dict[str, Callable[[], Pipeline]] = {
    "v1 contrast": lambda: _v1(v1.ColorJitter(contrast=(0.0, 3.0)), v1.RandomHorizontalFlip()),
    "v1 saturation": lambda: _v1(v1.ColorJitter(saturation=(0.0, 3.0))),
    "v1 hue": lambda: _v1(v1.ColorJitter(hue=0.5)),
    "v1 jitter": lambda: _v1(v1.RandomCrop(12), v1.ColorJitter(0.4, 0.4, 0.4, 0.1), v1.RandomGrayscale(0.5)),
    "v1 gray, one channel": lambda: _v1(
        v1.Grayscale(), v1.RandomAutocontrast(1.0), v1.ColorJitter(0.2, 0.9), v1.ConvertImageDtype(torch.float32)
    ),
    "v1 gray, three channels": lambda: _v1(v1.Grayscale(3), v1.Pad(1, fill=9)),
    "v1 sharpness": lambda: _v1(v1.RandomAdjustSharpness(2.3, 1.0), v1.RandomAdjustSharpness(0.2, 1.0)),
    "v1 autocontrast": lambda: _v1(v1.CenterCrop(9), v1.RandomAutocontrast(1.0), v1.RandomEqualize(1.0)),
    "v1 gamma": lambda: _v1(functools.partial(F1.adjust_gamma, gamma=0.4, gain=1.3)),
    "v1 posterize": lambda: _v1(v1.RandomPosterize(2, 1.0), v1.RandomOrder([v1.RandomPosterize(0, 0.5)])),
    "v2 posterize": lambda: _v2(v2.RandomPosterize(8, 1.0), v2.RandomPosterize(0, 0.5)),
    "v2 contrast": lambda: _v2(v2.ColorJitter(contrast=(0.0, 3.0)), v2.RandomHorizontalFlip()),
    "v2 saturation": lambda: _v2(v2.ColorJitter(saturation=(0.0, 3.0))),
    "v2 hue": lambda: _v2(v2.ColorJitter(hue=0.5)),
    "v2 jitter": lambda: _v2(v2.RandomCrop(12), v2.ColorJitter(0.4, 0.4, 0.4, 0.1), v2.RandomGrayscale(0.5), v2.RGB()),
    "v2 gray, one channel": lambda: _v2(
        v2.Grayscale(), v2.RandomAutocontrast(1.0), v2.ColorJitter(0.2, 0.9), v2.ToDtype(torch.float32, scale=True)
    ),
    "v2 gray, and colors again": lambda: _v2(v2.Grayscale(), v2.RandomVerticalFlip(1.0), v2.RGB(), v2.RandomCrop(9)),
    "v2 sharpness": lambda: _v2(v2.RandomAdjustSharpness(2.3, 1.0), v2.RandomAdjustSharpness(0.2, 1.0)),
    "v2 autocontrast": lambda: _v2(v2.CenterCrop(9), v2.RandomAutocontrast(1.0), v2.RandomEqualize(1.0)),
    "v2 gamma": lambda: _v2(functools.partial(F2.adjust_gamma, gamma=0.4, gain=1.3)),
    "v2 photometric distortion": lambda: _v2(v2.RandomPhotometricDistort(p=0.8), v2.RandomChannelPermutation()),
    "v2 photometric distortion of Pillow images": lambda: v2.Compose(
        [v2.Resize(SIZE), v2.RandomPhotometricDistort(p=1.0), v2.RandomChannelPermutation(), v2.ToImage()]
    ),
    "v2 erased Pillow images": lambda: v2.Compose(
        [v2.RandomErasing(p=1.0, value=(9, 200, 30)), v2.Resize(SIZE), v2.RandomErasing(p=1.0), v2.ToImage()]
    ),
}
