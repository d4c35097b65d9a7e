"""Transforms of every kind with random parameters, chained at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode as Mode
from torchvision.transforms import functional as F1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F2

from image.examples import Arguments
from image.trials import examples_of
from torch_sink.image.operations import operations

Make = Callable[[random.Random, Any], Any]
Stage = list[Callable[[random.Random, Any], Any]]

_WARPS = (Mode.NEAREST, Mode.NEAREST, Mode.NEAREST, Mode.BILINEAR, Mode.BICUBIC)
_RESIZES = tuple(Mode)
_PADDINGS = ("constant", "constant", "edge", "reflect", "symmetric")


def random_pipeline(chance: random.Random, version: str) -> Callable[[Any], Any]:
    """A chain of 1 to 6 transforms, the conversion to a tensor, and what may follow it; or one without a conversion."""
    module = {"v1": v1, "v2": v2}[version]
    head = [_one_of(_IMAGE_TRANSFORMS[version], chance, module) for _ in range(chance.randint(1, 6))]
    if chance.random() < 0.5:
        head.append(module.Resize(_size(chance), interpolation=chance.choice(_RESIZES)))
    if chance.random() < 0.12:
        return module.Compose(head)
    tail = _TAILS[version](chance)
    return module.Compose([*head, *tail])


def _one_of(stage: Stage, chance: random.Random, module: Any) -> Any:
    return chance.choice(stage)(chance, module)


# --- parameters


def _size(chance: random.Random) -> tuple[int, int]:
    return chance.randint(1, 40), chance.randint(1, 40)


def _fill(chance: random.Random) -> Any:
    return chance.choice((0, 0, 7, 255, 128.6, (10, 20, 30), [1, 2, 3], (9,), None))


def _fill_by_type(chance: random.Random) -> dict[Any, Any]:
    types = chance.sample((tv_tensors.Image, torch.Tensor, Image.Image), 2)
    return {**{kind: chance.randint(0, 255) for kind in types}, "others": 3}


def _span(chance: random.Random, low: float, high: float) -> tuple[float, float]:
    first, second = chance.uniform(low, high), chance.uniform(low, high)
    return min(first, second), max(first, second)


def _probability(chance: random.Random) -> float:
    return chance.choice((0.5, 1.0))


def _padding(chance: random.Random) -> Any:
    side = lambda: chance.choice((0, 1, 2, 5, 30))  # noqa: E731
    return chance.choice((side(), (side(), side()), (side(), side(), side(), side())))


def _pad_options(chance: random.Random) -> dict[str, Any]:
    fill = _fill(chance)
    return {"fill": 0 if fill is None else fill, "padding_mode": chance.choice(_PADDINGS)}


def _warp_options(chance: random.Random) -> dict[str, Any]:
    return {"interpolation": chance.choice(_WARPS), "fill": _fill(chance)}


# --- transforms on images


def _read_mean(image: Any) -> Any:
    """What user code may do in between: look at the pixels."""
    np.asarray(image)
    return image


def _draw_noise(image: Any) -> Any:
    torch.rand(3)
    np.random.rand()
    random.random()
    return image


def _write_pixel(image: Any) -> Any:
    if isinstance(image, torch.Tensor):
        image[..., 0, 0] = 1
    else:
        image.putpixel((0, 0), 0)
    return image


def _cut(x: Any) -> Any:
    x[x < 0.2] = 0
    return x


# Calls of torch on a tensor: most make one value of each, some move values, and the last need them at once.
_CALLS: list[Callable[[Any], Any]] = [
    lambda x: x.clamp(0.1, 0.9), lambda x: x.clamp(0, 1), lambda x: x.clamp_(20, 200), lambda x: torch.clamp(x, max=0.7),
    lambda x: (x > 0.5).float(), lambda x: (x >= 0.2) & ~(x > 0.8), lambda x: torch.where(x > 0.4, x, 0),
    lambda x: torch.where(x > 0.4, 1.0, 0.0), lambda x: x.masked_fill(x < 0.2, 1), _cut, lambda x: x * (x > 0.3),
    lambda x: x * x - 0.5, lambda x: (x * 255).round().byte(), lambda x: (x * 9).long(), lambda x: x.half(),
    lambda x: x.abs().sqrt(), lambda x: 1 - torch.minimum(x, torch.full_like(x, 0.6)), lambda x: x // 2,
    lambda x: x.rot90(1, (1, 2)), lambda x: x.transpose(1, 2), lambda x: x.flip(0), lambda x: x.clone().mul_(0.5),
    lambda x: x.detach(), lambda x: x - x.float().mean(), lambda x: x * 2 if x.float().mean() > 0.4 else x + 1,
    lambda x: x[:, (x > 0.5).sum() % 3 :],
]  # fmt: skip


class _Calls:
    """Some of these calls in a row, of a tensor of one image."""

    def __init__(self, chance: random.Random) -> None:
        self.calls = [chance.choice(_CALLS) for _ in range(chance.randint(1, 4))]

    def __call__(self, image: Any) -> Any:
        if isinstance(image, tv_tensors.Mask):
            return image
        for call in self.calls:
            image = call(image) if isinstance(image, torch.Tensor) and image.ndim == 3 else image
        return image


class _Example:
    """An example call of any operation, drawn again for each image from the same seed."""

    def __init__(self, seed: int, family: str) -> None:
        self.seed, self.family = seed, family

    def __call__(self, image: Any) -> Any:
        is_tensor = isinstance(image, torch.Tensor)
        if is_tensor and (image.ndim != 3 or image.dtype not in (torch.uint8, torch.float32)):
            return image
        channels, height, width = image.shape if is_tensor else (len(image.getbands()), image.height, image.width)
        kind = f"{self.family} {str(image.dtype).removeprefix('torch.')}" if is_tensor else "Pillow"
        arguments = Arguments(random.Random(self.seed), kind, height, width, channels)
        functional = F1 if self.family == "v1" else F2
        examples = [
            example
            for operation in operations()
            for example in examples_of(operation, arguments)
            if example.run or hasattr(functional, example.name)
        ]
        result = arguments.chance.choice(examples).called(functional, image)
        return result[0] if isinstance(result, tuple) else result


_RESHAPING: Stage = [
    lambda c, m: m.Resize(_size(c), interpolation=c.choice(_RESIZES)),
    lambda c, m: m.Resize(c.randint(1, 40), interpolation=c.choice(_RESIZES), max_size=c.choice((None, None, 50))),
    lambda c, m: m.Resize(_size(c), antialias=c.choice((True, False, None))),
    lambda c, m: m.CenterCrop(c.choice((c.randint(1, 50), _size(c)))),
    lambda c, m: m.RandomCrop(_size(c), padding=_padding(c), pad_if_needed=True, **_pad_options(c)),
    lambda c, m: m.RandomCrop(c.randint(1, 30), pad_if_needed=c.random() < 0.7),
    lambda c, m: m.RandomResizedCrop(
        _size(c), scale=_span(c, 0.05, 1.5), ratio=_span(c, 0.3, 3.0), interpolation=c.choice(_RESIZES)
    ),
    lambda c, m: m.RandomResizedCrop(_size(c)),
    lambda c, m: m.Pad(_padding(c), **_pad_options(c)),
    lambda c, m: m.RandomRotation(_span(c, -180, 180), expand=True, **_warp_options(c)),
    lambda c, m: m.RandomRotation((90, 90), expand=c.random() < 0.5, **_warp_options(c)),
]

_KEEPING: Stage = [
    *[lambda c, m: m.Lambda(_Example(c.randrange(1 << 30), "v1" if m is v1 else "v2"))] * 3,
    lambda c, m: m.RandomHorizontalFlip(_probability(c)),
    lambda c, m: m.RandomVerticalFlip(_probability(c)),
    lambda c, m: m.RandomRotation(_span(c, -180, 180), center=c.choice((None, (3, 4))), **_warp_options(c)),
    lambda c, m: m.RandomAffine(
        _span(c, -90, 90),
        translate=(0.3, 0.4),
        scale=_span(c, 0.3, 2.0),
        shear=c.choice((None, 20, (-5, 9, 3, 8))),
        **_warp_options(c),
    ),
    lambda c, m: m.RandomAffine(0, translate=(0.5, 0.5), scale=c.choice((None, (2.0, 2.0))), **_warp_options(c)),
    lambda c, m: m.RandomPerspective(c.uniform(0.1, 0.9), p=_probability(c), **_warp_options(c)),
    lambda c, m: m.ElasticTransform(c.uniform(5, 60), 1.0, interpolation=c.choice(_WARPS), fill=_fill(c) or 0),
    lambda c, m: m.ColorJitter(
        brightness=_span(c, 0, 3), contrast=_span(c, 0, 3), saturation=_span(c, 0, 3), hue=c.uniform(0, 0.5)
    ),
    lambda c, m: m.ColorJitter(**{c.choice(("brightness", "contrast", "saturation")): _span(c, 0, 4)}),
    lambda c, m: m.ColorJitter(hue=0.5),
    lambda c, m: m.Grayscale(c.choice((1, 3))),
    lambda c, m: m.RandomGrayscale(_probability(c)),
    lambda c, m: m.GaussianBlur(c.choice((1, 3, 5)), _span(c, 0.1, 3)),
    lambda c, m: m.RandomInvert(_probability(c)),
    lambda c, m: m.RandomPosterize(c.randint(0, 8), _probability(c)),
    lambda c, m: m.RandomSolarize(c.choice((0, 1, 100, 128.5, 255, 256, 300)), _probability(c)),
    lambda c, m: m.RandomAdjustSharpness(c.choice((0, 0.3, 1, 2.5)), _probability(c)),
    lambda c, m: m.RandomAutocontrast(_probability(c)),
    lambda c, m: m.RandomEqualize(_probability(c)),
    lambda c, m: m.AutoAugment(c.choice(list(m.AutoAugmentPolicy)), **_warp_options(c)),
    lambda c, m: m.RandAugment(c.randint(1, 4), c.randint(0, 30), **_warp_options(c)),
    lambda c, m: m.RandAugment(),
    lambda c, m: m.TrivialAugmentWide(**_warp_options(c)),
    lambda c, m: m.AugMix(c.randint(1, 10), mixture_width=c.randint(1, 3), **_warp_options(c)),
    lambda c, m: m.Lambda(c.choice((_read_mean, _draw_noise, _write_pixel))),
]

_NESTING: Stage = [
    lambda c, m: m.RandomApply([_one_of(_KEEPING, c, m), _one_of(_RESHAPING, c, m)], p=c.random()),
    lambda c, m: m.RandomChoice([_one_of(_KEEPING, c, m), _one_of(_RESHAPING, c, m)]),
    lambda c, m: m.RandomOrder([_one_of(_KEEPING, c, m), _one_of(_KEEPING, c, m)]),
    lambda c, m: m.Compose([_one_of(_KEEPING, c, m)]),
]

_ONLY_IN_V2: Stage = [
    lambda c, m: v2.RandomPhotometricDistort(p=_probability(c)),
    lambda c, m: v2.RandomZoomOut(fill=_fill(c) or 0, side_range=(1.0, 2.5), p=_probability(c)),
    lambda c, m: v2.RandomIoUCrop(),
    lambda c, m: v2.RandomShortestSize(
        c.randint(5, 40), max_size=c.choice((None, 60)), interpolation=c.choice(_RESIZES)
    ),
    lambda c, m: v2.RandomResize(5, 40, interpolation=c.choice(_RESIZES)),
    lambda c, m: v2.ScaleJitter((30, 30), (0.3, 1.6), interpolation=c.choice(_RESIZES)),
    lambda c, m: v2.RandomChannelPermutation(),
    lambda c, m: v2.RGB(),
    lambda c, m: v2.Identity(),
    lambda c, m: v2.JPEG((40, 95)),
    lambda c, m: v2.RandomErasing(p=1.0),
    lambda c, m: v2.Pad(c.randint(0, 9), fill=_fill_by_type(c)),
    lambda c, m: v2.RandomAffine((-40, 40), translate=(0.3, 0.3), fill=_fill_by_type(c)),
    lambda c, m: v2.RandomCrop(_size(c), pad_if_needed=True, fill=_fill_by_type(c)),
    lambda c, m: v2.ClampBoundingBoxes(),
    lambda c, m: v2.SanitizeBoundingBoxes(labels_getter=None),
    lambda c, m: v2.ToImage(),
    lambda c, m: v2.ToPILImage(),
]

# Reshaping is as frequent as all the rest together, for it is what the arithmetic of chains depends on.
_IMAGE_TRANSFORMS: dict[str, Stage] = {
    "v1": [*_RESHAPING * 2, *_KEEPING, *_NESTING],
    "v2": [*_RESHAPING * 2, *_KEEPING, *_NESTING, *_ONLY_IN_V2],
}


# --- the conversion to a tensor and what follows


def _statistics(chance: random.Random) -> tuple[Any, Any]:
    return chance.choice(
        (((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,), (0.25,)), ([0.1, 0.2, 0.3], [1, 2, 3]))
    )


def _crops(kind: type, chance: random.Random) -> Any:
    return kind(chance.randint(1, 20))


def _v1_tail(chance: random.Random) -> list[Any]:
    after = [
        lambda: v1.Normalize(*_statistics(chance), inplace=chance.random() < 0.3),
        lambda: v1.RandomErasing(p=_probability(chance), value=chance.choice((0, 0.3, (0.1, 0.2, 0.3), "random"))),
        lambda: v1.RandomHorizontalFlip(),
        lambda: v1.CenterCrop(chance.randint(1, 30)),
        lambda: v1.Pad(_padding(chance), padding_mode=chance.choice(_PADDINGS)),
        lambda: v1.RandomCrop(chance.randint(1, 20), pad_if_needed=True),
        lambda: v1.Resize(_size(chance), antialias=chance.choice((True, False))),
        lambda: v1.ColorJitter(0.4, 0.4, 0.4, 0.1),
        lambda: v1.Lambda(chance.choice((_read_mean, _write_pixel, _draw_noise))),
        *[lambda: v1.Lambda(_Calls(chance))] * 4,
        lambda: v1.ToPILImage(),
    ]
    first: list[Any] = chance.choice(
        (
            [v1.ToTensor()],
            [v1.ToTensor()],
            [v1.ToTensor(), v1.Normalize(*_statistics(chance))],
            [v1.PILToTensor()],
            [v1.PILToTensor(), v1.ConvertImageDtype(chance.choice((torch.float32, torch.float16, torch.float64)))],
        )
    )
    return [*first, *(chance.choice(after)() for _ in range(chance.randint(0, 2)))]


def _v2_tail(chance: random.Random) -> list[Any]:
    after = [
        lambda: v2.Normalize(*_statistics(chance), inplace=chance.random() < 0.3),
        lambda: v2.RandomErasing(p=_probability(chance), value=chance.choice((0, 0.3, (0.1, 0.2, 0.3), "random"))),
        lambda: v2.RandomHorizontalFlip(),
        lambda: v2.CenterCrop(chance.randint(1, 30)),
        lambda: v2.Pad(_padding(chance), padding_mode=chance.choice(_PADDINGS)),
        lambda: v2.RandomCrop(chance.randint(1, 20), pad_if_needed=True),
        lambda: v2.Resize(_size(chance), interpolation=chance.choice(_RESIZES), antialias=chance.choice((True, False))),
        lambda: v2.RandomResizedCrop(_size(chance)),
        lambda: v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
        lambda: v2.GaussianNoise(),
        lambda: v2.ToPureTensor(),
        lambda: v2.ToPILImage(),
        lambda: v2.Grayscale(chance.choice((1, 3))),
        lambda: v2.Lambda(chance.choice((_read_mean, _draw_noise))),
        *[lambda: v2.Lambda(_Calls(chance))] * 5,
        lambda: v2.ToDtype({chance.choice((tv_tensors.Image, torch.Tensor)): torch.float16, "others": None}),
        lambda: v2.ToDtype(chance.choice((torch.float32, torch.uint8, torch.float16)), scale=chance.random() < 0.7),
    ]
    first: list[Any] = chance.choice(
        (
            [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)],
            [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*_statistics(chance))],
            [v2.ToImage(), v2.ToDtype(torch.float32)],
            [v2.ToImage()],
            [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)],
            [v2.ToImage(), v2.RandomResizedCrop(_size(chance)), v2.ToDtype(torch.float32, scale=True)],
        )
    )
    crops = [_crops(chance.choice((v2.FiveCrop, v2.TenCrop)), chance)] if chance.random() < 0.05 else []
    return [*first, *crops, *(chance.choice(after)() for _ in range(chance.randint(0, 2)))]


_TAILS: dict[str, Callable[[random.Random], list[Any]]] = {"v1": _v1_tail, "v2": _v2_tail}
