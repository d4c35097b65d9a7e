"""Samples of v2 that hold more than an image: values, draws and errors are stock torchvision's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves
from torchvision import tv_tensors
from torchvision.transforms import v2

import torch_sink
from image.random_pipelines import same_value
from image.steps.containers import photo, random_transforms, seeded
from torch_sink.image.handles.tensor import Handle

pytestmark = pytest.mark.halved

VALUES = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.2])]


class _OwnMask(tv_tensors.Mask):
    pass


def _mask(image: Image.Image, kind: Any = tv_tensors.Mask) -> Any:
    return kind(torch.arange(image.height * image.width, dtype=torch.uint8).view(1, image.height, image.width))


def _boxes(image: Image.Image, size: Any = None, **kwargs: Any) -> Any:
    size = size or (image.height, image.width)
    return tv_tensors.BoundingBoxes([[3, 2, 20, 12], [1, 4, 30, 30]], format="XYXY", canvas_size=size, **kwargs)


def _points(image: Image.Image) -> Any:
    return tv_tensors.KeyPoints([[3, 4], [12, 9]], canvas_size=(image.height, image.width))


SAMPLES: dict[str, Callable[[Image.Image], tuple[Any, ...]]] = {
    "image and mask": lambda image: (image, _mask(image)),
    "dict": lambda image: (
        {"labels": torch.tensor([1, 2]), "image": image, "masks": _mask(image), "boxes": _boxes(image), "id": 3},
    ),
    "detection": lambda image: (
        image,
        {"boxes": _boxes(image), "labels": torch.tensor([1, 2]), "name": "a", "area": 2.5},
    ),
    "points in a list": lambda image: ([_points(image), image, None],),
    "labels before": lambda image: (torch.arange(12.0).view(3, 2, 2), image),
}
ODD_SAMPLES: dict[str, Callable[[Image.Image], tuple[Any, ...]]] = {
    "two images": lambda image: (image, photo(9)),
    "an array": lambda image: (image, np.zeros((4, 5, 3), np.uint8)),
    "own mask": lambda image: (image, _mask(image, _OwnMask)),
    "mask of another size": lambda image: (image, tv_tensors.Mask(torch.ones(4, 5, dtype=torch.uint8))),
    "boxes of another size": lambda image: (image, _boxes(image, (9, 9))),
    "tensor image": lambda image: (v2.functional.to_image(image), _mask(image)),
    "no image": lambda image: (_mask(image), torch.ones(3, 4, 5)),
    "the image alone in a dict": lambda image: ({"image": image},),
}


def assert_stocks(container: Any, sample: Callable[[Image.Image], tuple[Any, ...]], seeds: range) -> int:
    """How many images were recorded to the end."""
    recorded = 0
    for seed in seeds:
        expected, state = seeded(seed, lambda seed=seed: container(*sample(photo(seed))))
        with torch_sink.image_backend("device", device="cpu"):
            made, state_behind = seeded(seed, lambda seed=seed: container(*sample(photo(seed))))
            assert state_behind == state
            leaves, stocks = tree_leaves(made), tree_leaves(expected)
            recorded += any(isinstance(leaf, Handle) for leaf in leaves)
            assert len(leaves) == len(stocks)
            assert type(made) is type(expected)
            for leaf, stock in zip(leaves, stocks, strict=True):
                assert isinstance(leaf, type(stock))
                if isinstance(stock, (torch.Tensor, Image.Image)):
                    same_value(leaf, stock)
                    assert getattr(leaf, "canvas_size", None) == getattr(stock, "canvas_size", None)
                else:
                    assert leaf == stock
    return recorded


MOVES: dict[str, Callable[[], list[Any]]] = {
    "segmentation": lambda: [v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), *VALUES],
    "tensors first": lambda: [v2.ToImage(), v2.RandomVerticalFlip(), v2.RandomResizedCrop((20, 30)), *VALUES[1:]],
    "crops": lambda: [v2.RandomCrop(30, padding=4, fill=7), v2.CenterCrop((36, 28)), v2.Pad([1, 2], fill=3), *VALUES],
    "no crop": lambda: [v2.RandomCrop((36, 40)), v2.Resize(20), v2.Resize(30, max_size=31), *VALUES],
    "warps": lambda: [v2.RandomAffine(30, (0.1, 0.3), (0.7, 1.4), 9), v2.RandomRotation(20, expand=True), *VALUES],
    "fills": lambda: [
        v2.RandomRotation(40, fill={tv_tensors.Mask: 9, "others": 3}), v2.RandomAffine(9, fill={Image.Image: 5, "others": 0}), *VALUES
    ],
    "colors": lambda: [
        v2.ColorJitter(0.4, 0.4, 0.4, 0.1), v2.RandomGrayscale(0.5), v2.GaussianBlur(3), v2.RandomSolarize(99), v2.RandomInvert(), *VALUES
    ],
    "detection": lambda: [v2.RandomIoUCrop(), v2.RandomHorizontalFlip(), v2.Resize((20, 24)), *VALUES,
                          v2.ClampBoundingBoxes(), v2.ToPureTensor(), v2.RandomHorizontalFlip()],
    "containers": lambda: [v2.RandomApply([v2.RandomHorizontalFlip(), v2.RandomCrop(20)]), v2.Compose([v2.Pad(3), v2.RandomCrop(18)]),
                           v2.RandomChoice([v2.RandomCrop(9), v2.CenterCrop(11)]), *VALUES],
    "pure": lambda: [v2.Pad(1), v2.PILToTensor(), v2.RandomHorizontalFlip(), v2.Resize(9), v2.ToDtype(torch.float32)],
    "pure beside a Pillow image": lambda: [v2.Pad(1), v2.ToPureTensor(), v2.RandomHorizontalFlip(), v2.RandomCrop(20), *VALUES],
    "perspectives": lambda: [v2.RandomPerspective(p=1.0, fill={tv_tensors.Mask: 9, "others": 3}), v2.RandomZoomOut(5, p=1.0), *VALUES],
    "elastic": lambda: [v2.ElasticTransform(20.0, 1.0, v2.InterpolationMode.NEAREST), *VALUES, v2.ElasticTransform(sigma=1.0)],
    "sizes": lambda: [v2.ScaleJitter((40, 30)), v2.RandomShortestSize([18, 25], 30), v2.RandomResize(14, 30), *VALUES],
    "others between": lambda: [v2.Pad(1), lambda *sample: sample if len(sample) > 1 else sample[0], v2.RandomCrop(19), *VALUES],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("moves", MOVES)
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.sampled(28)
def test_all_of_a_sample_moves(moves: str, sample: str) -> None:
    recorded = assert_stocks(v2.Compose(MOVES[moves]()), SAMPLES[sample], range(6))
    assert recorded == 6 or moves in ("detection", "pure", "others between", "colors")


# Ways to construct classes of v2; behind `ToImage` where it takes no Pillow images.
EXACT = v2.InterpolationMode.NEAREST_EXACT
OF_IMAGES: dict[str, Callable[[], list[Any]]] = {
    "AutoAugment": lambda: [v2.AutoAugment()],
    "CenterCrop": lambda: [v2.CenterCrop((50, 12))],
    "ColorJitter": lambda: [v2.ColorJitter(0.4, 0.4, 0.4, 0.1)],
    "Compose": lambda: [v2.Compose([v2.Pad(3)])],
    "ElasticTransform": lambda: [v2.ElasticTransform(20.0, 1.0)],
    "GaussianBlur": lambda: [v2.GaussianBlur(3)],
    "Grayscale": lambda: [v2.Grayscale(1)],
    "Pad": lambda: [v2.Pad([1, 2], fill={tv_tensors.Mask: 9, "others": 3}), v2.Pad(3, padding_mode="reflect")],
    "PILToTensor": lambda: [v2.PILToTensor()],
    "RandAugment": lambda: [v2.RandAugment()],
    "RandomAdjustSharpness": lambda: [v2.RandomAdjustSharpness(2.0, 1.0)],
    "RandomAffine": lambda: [v2.RandomAffine(30, (0.1, 0.3), (0.7, 1.4), 9)],
    "RandomApply": lambda: [v2.RandomApply([v2.RandomCrop(20)], 1.0)],
    "RandomAutocontrast": lambda: [v2.RandomAutocontrast(1.0)],
    "RandomChoice": lambda: [v2.RandomChoice([v2.RandomCrop(9), v2.CenterCrop(11)])],
    "RandomCrop": lambda: [v2.RandomCrop(30, padding=4, fill=7), v2.RandomCrop(60, pad_if_needed=True)],
    "RandomEqualize": lambda: [v2.RandomEqualize(1.0)],
    "RandomErasing": lambda: [v2.RandomErasing(1.0)],
    "RandomGrayscale": lambda: [v2.RandomGrayscale(1.0)],
    "RandomHorizontalFlip": lambda: [v2.RandomHorizontalFlip(1.0)],
    "RandomInvert": lambda: [v2.RandomInvert(1.0)],
    "RandomIoUCrop": lambda: [v2.RandomIoUCrop()],
    "RandomOrder": lambda: [v2.RandomOrder([v2.Pad(3), v2.RandomVerticalFlip(1.0)])],
    "RandomPerspective": lambda: [v2.RandomPerspective(p=1.0)],
    "RandomPosterize": lambda: [v2.RandomPosterize(3, 1.0)],
    "RandomResize": lambda: [v2.RandomResize(14, 30), v2.RandomResize(14, 30, interpolation=EXACT)],
    "RandomResizedCrop": lambda: [v2.RandomResizedCrop(24), v2.RandomResizedCrop(24, interpolation=EXACT)],
    "RandomRotation": lambda: [v2.RandomRotation(20, expand=True)],
    "RandomShortestSize": lambda: [v2.RandomShortestSize([18, 25], 30)],
    "RandomSolarize": lambda: [v2.RandomSolarize(99, 1.0)],
    "RandomVerticalFlip": lambda: [v2.RandomVerticalFlip(1.0)],
    "RandomZoomOut": lambda: [v2.RandomZoomOut(5, p=1.0)],
    "Resize": lambda: [v2.Resize(20), v2.Resize((50, 21), EXACT)],
    "ScaleJitter": lambda: [v2.ScaleJitter((40, 30))],
    "ToDtype": lambda: [v2.ToDtype(torch.float32), v2.ToDtype({tv_tensors.Mask: torch.int64, "others": None})],
    "ToImage": lambda: [v2.ToImage()],
    "ToPureTensor": lambda: [v2.ToPureTensor()],
    "ToTensor": lambda: [v2.ToTensor()],
    "TrivialAugmentWide": lambda: [v2.TrivialAugmentWide()],
}
OF_TENSORS: dict[str, Callable[[], list[Any]]] = {
    "ConvertImageDtype": lambda: [v2.ConvertImageDtype(kind) for kind in (torch.float32, torch.uint8, torch.float64)],
    "Normalize": lambda: [v2.Compose([v2.ToDtype(torch.float32), v2.Normalize([0.5], [0.2])])],
    "ToDtype of a tensor": lambda: [
        v2.ToDtype(torch.float16, scale=True),
        v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.BoundingBoxes: torch.float32, "others": None}),
    ],
    "resizes of a tensor": lambda: [v2.Resize(20, EXACT), v2.RandomResizedCrop(24, interpolation=EXACT)],
}


def _everything(image: Image.Image) -> tuple[Any, ...]:
    """Masks, boxes and points of several dtypes, and what transforms leave alone."""
    masks = [tv_tensors.Mask(_mask(image).to(kind)) for kind in (torch.uint8, torch.int64, torch.bool, torch.float32)]
    boxes = [tv_tensors.wrap(_boxes(image).to(kind), like=_boxes(image)) for kind in (torch.int64, torch.float32)]
    return image, {"masks": masks, "boxes": boxes, "points": _points(image)}, torch.arange(3), torch.rand(2), None, "a"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*OF_IMAGES, *OF_TENSORS])
@pytest.mark.sampled(28)
def test_every_transform_moves_all_of_a_sample(name: str) -> None:
    first = [v2.ToImage()] if name in OF_TENSORS else []
    for transform in {**OF_IMAGES, **OF_TENSORS}[name]():
        assert_stocks(v2.Compose([*first, transform]), _everything, range(3))


_KINDS_OF_BOXES = ["XYXY", "XYWH", "CXCYWH", "XYWHR", "integers", "none", "turned over", "no numbers", "far away"]


@pytest.mark.parametrize("kind", _KINDS_OF_BOXES)
@pytest.mark.sampled(2)
def test_crops_near_boxes_are_stocks(kind: str) -> None:
    """Sampled with plain numbers: the crops, the boxes inside of them, and the draws."""

    def sample(image: Image.Image) -> tuple[Any, ...]:
        chance = np.random.default_rng(image.getpixel((1, 1)))
        corners = torch.from_numpy(chance.uniform(0, 20, (chance.integers(1, 6), 2)).astype(np.float32))
        values = torch.cat(
            [corners, corners + torch.from_numpy(chance.uniform(0, 16, corners.shape).astype(np.float32))], 1
        )
        values = torch.cat([values, values[:, :1]], 1) if kind == "XYWHR" else values
        values = values[:0] if kind == "none" else values.long() if kind == "integers" else values
        if kind == "turned over":
            values[::2] = values[::2, [2, 1, 0, 3]]
        if kind in ("no numbers", "far away"):
            values[0, 2:] = math.nan if kind == "no numbers" else 3e38
        boxes = tv_tensors.BoundingBoxes(
            values, format=kind if kind[0] in "XC" else "XYXY", canvas_size=(image.height, image.width)
        )
        return image, {"boxes": boxes, "mask": _mask(image)}

    crops = [v2.RandomIoUCrop(), v2.RandomIoUCrop(0.1, 1.2, 0.3, 4.0, [0.05, 0.2, 1.0], trials=7)]
    for crop in crops:
        assert_stocks(v2.Compose([crop, *VALUES]), sample, range(25))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sample", ODD_SAMPLES)
def test_unusual_samples_are_stocks(sample: str) -> None:
    assert_stocks(v2.Compose(MOVES["segmentation"]()), ODD_SAMPLES[sample], range(3))
    assert_stocks(v2.Compose(MOVES["crops"]()), ODD_SAMPLES[sample], range(3))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_pipelines_of_samples(first: int) -> None:
    for seed in range(first, first + 20):
        chance = random.Random(seed)
        container = v2.Compose([*random_transforms(chance, v2), *VALUES])
        assert_stocks(container, SAMPLES[chance.choice(list(SAMPLES))], range(seed, seed + 1))


def test_sizes_that_disagree_behind_a_rotation_are_stocks_error() -> None:
    """torchvision rounds the sizes of rotated images and of their boxes in different ways."""
    container = v2.Compose([v2.RandomRotation((33, 33), expand=True), v2.RandomCrop(9), *VALUES])

    def sample(image: Image.Image) -> tuple[Any, ...]:
        cut = image.crop((0, 0, 20, 21))
        return cut, _boxes(cut)

    with pytest.raises(ValueError, match="Found multiple HxW dimensions"):
        container(*sample(photo()))
    with (
        torch_sink.image_backend("device", device="cpu"),
        pytest.raises(ValueError, match="Found multiple HxW dimensions"),
    ):
        container(*sample(photo()))


def test_hooks_and_own_methods_of_samples_are_called() -> None:
    calls: list[str] = []
    flip, crop = v2.RandomHorizontalFlip(1.0), v2.RandomCrop(20)
    flip.register_forward_hook(lambda module, inputs, output: calls.append("flip"))
    crop.make_params = lambda flat: {  # type: ignore[method-assign]
        "needs_crop": True, "needs_pad": False, "top": 1, "left": 2, "height": 20, "width": 19,
    }  # fmt: skip
    assert_stocks(v2.Compose([v2.Pad(1), flip, crop, *VALUES]), SAMPLES["dict"], range(2))
    assert calls == ["flip"] * 4
