"""Containers of transforms, drawn at random or given, and samples of theirs with the states of the generators."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torchvision import transforms as v1
from torchvision.transforms import v2

import torch_sink
from image.cases import array_opener
from image.random_pipelines import same_value

_MODES = (v1.InterpolationMode.NEAREST, v1.InterpolationMode.BILINEAR, v1.InterpolationMode.BICUBIC)
STATISTICS = (0.5, 0.4, 0.3), (0.2, 0.3, 0.1)


def photo(seed: int = 0, size: tuple[int, int] = (40, 36)) -> Image.Image:
    return array_opener(*size, seed)()


def cifar(module: Any) -> list[Any]:
    crop = [module.RandomCrop(32, padding=4), module.RandomHorizontalFlip()]
    if module is v1:
        return [*crop, v1.ToTensor(), v1.Normalize(*STATISTICS)]
    return [v2.ToImage(), *crop, v2.ToDtype(torch.float32, scale=True), v2.Normalize(*STATISTICS)]


def _noise(image: Any) -> Any:
    random.random()
    np.random.rand()
    torch.rand(1)
    return image


def random_transforms(chance: random.Random, module: Any, depth: int = 0) -> list[Any]:
    makers: list[Callable[[], Any]] = [
        lambda: module.RandomCrop(chance.choice((8, 20, (30, 25), 36)), padding=chance.choice((None, 2, (1, 3)))),
        lambda: module.RandomCrop(60, pad_if_needed=True),
        lambda: module.RandomResizedCrop(chance.choice((12, 30)), scale=(0.01, 4.0) if chance.random() < 0.2 else (0.1, 1)),
        lambda: module.RandomHorizontalFlip(chance.choice((0, 0.3, 1))),
        lambda: module.RandomVerticalFlip(chance.random()),
        lambda: module.Resize(chance.choice((20, (24, 30), [18]))),
        lambda: module.Resize(20, max_size=30),
        lambda: module.CenterCrop(chance.choice((10, (20, 50)))),
        lambda: module.Pad(chance.choice((1, (2, 3), (1, 2, 3, 4))), fill=chance.choice((0, (1, 2, 3)))),
        lambda: module.Pad(3, padding_mode=chance.choice(("edge", "reflect", "symmetric"))),
        lambda: module.ColorJitter(0.4, 0.3, chance.choice((0, 0.2)), chance.choice((0, 0.1))),
        lambda: module.RandomGrayscale(0.5),
        lambda: module.Grayscale(chance.choice((1, 3))),
        lambda: module.RandAugment(chance.randint(1, 4), chance.randint(0, 30), interpolation=chance.choice(_MODES)),
        lambda: module.AutoAugment(chance.choice(list(v1.AutoAugmentPolicy)), fill=chance.choice((None, 7, [1, 2, 3]))),
        lambda: module.TrivialAugmentWide(fill=chance.choice((None, 9.0, [1.5, 2, 3]))),
        lambda: module.RandomInvert(0.5),
        lambda: module.RandomPosterize(chance.choice((0, 3, 8)), 0.5),
        lambda: module.RandomSolarize(chance.choice((0.5, 128)), 0.5),
        lambda: module.RandomAdjustSharpness(chance.choice((0, 1.7)), 0.5),
        lambda: chance.choice((module.RandomAutocontrast, module.RandomEqualize))(chance.choice((0.5, 1))),
        lambda: module.GaussianBlur(chance.choice((3, (5, 1))), chance.choice(((0.1, 2.0), 1.0))),
        lambda: module.Lambda(_noise),
        lambda: module.RandomRotation(
            chance.choice((20, (90, 90), (180, 180), 0)), expand=chance.random() < 0.3, fill=chance.choice((0, 9)),
            center=chance.choice((None, (3, 5))), interpolation=chance.choice(_MODES),
        ),
        lambda: module.RandomAffine(
            30, chance.choice((None, (0.1, 0.3))), chance.choice((None, (0.7, 1.4))),
            chance.choice((None, 9, (1, 5, -4, 8))), fill=chance.choice((0, 9)), interpolation=chance.choice(_MODES),
        ),
        lambda: module.RandomPerspective(
            chance.random(), chance.choice((0.3, 1)), chance.choice(_MODES), chance.choice((0, 7))
        ),
        lambda: module.ElasticTransform(
            chance.choice((9.0, [30.0, 5.0])), chance.choice((1.0, 2.5)), chance.choice(_MODES), chance.choice((0, 7))
        ),
    ]  # fmt: skip
    if module is v2:
        makers += [
            lambda: v2.RandomZoomOut(chance.choice((0, (1, 2, 3))), (1.0, 1.7), chance.choice((0.3, 1))),
            lambda: v2.ScaleJitter((40, 30), (0.5, 1.4)),
            lambda: v2.RandomShortestSize([18, 25], chance.choice((None, 30))),
            lambda: v2.RandomResize(14, 30),
        ]
    inside = functools.partial(random_transforms, chance, module, depth + 1)
    if depth < 2:
        makers += [
            lambda: module.Compose(inside()),
            lambda: nn.Sequential(*filter(lambda made: isinstance(made, nn.Module), inside())),
            lambda: module.RandomApply(inside(), chance.random()),
            lambda: module.RandomChoice(inside(), [0.5, 2.0, 1.0]),
            lambda: module.RandomOrder(inside()),
        ]
    return [chance.choice(makers)() for _ in range(3)]


def _tail(chance: random.Random, module: Any) -> list[Any]:
    in_place = chance.random() < 0.3
    erasing = module.RandomErasing(
        chance.choice((0.5, 1)), chance.choice(((0.02, 0.33), (0.9, 1.0), (0.0, 0.0001))),
        value=chance.choice((0, "random", (0.3,))), inplace=in_place,
    )  # fmt: skip
    erasings = [erasing] * chance.randint(0, 2)
    if module is v1:
        first = [v1.ToTensor(), v1.Normalize((0.5,), (0.2,), in_place)] if chance.random() < 0.8 else [v1.PILToTensor()]
        return [*first, *erasings]
    tail = [v2.ToDtype(torch.float32, scale=chance.random() < 0.8), v2.Normalize([0.5], [0.2], in_place)]
    return [
        chance.choice((v2.ToImage, v2.PILToTensor))(),
        *tail,
        *erasings,
        *([v2.ToPureTensor()] * chance.randint(0, 1)),
    ]


def random_container(seed: int) -> Any:
    """The same for the same seed."""
    chance = random.Random(seed)
    module: Any = chance.choice((v1, v2))
    before, tail = random_transforms(chance, module), _tail(chance, module)
    if module is v2 and chance.random() < 0.4:
        return v2.Compose([tail[0], *before, *tail[1:]])
    return module.Compose([*before, *tail])


def seeded(seed: int, run: Callable[[], Any]) -> tuple[Any, Any]:
    """A result or an error, and the states of the generators behind it."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        result = run()
    except Exception as error:
        result = type(error), str(error)
    return result, (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]


def assert_equal_samples(
    container: Any, change: Callable[[], None] = lambda: None, begin: Callable[[], None] = lambda: None
) -> list[Any]:
    """Samples as stock code makes them, with a change before each; returns what the backend recorded."""

    def samples() -> list[Any]:
        begin()
        made = []
        for seed in range(8):
            change()
            made.append(seeded(seed, lambda seed=seed: container(photo(seed))))
        return made

    expected = samples()
    with torch_sink.image_backend("device", device="cpu"):
        actual = samples()
        handles = [made for made, _ in actual]
        for (made, state), (stock_made, stock_state) in zip(actual, expected, strict=True):
            assert state == stock_state
            same_value(made, stock_made)
    return handles
