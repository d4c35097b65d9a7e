"""Pipelines that go on in float32 after the conversion to tensors, and those that fall back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import ImageFilter
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import functional as F1
from torchvision.transforms.v2 import functional as F2

from image.cases import MEAN, SIZE, STD
from image.check import Pipeline
from torch_sink.image.operations.resize import integer_resize_fits

BILINEAR, BICUBIC = InterpolationMode.BILINEAR, InterpolationMode.BICUBIC


def _v1(*transforms: Any, before: tuple[Any, ...] = (), normalize: bool = False) -> Pipeline:
    return v1.Compose([*before, v1.ToTensor(), *transforms, *([v1.Normalize(MEAN, STD)] if normalize else [])])


def _v2(*transforms: Any, before: tuple[Any, ...] = ()) -> Pipeline:
    return v2.Compose([*before, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), *transforms])


def scaled_in_place(image: Any) -> Any:
    image *= 1.7
    image -= 0.2
    image /= 0.3
    return image.add_(0.1)


FLOAT: dict[str, Callable[[], Pipeline]] = {
    "v1 resize": lambda: _v1(v1.Resize(SIZE), normalize=True),
    "v1 larger": lambda: _v1(v1.Resize((70, 66))),
    "v1 train": lambda: _v1(v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), normalize=True),
    "v1 bicubic": lambda: _v1(v1.RandomResizedCrop(SIZE, interpolation=InterpolationMode.BICUBIC)),
    "v1 resize, center crop": lambda: _v1(v1.Resize((30, 28)), v1.CenterCrop(SIZE), normalize=True),
    "v1 without antialiasing": lambda: _v1(v1.Resize(SIZE, antialias=False), v1.RandomVerticalFlip()),
    "v1 after a resize of bytes": lambda: _v1(v1.Pad(3, fill=7), v1.Resize(SIZE), before=(v1.RandomHorizontalFlip(), v1.Resize((40, 30)))),
    "v1 converted": lambda: v1.Compose([v1.PILToTensor(), v1.ConvertImageDtype(torch.float32), v1.Resize(SIZE), v1.Pad((1, 2))]),
    "v1 jitter": lambda: _v1(v1.ColorJitter(0.4, 0.4, 0.4, 0.1), before=(v1.Resize(SIZE),), normalize=True),
    "v1 jitter without contrast": lambda: _v1(v1.ColorJitter(0.9, 0.0, 0.9, 0.5), before=(v1.Resize(SIZE),)),
    "v1 normalized in between": lambda: _v1(v1.Normalize(MEAN, STD), v1.Resize(SIZE), v1.Normalize((0.1,), (2.0,))),
    "v1 products": lambda: _v1(v1.Lambda(lambda x: x * 255), v1.Normalize((120.0,), (60.0,)), v1.Lambda(lambda x: x * 0.3), before=(v1.Resize(SIZE),)),
    "v2 products": lambda: _v2(v2.RandomHorizontalFlip(1.0), v2.CenterCrop(9), v2.Lambda(lambda x: 255 * x), v2.Lambda(lambda x: x - 0.3),
                    v2.Grayscale(3), v2.Lambda(lambda x: x * -0.25), before=(v2.Resize(SIZE),)),
    "products of resized values": lambda: _v1(v1.Resize(SIZE), v1.Lambda(lambda x: x * 255), v1.Normalize((120.0,), (60.0,)),
                    v1.RandomErasing(1.0, value=0.7), v1.Lambda(lambda x: 0.3 * x)),
    "products in place": lambda: _v1(v1.Resize(SIZE), v1.Lambda(scaled_in_place), v1.RandomHorizontalFlip(1.0)),
    "v2 train": lambda: _v2(v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), v2.Normalize(MEAN, STD)),
    "v2 resize": lambda: _v2(v2.Resize((12, 40)), v2.CenterCrop(14)),
    "v2 bicubic": lambda: _v2(v2.Resize(SIZE, InterpolationMode.BICUBIC), v2.RandomCrop(16, pad_if_needed=True)),
    "v2 jitter": lambda: _v2(v2.ColorJitter(0.4, 0.4, 0.4, 0.1), before=(v2.Resize(SIZE),)),
    "v2 jitter without contrast": lambda: _v2(v2.ColorJitter(0.9, 0.0, 0.9, 0.5), v2.Resize((9, 8)), before=(v2.Resize(SIZE),)),
    "bicubic without antialiasing": lambda: _v2(v2.Resize((9, 30), InterpolationMode.BICUBIC, antialias=False), v2.RandomHorizontalFlip(),
                    v2.Normalize(MEAN, STD), v2.Resize((40, 12), InterpolationMode.BICUBIC, antialias=False)),
    "half precision": lambda: _v2(v2.RandomApply([v2.ColorJitter(saturation=2.0)]), v2.ToDtype(torch.float16), v2.RandomHorizontalFlip(),
                    v2.CenterCrop(SIZE), before=(v2.Resize((40, 31)),)),
    "a hue after contrast": lambda: _v2(v2.ColorJitter(contrast=(0.3, 1.7)), v2.ColorJitter(hue=0.3), v2.RandomHorizontalFlip(),
                    before=(v2.Resize(SIZE),)),
    "v1 nearest": lambda: _v1(v1.Resize(SIZE, InterpolationMode.NEAREST), v1.Resize((9, 23), InterpolationMode.NEAREST_EXACT)),
    "v1 blur": lambda: _v1(v1.GaussianBlur((5, 3), (0.3, 2.0)), before=(v1.Resize(SIZE),), normalize=True),
    "v2 large blur": lambda: _v2(v2.GaussianBlur((15, 1), (1.0, 4.0)), before=(v2.Resize(SIZE),)),
    "v2 sharpness": lambda: _v2(v2.RandomAdjustSharpness(0.2, 1.0), before=(v2.Resize(SIZE),)),
    "v1 pads and erases": lambda: _v1(v1.ColorJitter(saturation=2.0), v1.Pad((2, 3), fill=0.3), v1.RandomErasing(1.0, value=0.7),
                    v1.RandomCrop(15, padding=2, padding_mode="reflect"), before=(v1.Resize(SIZE),), normalize=True),
    "v2 pads and erases": lambda: _v2(v2.Pad((1, 2), fill=(0.1, 0.2, 0.3)), v2.RandomHorizontalFlip(), v2.Pad(2, padding_mode="edge"),
                    v2.RandomErasing(1.0, value=(0.3, 0.2, 0.1)), v2.CenterCrop((30, 11)), v2.Normalize(MEAN, STD),
                    before=(v2.Resize(SIZE),)),
    "v1 gray": lambda: _v1(v1.RandomGrayscale(0.5), v1.Grayscale(1), v1.Normalize((0.5,), (0.2,)), before=(v1.Resize(SIZE),)),
    "v2 gray": lambda: _v2(v2.Grayscale(1), v2.ColorJitter(0.5, 0.5, 0.5, 0.2), v2.RGB(), v2.RandomChannelPermutation(),
                    before=(v2.Resize(SIZE),)),
    "v1 rotate": lambda: _v1(v1.RandomRotation(80, fill=(0.1, 0.2, 0.3)), v1.Resize(SIZE),
                    v1.RandomRotation(20, InterpolationMode.BILINEAR, fill=0.4)),
    "v1 affine, perspective": lambda: _v1(v1.RandomAffine(40, (0.2, 0.3), (0.6, 1.5), 20, InterpolationMode.BILINEAR),
                    v1.RandomPerspective(0.6, 1.0), before=(v1.Resize(SIZE),)),
    "v1 elastic": lambda: _v1(v1.ElasticTransform(30.0, 2.0, fill=0.5), before=(v1.Resize(SIZE),)),
    "v2 rotate": lambda: _v2(v2.RandomRotation(80, expand=True, fill=0.3), v2.RandomRotation((90, 90), expand=True),
                    v2.Resize(SIZE), v2.RandomRotation(80, InterpolationMode.BILINEAR, fill=(0.1, 0.2, 0.3))),
    "v2 affine, perspective": lambda: _v2(v2.RandomAffine(40, (0.2, 0.3), (0.6, 1.5), 20, InterpolationMode.BILINEAR, center=(3, 4)),
                    v2.RandomPerspective(0.6, 1.0, InterpolationMode.NEAREST), before=(v2.Resize(SIZE),)),
    "v2 elastic": lambda: _v2(v2.ElasticTransform(30.0, 2.0), v2.RandomRotation((270, 270), expand=True),
                    before=(v2.Resize(SIZE),)),
    "v2 photometric distortion": lambda: _v2(v2.RandomPhotometricDistort(p=1.0), before=(v2.Resize(SIZE),)),
    "v1 bytes again at the start": lambda: v1.Compose([v1.Pad(3, fill=90), v1.ToTensor(), v1.ToPILImage(), v1.Resize(SIZE), v1.ToTensor()]),
    "v2 a factor that is a whole number": lambda: _v2(functools.partial(F2.adjust_brightness, brightness_factor=2),
                    before=(v2.Resize(SIZE),)),
    "v2 bytes again at the start": lambda: v2.Compose([v2.ToImage(), TO_FLOATS, TO_BYTES, v2.Resize(SIZE)]),
}  # fmt: skip

TO_FLOATS, TO_BYTES = v2.ToDtype(torch.float32, scale=True), v2.ToDtype(torch.uint8, scale=True)
JITTER = {1: v1.ColorJitter(0.4, 0.4, 0.4, 0.1), 2: v2.ColorJitter(0.4, 0.4, 0.4, 0.1)}
TURN = {1: v1.RandomRotation(20, BILINEAR), 2: v2.RandomRotation(20, BILINEAR)}

# torch 2.11 refuses it on tensors.
HAS_LANCZOS = integer_resize_fits(InterpolationMode.LANCZOS)

# What would turn a difference in the last bits into a large one, or is not worth a kernel: torchvision's own code runs.
FALLS_BACK: dict[str, Callable[[], Pipeline]] = {
    "v1 solarize": lambda: _v1(v1.RandomSolarize(0.5, 1.0)),
    "v2 solarize": lambda: _v2(v2.RandomSolarize(0.5, 1.0)),
    "v2 posterize": lambda: _v2(v2.RandomPosterize(3, 1.0)),
    "v2 equalize": lambda: _v2(v2.RandomEqualize(1.0)),
    "v1 autocontrast": lambda: _v1(v1.RandomAutocontrast(1.0)),
    "v2 autocontrast": lambda: _v2(v2.RandomAutocontrast(1.0)),
    "v1 gamma": lambda: _v1(functools.partial(F1.adjust_gamma, gamma=0.4)),
    "v2 gamma": lambda: _v2(functools.partial(F2.adjust_gamma, gamma=2.0)),
    "v1 hue of normalized values": lambda: _v1(v1.Normalize(MEAN, STD), v1.ColorJitter(hue=(0.1, 0.3))),
    "v2 hue of what a bicubic filter made": lambda: _v2(v2.Resize(SIZE, BICUBIC), v2.ColorJitter(hue=(0.1, 0.3))),
    "v1 contrast of large values": lambda: _v1(v1.Pad(1, fill=1e9), v1.ColorJitter(contrast=(0.4, 0.6))),
    "v1 bytes of resized values": lambda: _v1(v1.Resize(SIZE), v1.ConvertImageDtype(torch.uint8)),
    "v2 bytes of values that are not scaled": lambda: v2.Compose(
        [v2.ToImage(), v2.ToDtype(torch.float32), v2.ToDtype(torch.uint8)]
    ),
    "a factor of numpy": lambda: _v1(functools.partial(F1.adjust_brightness, brightness_factor=np.float32(0.7))),
    "a factor of torch": lambda: _v1(functools.partial(F1.adjust_saturation, saturation_factor=torch.tensor(1.6))),
    "v2 bytes times a whole number": lambda: v2.Compose(
        [v2.ToImage(), functools.partial(F2.adjust_brightness, brightness_factor=2)]
    ),
    "v1 erased by rows": lambda: _v1(functools.partial(F1.erase, i=2, j=3, h=5, w=7, v=torch.rand(1, 5, 1))),
    "v1 erased by no bytes": lambda: v1.Compose(
        [v1.PILToTensor(), functools.partial(F1.erase, i=2, j=3, h=5, w=7, v=torch.full((3, 1, 1), 300.7))]
    ),
    "a blur of two radii": lambda: _v1(before=(lambda image: image.filter(ImageFilter.GaussianBlur((0.1, 9))),)),
    "values between bounds": lambda: _v1(v1.Resize(SIZE, BICUBIC), lambda image: image.clamp(0.1, 0.9)),
    "v1 normalized half precision behind an erased box": lambda: v1.Compose(
        [v1.PILToTensor(), v1.ConvertImageDtype(torch.float16), v1.RandomErasing(1.0), v1.Normalize(MEAN, STD)]
    ),
    "v2 bytes of blended values": lambda: _v2(JITTER[2], TO_BYTES),
    "v1 an image of blended values": lambda: _v1(v1.RandomAdjustSharpness(2.0, 1.0), v1.ToPILImage(), v1.PILToTensor()),
    "v2 double precision": lambda: _v2(v2.ToDtype(torch.float64), v2.RandomHorizontalFlip(1.0)),
    "v1 bytes in double precision": lambda: v1.Compose(
        [v1.PILToTensor(), v1.ConvertImageDtype(torch.float64), v1.Normalize(MEAN, STD), v1.RandomHorizontalFlip()]
    ),
    "v2 int64": lambda: v2.Compose([v2.ToImage(), v2.ToDtype(torch.int64), v2.RandomVerticalFlip(1.0)]),
    "v2 int32, scaled": lambda: v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.int32, scale=True)]),
    "v1 int16": lambda: v1.Compose([v1.PILToTensor(), v1.ConvertImageDtype(torch.int16)]),
    "v2 AugMix": lambda: _v2(v2.AugMix()),
    **({"v2 Lanczos": lambda: _v2(v2.Resize(SIZE, InterpolationMode.LANCZOS))} if HAS_LANCZOS else {}),
    "v2 cubic elastic": lambda: _v2(v2.ElasticTransform(30.0, 2.0, BICUBIC)),
    "v2 cubic elastic of bytes": lambda: v2.Compose([v2.ToImage(), v2.ElasticTransform(30.0, 2.0, BICUBIC)]),
    "v1 to one column": lambda: _v1(v1.Resize((9, 1))),
    "v1 bytes to one column": lambda: v1.Compose([v1.PILToTensor(), v1.Resize((9, 1))]),
    "v2 to one column": lambda: _v2(v2.Resize((9, 1))),
    "v1 levels of turned bytes": lambda: v1.Compose([v1.PILToTensor(), TURN[1], v1.RandomPosterize(3, 1.0)]),
    "v2 threshold of turned bytes": lambda: v2.Compose([v2.ToImage(), TURN[2], v2.RandomSolarize(99, 1.0)]),
    "v2 range of blurred bytes": lambda: v2.Compose([v2.ToImage(), v2.GaussianBlur(3), v2.RandomAutocontrast(1.0)]),
    "v1 histogram of deformed bytes": lambda: v1.Compose(
        [v1.PILToTensor(), v1.ElasticTransform(9.0), v1.RandomEqualize(1.0)]
    ),
    "v1 gamma of bytes resized without antialiasing": lambda: v1.Compose(
        [v1.PILToTensor(), v1.Resize(SIZE, antialias=False), functools.partial(F1.adjust_gamma, gamma=0.4)]
    ),
    "v1 threshold of a blurred image": lambda: v1.Compose(
        [v1.GaussianBlur(3), v1.RandomSolarize(99, 1.0), v1.ToTensor()]
    ),
    "v2 histogram of a blurred image": lambda: v2.Compose([v2.GaussianBlur(3), v2.RandomEqualize(1.0), v2.ToImage()]),
    "a table of a blurred image": lambda: v1.Compose(
        [v1.GaussianBlur(3), lambda image: image.point([at // 32 * 32 for at in range(256)] * 3), v1.PILToTensor()]
    ),
}
