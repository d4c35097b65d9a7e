"""Pipelines that go on in float32 after the conversion to tensors, and what is promised of their values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import functional as F1
from torchvision.transforms.v2 import functional as F2

from image.cases import MEAN, SIZE, STD
from image.check import EXACT, Pipeline, Promise

# One millionth of the range of values: [0, 1], or what `Normalize` makes of it.
CLOSE = Promise(largest=1e-6, equal_share=0.0)
CLOSE_NORMALIZED = Promise(largest=1e-6 / min(STD), equal_share=0.0)

BILINEAR, BICUBIC = InterpolationMode.BILINEAR, InterpolationMode.BICUBIC

FloatCase = tuple[Callable[[], Pipeline], Promise]


def _v1(*transforms: Any, before: tuple[Any, ...] = (), normalize: bool = False) -> Pipeline:
    return v1.Compose([*before, v1.ToTensor(), *transforms, *([v1.Normalize(MEAN, STD)] if normalize else [])])


def _v2(*transforms: Any, before: tuple[Any, ...] = ()) -> Pipeline:
    return v2.Compose([*before, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), *transforms])


def _augmented_bytes(transform: Callable[[], Any]) -> Pipeline:
    return _v2(transform(), v2.ToDtype(torch.uint8, scale=True), before=(v2.Resize(SIZE),))


def _after_nan(version: int, *transforms: Any) -> Pipeline:
    """A hue of values below 0, some of which have nothing above it: NaN."""
    v = v1 if version == 1 else v2
    begin = _v1 if version == 1 else _v2
    erased = v.RandomErasing(1.0, value=(0.0, -0.5, -0.25))
    return begin(v.Normalize(MEAN, STD), erased, v.ColorJitter(hue=(0.1, 0.3)), *transforms, before=(v.Resize(SIZE),))


FLOAT: dict[str, FloatCase] = {
    "v1 resize": (lambda: _v1(v1.Resize(SIZE), normalize=True), EXACT),
    "v1 larger": (lambda: _v1(v1.Resize((70, 66))), EXACT),
    "v1 train": (lambda: _v1(v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), normalize=True), EXACT),
    "v1 bicubic": (lambda: _v1(v1.RandomResizedCrop(SIZE, interpolation=InterpolationMode.BICUBIC)), EXACT),
    "v1 resize, center crop": (lambda: _v1(v1.Resize((30, 28)), v1.CenterCrop(SIZE), normalize=True), EXACT),
    "v1 without antialiasing": (lambda: _v1(v1.Resize(SIZE, antialias=False), v1.RandomVerticalFlip()), EXACT),
    "v1 after a resize of bytes": (
        lambda: _v1(v1.Pad(3, fill=7), v1.Resize(SIZE), before=(v1.RandomHorizontalFlip(), v1.Resize((40, 30)))), EXACT
    ),
    "v1 converted": (
        lambda: v1.Compose([v1.PILToTensor(), v1.ConvertImageDtype(torch.float32), v1.Resize(SIZE), v1.Pad((1, 2))]),
        EXACT,
    ),
    "v1 jitter": (
        lambda: _v1(v1.ColorJitter(0.4, 0.4, 0.4, 0.1), before=(v1.Resize(SIZE),), normalize=True), CLOSE_NORMALIZED
    ),
    "v1 jitter without contrast": (
        lambda: _v1(v1.ColorJitter(0.9, 0.0, 0.9, 0.5), before=(v1.Resize(SIZE),)), EXACT
    ),
    "v1 normalized in between": (
        lambda: _v1(v1.Normalize(MEAN, STD), v1.Resize(SIZE), v1.Normalize((0.1,), (2.0,))), EXACT
    ),
    "v2 train": (
        lambda: _v2(v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), v2.Normalize(MEAN, STD)), EXACT
    ),
    "v2 resize": (lambda: _v2(v2.Resize(12, max_size=40), v2.CenterCrop(14)), EXACT),
    "v2 bicubic": (lambda: _v2(v2.Resize(SIZE, InterpolationMode.BICUBIC), v2.RandomCrop(16, pad_if_needed=True)), EXACT),
    "v2 jitter": (lambda: _v2(v2.ColorJitter(0.4, 0.4, 0.4, 0.1), before=(v2.Resize(SIZE),)), CLOSE),
    "v2 jitter without contrast": (
        lambda: _v2(v2.ColorJitter(0.9, 0.0, 0.9, 0.5), v2.Resize((9, 8)), before=(v2.Resize(SIZE),)), EXACT
    ),
    "bicubic without antialiasing": (
        lambda: _v2(v2.Resize((9, 30), InterpolationMode.BICUBIC, antialias=False), v2.RandomHorizontalFlip(),
                    v2.Normalize(MEAN, STD), v2.Resize((40, 12), InterpolationMode.BICUBIC, antialias=False)), EXACT
    ),
    "v1 bytes resized without antialiasing": (
        lambda: v1.Compose([v1.PILToTensor(), v1.Resize((31, 20), antialias=False), v1.RandomPosterize(5, 1.0),
                            v1.Resize(SIZE, InterpolationMode.BICUBIC, antialias=False)]), EXACT
    ),
    "v1 bytes again": (
        lambda: _v1(v1.Resize(SIZE), v1.ConvertImageDtype(torch.uint8), v1.RandomEqualize(1.0), v1.RandomErasing(1.0, value=7)),
        EXACT,
    ),
    "v1 bytes and floats again": (
        lambda: _v1(v1.Normalize(MEAN, STD), v1.ConvertImageDtype(torch.uint8), v1.Resize(SIZE),
                    v1.ConvertImageDtype(torch.float32), v1.Resize((30, 10)), v1.RandomAutocontrast(1.0), v1.ToPILImage(),
                    v1.RandomAdjustSharpness(2.0, 1.0), v1.ToTensor(), v1.ColorJitter(saturation=2.0)), EXACT
    ),
    "v2 bytes again": (
        lambda: _v2(v2.ColorJitter(saturation=2.0, hue=0.3), v2.ToDtype(torch.uint8, scale=True), before=(v2.Resize(SIZE),)),
        EXACT,
    ),
    "v2 bytes, some and again": (
        lambda: _v2(v2.RandomApply([v2.Normalize(MEAN, STD), v2.Resize((20, 21)), v2.ToDtype(torch.uint8),
                                    v2.RandomRotation(30), v2.ToDtype(torch.float32)]),
                    v2.RandomApply([v2.ColorJitter(hue=0.1), v2.ToDtype(torch.uint8, scale=True), v2.RandomEqualize(1.0)]),
                    v2.ToDtype(torch.uint8), v2.Resize(SIZE)), EXACT
    ),
    "half precision": (
        lambda: _v2(v2.RandomApply([v2.ColorJitter(saturation=2.0)]), v2.ToDtype(torch.float16), v2.RandomHorizontalFlip(),
                    v2.CenterCrop(SIZE), before=(v2.Resize((40, 31)),)), EXACT
    ),
    "double precision": (
        lambda: _v1(v1.Normalize(MEAN, STD), v1.ConvertImageDtype(torch.float64), v1.RandomVerticalFlip(0.7),
                    before=(v1.Resize(SIZE),)), EXACT
    ),
    "statistics of what contrast on bytes made": (
        lambda: v2.Compose([v2.ToImage(), v2.Resize(SIZE), v2.ColorJitter(contrast=(0.5, 0.6)),
                            v2.ToDtype(torch.float32, scale=True), v2.RandomAutocontrast(1.0), v2.RandomSolarize(0.4, 1.0),
                            v2.Pad(1, fill=0.3), v2.Normalize(MEAN, STD), v2.RandomEqualize(1.0)]), EXACT
    ),
    "v1 bytes after contrast": (
        lambda: _v1(v1.ColorJitter(0.4, (0.3, 1.7), 0.4, 0.1), v1.ConvertImageDtype(torch.uint8), before=(v1.Resize(SIZE),)),
        EXACT,
    ),
    "v1 statistics after contrast": (
        lambda: _v1(v1.Grayscale(), v1.ColorJitter(contrast=(0.3, 1.7)), v1.ColorJitter(contrast=(0.3, 1.7)),
                    v1.RandomAutocontrast(1.0), v1.RandomSolarize(0.4, 1.0), before=(v1.Resize(SIZE),)), EXACT
    ),
    "a hue after contrast": (
        lambda: _v2(v2.ColorJitter(contrast=(0.3, 1.7)), v2.ColorJitter(hue=0.3), v2.RandomHorizontalFlip(),
                    before=(v2.Resize(SIZE),)), EXACT
    ),
    "v2 thresholds after contrast": (
        lambda: _v2(v2.RandomRotation((90, 90)), v2.Resize((14, 21)), v2.ColorJitter(contrast=(0.3, 1.7)),
                    v2.RandomChoice([v2.RandomPosterize(3, 1.0), v2.RandomEqualize(1.0)]),
                    v2.ColorJitter(contrast=(1.2, 1.9)), v2.RandomSolarize(0.5, 1.0), before=(v2.Resize(SIZE),)), EXACT
    ),
    "v1 nearest": (
        lambda: _v1(v1.Resize(SIZE, InterpolationMode.NEAREST), v1.Resize((9, 23), InterpolationMode.NEAREST_EXACT)),
        EXACT,
    ),
    "v1 blur": (lambda: _v1(v1.GaussianBlur((5, 3), (0.3, 2.0)), before=(v1.Resize(SIZE),), normalize=True), EXACT),
    "v2 large blur": (lambda: _v2(v2.GaussianBlur((15, 1), (1.0, 4.0)), before=(v2.Resize(SIZE),)), EXACT),
    "v1 sharpness": (
        lambda: _v1(v1.RandomAdjustSharpness(2.3, 1.0), v1.RandomSolarize(0.5), before=(v1.Resize(SIZE),)), EXACT
    ),
    "v2 sharpness": (lambda: _v2(v2.RandomAdjustSharpness(0.2, 1.0), before=(v2.Resize(SIZE),)), EXACT),
    "v1 statistics": (
        lambda: _v1(v1.ColorJitter(saturation=(2, 3)), v1.RandomAutocontrast(1.0), v1.RandomInvert(),
                    before=(v1.Resize(SIZE),)), EXACT
    ),
    "v2 statistics": (
        lambda: _v2(v2.RandomEqualize(1.0), v2.ColorJitter(brightness=(0.3, 0.6)), v2.RandomAutocontrast(1.0),
                    v2.RandomPosterize(3, 1.0), v2.RandomSolarize(0.4), before=(v2.Resize(SIZE),)), EXACT
    ),
    "v1 pads and erases": (
        lambda: _v1(v1.ColorJitter(saturation=2.0), v1.Pad((2, 3), fill=0.3), v1.RandomErasing(1.0, value=0.7),
                    v1.RandomCrop(15, padding=2, padding_mode="reflect"), before=(v1.Resize(SIZE),), normalize=True),
        EXACT,
    ),
    "v2 pads and erases": (
        lambda: _v2(v2.Pad((1, 2), fill=(0.1, 0.2, 0.3)), v2.RandomHorizontalFlip(), v2.Pad(2, padding_mode="edge"),
                    v2.RandomErasing(1.0, value=(0.3, 0.2, 0.1)), v2.CenterCrop((30, 11)), v2.Normalize(MEAN, STD),
                    before=(v2.Resize(SIZE),)), EXACT
    ),
    "v1 gray": (
        lambda: _v1(v1.RandomGrayscale(0.5), v1.Grayscale(1), v1.Normalize((0.5,), (0.2,)), before=(v1.Resize(SIZE),)),
        EXACT,
    ),
    "v2 gray": (
        lambda: _v2(v2.Grayscale(1), v2.ColorJitter(0.5, 0.5, 0.5, 0.2), v2.RGB(), v2.RandomChannelPermutation(),
                    before=(v2.Resize(SIZE),)), CLOSE
    ),
    "v1 gamma": (
        lambda: _v1(functools.partial(F1.adjust_gamma, gamma=0.4, gain=1.3), v1.Resize((9, 7)),
                    before=(v1.Resize(SIZE),)), CLOSE
    ),
    "v2 gamma": (
        lambda: _v2(v2.RandomInvert(1.0), functools.partial(F2.adjust_gamma, gamma=2.2), before=(v2.Resize(SIZE),)),
        CLOSE,
    ),
    "v1 gamma of resized values": (
        lambda: _v1(v1.Resize(SIZE), functools.partial(F1.adjust_gamma, gamma=0.4, gain=1.3),
                    functools.partial(F1.adjust_gamma, gamma=2.0)), CLOSE
    ),
    "v2 gamma of blended values": (
        lambda: _v2(functools.partial(F2.adjust_gamma, gamma=1.7), v2.RandomAdjustSharpness(2.0, 1.0),
                    functools.partial(F2.adjust_gamma, gamma=1.6), before=(v2.Resize(SIZE),)), CLOSE
    ),
    "v1 rotate": (
        lambda: _v1(v1.RandomRotation(80, fill=(0.1, 0.2, 0.3)), v1.Resize(SIZE),
                    v1.RandomRotation(20, InterpolationMode.BILINEAR, fill=0.4)), EXACT
    ),
    "v1 affine, perspective": (
        lambda: _v1(v1.RandomAffine(40, (0.2, 0.3), (0.6, 1.5), 20, InterpolationMode.BILINEAR),
                    v1.RandomPerspective(0.6, 1.0), before=(v1.Resize(SIZE),)), EXACT
    ),
    "v1 elastic": (lambda: _v1(v1.ElasticTransform(30.0, 2.0, fill=0.5), before=(v1.Resize(SIZE),)), EXACT),
    "v2 rotate": (
        lambda: _v2(v2.RandomRotation(80, expand=True, fill=0.3), v2.RandomRotation((90, 90), expand=True),
                    v2.Resize(SIZE), v2.RandomRotation(80, InterpolationMode.BILINEAR, fill=(0.1, 0.2, 0.3))), EXACT
    ),
    "v2 affine, perspective": (
        lambda: _v2(v2.RandomAffine(40, (0.2, 0.3), (0.6, 1.5), 20, InterpolationMode.BILINEAR, center=(3, 4)),
                    v2.RandomPerspective(0.6, 1.0, InterpolationMode.NEAREST), before=(v2.Resize(SIZE),)), EXACT
    ),
    "v2 elastic": (
        lambda: _v2(v2.ElasticTransform(30.0, 2.0), v2.RandomRotation((270, 270), expand=True),
                    before=(v2.Resize(SIZE),)), EXACT
    ),
    **{
        f"{name} of what a hue makes of values below 0": (functools.partial(_after_nan, version, *transforms), promise)
        for name, version, transforms, promise in (
            ("v1 colours", 1, (v1.ColorJitter(0.4, 0.0, 0.4, 0.3), v1.RandomInvert(1.0), v1.RandomSolarize(0.4, 1.0)), EXACT),
            ("v1 contrast", 1, (v1.Pad(1), v1.ColorJitter(contrast=(0.3, 0.5))), CLOSE),
            ("v1 range", 1, (v1.RandomAutocontrast(1.0), v1.RandomAdjustSharpness(2.0, 1.0), v1.Grayscale(3)), EXACT),
            ("v1 neighbours", 1, (v1.Resize((9, 30)), v1.GaussianBlur(3), v1.RandomRotation(30, BILINEAR)), EXACT),
            ("v1 powers", 1, (functools.partial(F1.adjust_gamma, gamma=0.4), v1.RandomHorizontalFlip()), CLOSE),
            ("v2 colours", 2, (v2.RandomPhotometricDistort((0.5, 0.9), (1, 1), (0.5, 1.5), (-0.3, 0.3), 1.0),), EXACT),
            ("v2 levels", 2, (v2.ColorJitter(hue=(0.2, 0.3)), v2.RandomPosterize(3, 1.0), v2.RandomEqualize(1.0)), EXACT),
            ("v2 range", 2, (v2.Resize((20, 9), BICUBIC, antialias=False), v2.RandomAutocontrast(1.0)), EXACT),
            ("v2 a sum in order", 2, (v2.ColorJitter(contrast=(0.3, 0.5)), v2.RandomSolarize(0.3, 1.0)), EXACT),
            ("v2 bytes", 2, (v2.RandomAffine(20, interpolation=BILINEAR), v2.ToDtype(torch.uint8, scale=True)), EXACT),
            ("v2 half precision", 2, (v2.Pad(1), v2.ToDtype(torch.bfloat16)), EXACT),
        )
    },
    "v1 gamma of values below 0": (
        lambda: _v1(v1.Normalize(MEAN, STD), v1.Resize(SIZE), functools.partial(F1.adjust_gamma, gamma=3.0),
                    v1.RandomSolarize(0.4, 1.0), before=(v1.Resize((40, 30)),)), EXACT
    ),
    "v2 gamma beyond the range of values": (
        lambda: _v2(v2.Normalize(MEAN, STD), v2.Pad(1), functools.partial(F2.adjust_gamma, gamma=2.0),
                    v2.Resize(SIZE), functools.partial(F2.adjust_gamma, gamma=1.7, gain=0.3)), CLOSE
    ),
    "a gamma where a box was erased": (
        lambda: _v1(v1.Normalize(MEAN, STD), v1.RandomErasing(1.0, value=-1.0), functools.partial(F1.adjust_gamma, gamma=2.0),
                    v1.Pad(1), v1.ColorJitter(saturation=2.0), before=(v1.Resize(SIZE),)), EXACT
    ),
    "v1 to one column": (
        lambda: _v1(v1.Resize((9, 1)), v1.Resize((12, 1), BICUBIC), v1.Pad(1), normalize=True), EXACT
    ),
    "v1 bytes to one column": (
        lambda: v1.Compose([v1.PILToTensor(), v1.Resize((9, 1), BICUBIC), v1.Pad(1), v1.RandomEqualize(1.0)]), EXACT
    ),
    "v2 to one column, channels last": (
        lambda: _v2(v2.RandomHorizontalFlip(1.0), v2.Resize((9, 1)), v2.Pad(1), v2.ColorJitter(saturation=2.0)), EXACT
    ),
    "v2 to one column, rows of channels": (
        lambda: _v2(v2.RandomRotation(30), v2.Resize((9, 1)), v2.Pad(1), v2.ColorJitter(saturation=2.0)), EXACT
    ),
    "v2 rand augment": (
        lambda: _v2(v2.RandAugment(2), v2.TrivialAugmentWide(), before=(v2.Resize(SIZE),)), CLOSE
    ),
    "v2 photometric distortion": (
        lambda: _v2(v2.RandomPhotometricDistort(p=1.0), before=(v2.Resize(SIZE),)), CLOSE
    ),
    **{
        f"v2 bytes after {name}": (functools.partial(_augmented_bytes, transform), EXACT)
        for name, transform in {
            "rand augment": functools.partial(v2.RandAugment, 4),
            "trivial augment": v2.TrivialAugmentWide,
            **{f"auto augment {policy.value}": functools.partial(v2.AutoAugment, policy) for policy in v2.AutoAugmentPolicy},
            "photometric distortion": functools.partial(v2.RandomPhotometricDistort, p=1.0),
        }.items()
    },
}  # fmt: skip
