"""Pipelines with blur and warps of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import functional as F1
from torchvision.transforms.v2 import functional as F2

from image.cases import MEAN, SIZE, STD
from image.check import Pipeline


def _v1(*transforms: Pipeline) -> Pipeline:
    return v1.Compose([v1.Resize(SIZE), *transforms, v1.PILToTensor()])


def _v1_tensors(*transforms: Pipeline) -> Pipeline:
    return v1.Compose([v1.Resize(SIZE), v1.PILToTensor(), *transforms])


def _v2(*transforms: Pipeline) -> Pipeline:
    return v2.Compose([v2.Resize(SIZE), *transforms, v2.ToImage()])


def _v2_tensors(*transforms: Pipeline) -> Pipeline:
    return v2.Compose([v2.Resize(SIZE), v2.ToImage(), *transforms])


BILINEAR, NEAREST = InterpolationMode.BILINEAR, InterpolationMode.NEAREST

WARPS: dict[str, Callable[[], Pipeline]] = {
    "v1 rotate": lambda: _v1_tensors(v1.RandomRotation(80), v1.RandomRotation(50, BILINEAR, center=(3, 4))),
    "v1 rotate, expanded": lambda: _v1_tensors(
        v1.RandomRotation((30, 30), BILINEAR, expand=True, fill=(10, 20.5, 30)), v1.CenterCrop(15)
    ),
    "v1 quarter turn": lambda: _v1_tensors(v1.RandomRotation((90, 90), fill=3), v1.RandomRotation((90, 90), BILINEAR)),
    "v1 affine": lambda: _v1_tensors(
        v1.RandomAffine(40, (0.2, 0.3), (0.6, 1.5), 20, BILINEAR, fill=9), v1.RandomAffine(0, (0.4, 0.4)),
        functools.partial(F1.affine, angle=9, translate=[1, 2], scale=1.1, shear=[3.0], interpolation=BILINEAR),
    ),
    "v1 perspective": lambda: _v1_tensors(
        v1.RandomPerspective(0.6, 1.0), v1.RandomPerspective(0.4, 1.0, NEAREST, (7, 8, 9))
    ),
    "v1 elastic": lambda: _v1_tensors(v1.ElasticTransform(60.0, 1.0, fill=40), v1.ElasticTransform(30.0, 2.0, NEAREST)),
    "v1 elastic, Pillow": lambda: _v1(v1.ElasticTransform(60.0, 1.0), v1.ColorJitter(0.4), v1.RandomHorizontalFlip(1)),
    "v2 rotate": lambda: _v2_tensors(v2.RandomRotation(80), v2.RandomRotation(50, BILINEAR, center=(3, 4), fill=2.5)),
    "v2 rotate, expanded": lambda: _v2_tensors(
        v2.RandomRotation((30, 30), BILINEAR, expand=True), v2.CenterCrop(15), v2.RandomRotation((180, 180))
    ),
    "v2 quarter turns": lambda: _v2_tensors(
        v2.RandomRotation((90, 90), expand=True), v2.CenterCrop(13), v2.RandomRotation((270, 270)),
        functools.partial(F2.rotate, angle=-360), v2.RandomRotation((90, 90), center=(2, 9)),
    ),
    "v2 affine": lambda: _v2_tensors(
        v2.RandomAffine(40, (0.2, 0.3), (0.6, 1.5), 20, BILINEAR, fill=(9, 8, 7)), v2.RandomAffine(0, (0.4, 0.4)),
        functools.partial(F2.affine, angle=9, translate=[1, 2], scale=1.1, shear=[3.0, 1.0], center=[1.0, 5.0]),
    ),
    "v2 perspective": lambda: _v2_tensors(
        v2.RandomPerspective(0.6, 1.0, fill=77), v2.RandomPerspective(0.4, 1.0, NEAREST),
        v2.ToDtype(torch.float32, scale=True),
    ),
    "v2 elastic": lambda: _v2_tensors(v2.ElasticTransform(60.0, 1.0, fill=40), v2.ElasticTransform(30.0, 2.0, NEAREST)),
    "v2 elastic, Pillow": lambda: _v2(v2.ElasticTransform(60.0, 1.0, NEAREST), v2.RandomVerticalFlip(1)),
    "v2 gray": lambda: v2.Compose(
        [v2.Grayscale(), v2.Resize(SIZE), v2.PILToTensor(), v2.RandomRotation(60, BILINEAR, fill=(5,)),
         v2.ElasticTransform(sigma=1.0), v2.RandomPerspective(0.5, 1.0, NEAREST)]
    ),
}  # fmt: skip

RANDOM_ERASE: dict[str, Callable[[], Pipeline]] = {
    "v1": lambda: v1.Compose(
        [v1.Resize(SIZE), v1.ToTensor(), v1.RandomErasing(1.0, value="random"), v1.RandomHorizontalFlip(1.0),
         v1.RandomCrop(12), v1.Normalize(MEAN, STD), v1.RandomErasing(1.0, value="random"), v1.RandomErasing(1.0)]
    ),
    "v1, bytes": lambda: _v1_tensors(
        v1.RandomErasing(1.0, (0.3, 0.4), value="random"), v1.RandomVerticalFlip(1.0), v1.RandomInvert(1.0), v1.Pad(2)
    ),
    "v1, float16": lambda: _v1_tensors(
        v1.ConvertImageDtype(torch.float16), v1.Normalize(MEAN, STD), v1.RandomErasing(1.0, value="random"),
        v1.RandomErasing(1.0, value=(0.1, 0.2, 0.3)),
    ),
    "v1, before color": lambda: _v1_tensors(
        v1.ConvertImageDtype(torch.float32), v1.RandomErasing(1.0, value="random"), v1.RandomHorizontalFlip(1.0),
        v1.RandomGrayscale(1.0), v1.RandomErasing(1.0, value="random"),
    ),
    "v1, gray": lambda: v1.Compose(
        [v1.Grayscale(), v1.Resize(SIZE), v1.ToTensor(), v1.RandomErasing(1.0, value="random")]
    ),
    "v2": lambda: _v2_tensors(
        v2.RandomErasing(1.0, value="random"), v2.ToDtype(torch.float32, scale=True),
        v2.RandomErasing(1.0, value="random"), v2.RandomHorizontalFlip(1.0), v2.Normalize(MEAN, STD), v2.Pad(2),
    ),
}  # fmt: skip

# The colors of DINO's first global view.
DINO = [v1.RandomHorizontalFlip(), v1.ColorJitter(0.4, 0.4, 0.2, 0.1), v1.RandomGrayscale(0.2)]

BLUR: dict[str, Callable[[], Pipeline]] = {
    "v1 blur": lambda: _v1(v1.RandomHorizontalFlip(), v1.GaussianBlur((5, 9), (0.1, 2.0)), v1.RandomCrop(9)),
    "v2 blur": lambda: _v2(v2.GaussianBlur((3, 7)), v2.ColorJitter(0.4)),
    "blur, one axis": lambda: _v1(v1.GaussianBlur((1, 3)), v1.GaussianBlur((5, 1)), v1.GaussianBlur(1)),
    "blur by a function": lambda: _v1(functools.partial(F1.gaussian_blur, kernel_size=[3, 3])),
    "v1 blur of tensors": lambda: _v1_tensors(v1.GaussianBlur(5), v1.RandomVerticalFlip()),
    "v2 blur of tensors": lambda: _v2_tensors(v2.GaussianBlur(9), v2.ToDtype(torch.float32, scale=True)),
    "blur of tensors, gray": lambda: v2.Compose([v2.Grayscale(), v2.Resize(SIZE), v2.PILToTensor(), v2.GaussianBlur(3), v2.GaussianBlur(5)]),
    "v1 wide blur": lambda: _v1(v1.GaussianBlur((23, 11), (0.5, 2.0)), v1.RandomCrop(9)),
    "v2 wide blur": lambda: _v2(v2.GaussianBlur((31, 25), (3.0, 5.0)), v2.RandomHorizontalFlip()),
    "wide blur of tensors": lambda: _v2_tensors(v2.Resize(30), v2.GaussianBlur((1, 45))),
    "wide blur of tensors, two axes": lambda: _v1_tensors(v1.GaussianBlur((13, 21), 2.5)),
    "to a tensor and back": lambda: _v1(v1.PILToTensor(), v1.ToPILImage(), v1.ColorJitter(contrast=1)),
    "DINO": lambda: v1.Compose(
            [v1.RandomResizedCrop(24), *DINO, v1.RandomApply([v1.GaussianBlur(9, (0.1, 2.0))], 0.5),
             v1.ToTensor(), v1.Normalize(MEAN, STD)]
        ),
}  # fmt: skip
