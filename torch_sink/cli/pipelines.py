"""The ImageNet pipelines that the benchmarks and `explain` run, built from torchvision's own classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP, RESIZE = 224, 256
JITTER = (0.4, 0.4, 0.4, 0.1)


def _v1_train(*augmentations: Callable[[Any], Any]) -> v1.Compose:
    head = [v1.RandomResizedCrop(CROP), v1.RandomHorizontalFlip()]
    return v1.Compose([*head, *augmentations, v1.ToTensor(), v1.Normalize(MEAN, STD)])


def _v1_eval() -> v1.Compose:
    return v1.Compose([v1.Resize(RESIZE), v1.CenterCrop(CROP), v1.ToTensor(), v1.Normalize(MEAN, STD)])


def _v2_train(*augmentations: v2.Transform) -> v2.Compose:
    head = [v2.RandomResizedCrop(CROP), v2.RandomHorizontalFlip()]
    tail = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return v2.Compose([*head, *augmentations, *tail])


def _v2_tensor_first() -> v2.Compose:
    head = [v2.ToImage(), v2.RandomResizedCrop(CROP), v2.RandomHorizontalFlip()]
    return v2.Compose([*head, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


PIPELINES: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "v1 train": _v1_train,
    "v1 train + ColorJitter": lambda: _v1_train(v1.ColorJitter(*JITTER)),
    "v1 train + RandAugment": lambda: _v1_train(v1.RandAugment()),
    "v1 eval": _v1_eval,
    "v2 train": _v2_train,
    "v2 train + ColorJitter": lambda: _v2_train(v2.ColorJitter(*JITTER)),
    "v2 train + RandAugment": lambda: _v2_train(v2.RandAugment()),
    "v2 train, ToImage first": _v2_tensor_first,
}


def build_pipeline(name: str) -> Callable[[Any], Any]:
    """Build one of `PIPELINES`.

    Args:
        name: a key of `PIPELINES`, for instance "v1 train".

    Raises:
        ValueError: the name is not one of them.
    """
    if name not in PIPELINES:
        raise ValueError(f"unknown pipeline {name!r}; choose one of {', '.join(map(repr, PIPELINES))}")
    return PIPELINES[name]()
