"""Albumentations: arrays from handles, arrays between transforms of torchvision, images from arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torchvision import transforms
from torchvision.transforms import v2

from third_party.compare import Later, assert_same_as_stock

A = Later("albumentations")


class OnArrays:
    """An Albumentations pipeline between transforms of torchvision, as a dataset would call it."""

    def __init__(self, steps: list[Any], before: Any = None, after: Any = None, *, read: Any = np.asarray) -> None:
        self.augment = A.Compose(steps, seed=5)
        self.before, self.after, self.read = before, after, read

    def __call__(self, image: Any) -> Any:
        image = image if self.before is None else self.before(image)
        array = self.augment(image=self.read(image))["image"]
        return array.tolist() if self.after is None else self.after(array)


def alone() -> OnArrays:
    from albumentations.pytorch import ToTensorV2

    steps = [
        A.RandomResizedCrop(size=(24, 24)), A.HorizontalFlip(), A.ColorJitter(), A.GaussNoise(p=1.0), A.Normalize(),
        ToTensorV2(),
    ]  # fmt: skip
    return OnArrays(steps, after=lambda tensor: tensor)


def after_recorded_calls() -> OnArrays:
    before = transforms.Compose([transforms.RandomResizedCrop(24), transforms.RandomHorizontalFlip()])
    return OnArrays([A.RandomBrightnessContrast(p=1.0), A.CLAHE(p=1.0)], before)


def in_the_middle() -> OnArrays:
    after = transforms.Compose([transforms.ToPILImage(), transforms.RandomCrop(20), transforms.ToTensor()])
    return OnArrays([A.RandomRotate90(), A.ToGray(p=0.5)], transforms.Resize((32, 32)), after, read=np.array)


def before_v2() -> OnArrays:
    after = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(20), v2.RandomHorizontalFlip()])
    return OnArrays([A.Affine(rotate=20, p=1.0)], v2.Resize((32, 32)), after)


@pytest.mark.parametrize("make", [alone, after_recorded_calls, in_the_middle, before_v2])
def test_same_as_stock(make: Callable[[], OnArrays]) -> None:
    assert_same_as_stock(make, seeds=3)
