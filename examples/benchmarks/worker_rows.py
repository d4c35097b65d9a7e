"""The pipelines of `worker_cost.py`: datasets as programs have them, and how many samples a batch holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

from torch_sink.cli.pipelines import CROP, MEAN, PIPELINES, RESIZE, STD, Counted, FolderImages, Pipeline
from torch_sink.cli.worker_cost import WARM_UP_BATCHES

LARGE, IN_MEMORY, SMALL, FEW, VIEWS = 256, 128, 32, 16, 8
COUNTED = {LARGE: 2, IN_MEMORY: 5, SMALL: 3, FEW: 4, VIEWS: 8}  # batch size -> batches of a round that count
MOST_FILES = LARGE * (COUNTED[LARGE] + WARM_UP_BATCHES)
HEADLINE = ("v1 train", "v1 train + ColorJitter", "v1 train + RandAugment")
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
MNIST_MEAN, MNIST_STD = (0.1307,), (0.3081,)
VALUES = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]


class Row(NamedTuple):
    """A pipeline.

    Attributes:
        make: its dataset, of the files of photographs, each another one.
        batch_size: samples in a batch.
        collate: makes a batch of them.
        one_process: measured in one process as well.
    """

    make: Callable[[Sequence[Path]], Dataset[Any]]
    batch_size: int
    collate: Callable[[Any], Any] = default_collate
    one_process: bool = False

    @property
    def images(self) -> int:
        """Samples of a round that count."""
        return self.batch_size * COUNTED[self.batch_size]

    def pipeline(self, name: str, files: Sequence[Path]) -> Pipeline:
        """Its dataset is as long as a round, so that no worker is ahead of it."""
        dataset = self.make(files[: self.images + WARM_UP_BATCHES * self.batch_size])
        collate = Counted(self.collate, is_batch=True)
        return Pipeline(name, dataset, {"batch_size": self.batch_size, "shuffle": True, "collate_fn": collate})


class Arrays(Dataset[Any]):
    """Images that lie in memory as arrays, as those of torchvision's CIFAR10 and MNIST do, and their labels."""

    def __init__(self, count: int, shape: tuple[int, ...], transform: Callable[[Any], Any]) -> None:
        self.arrays = np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.arrays[index])), index % 10


class WithMasks(FolderImages):
    """Photographs and a mask of two classes for each, made of its size."""

    def __getitem__(self, index: int) -> Any:
        image = default_loader(str(self.files[index]))
        mask = torch.zeros(image.height, image.width, dtype=torch.uint8)
        mask[image.height // 4 : image.height // 2, image.width // 4 :] = 1
        return self.transform(image, tv_tensors.Mask(mask))


class WithBoxes(FolderImages):
    """Photographs and a dict of two boxes for each."""

    def __getitem__(self, index: int) -> Any:
        image = default_loader(str(self.files[index]))
        width, height = image.size
        corners = torch.tensor([[0.1, 0.1, 0.6, 0.7], [0.3, 0.4, 0.9, 0.9]]) * torch.tensor([width, height] * 2)
        boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(height, width))
        return self.transform(image, {"boxes": boxes, "labels": torch.tensor([1, 2])})


class Views:
    """Several views of one image, as self-supervised training takes them."""

    def __init__(self, *transforms: Callable[[Any], Any]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> list[Any]:
        return [transform(image) for transform in self.transforms]


def with_targets(samples: Sequence[tuple[torch.Tensor, Any]]) -> tuple[torch.Tensor, list[Any]]:
    """A collate function of detection: the targets stay apart."""
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), list(targets)


def stack_crops(crops: Sequence[Any]) -> torch.Tensor:
    return torch.stack([v1.functional.to_tensor(crop) for crop in crops])


def simclr(size: int, *blur: Callable[[Any], Any]) -> v1.Compose:
    """One view of SimCLR."""
    jitter = v1.RandomApply([v1.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8)
    head = [v1.RandomResizedCrop(size), v1.RandomHorizontalFlip(), jitter, v1.RandomGrayscale(p=0.2), *blur]
    return v1.Compose([*head, v1.ToTensor(), v1.Normalize(MEAN, STD)])


def dino(size: int, scale: tuple[float, float], blur: float) -> v1.Compose:
    """One view of DINO's multi-crop."""
    jitter = v1.RandomApply([v1.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8)
    crop = v1.RandomResizedCrop(size, scale=scale, interpolation=v1.InterpolationMode.BICUBIC)
    blurred = v1.RandomApply([v1.GaussianBlur(9, (0.1, 2.0))], p=blur)
    head = [crop, v1.RandomHorizontalFlip(), jitter, v1.RandomGrayscale(p=0.2), blurred]
    return v1.Compose([*head, v1.ToTensor(), v1.Normalize(MEAN, STD)])


def multi_crop() -> Views:
    """Two large and eight small views of DINO."""
    large = [dino(224, (0.4, 1.0), blur) for blur in (1.0, 0.1)]
    return Views(*large, *[dino(96, (0.05, 0.4), 0.5)] * 8)


def of_photographs(transform: Any, batch_size: int = SMALL, *, one_process: bool = False) -> Row:
    return Row(lambda files: FolderImages(files, transform), batch_size, one_process=one_process)


def of_arrays(shape: tuple[int, ...], *transforms: Callable[[Any], Any], batch_size: int = IN_MEMORY) -> Row:
    return Row(lambda files: Arrays(len(files), shape, v1.Compose(transforms)), batch_size, one_process=True)


def all_rows() -> dict[str, Row]:
    """All of them, by name."""
    rows = {f"{name}, batch {LARGE}": of_photographs(PIPELINES[name](), LARGE) for name in HEADLINE}
    rows |= {
        f"{name}, batch {SMALL}": of_photographs(make(), one_process=name == HEADLINE[0] or name.startswith("v2"))
        for name, make in PIPELINES.items()
    }
    crop, flip, to_tensor = v1.RandomCrop(32, padding=4), v1.RandomHorizontalFlip(), v1.ToTensor()
    cifar, digits = v1.Normalize(CIFAR_MEAN, CIFAR_STD), v1.Normalize(MNIST_MEAN, MNIST_STD)
    policy = v1.AutoAugment(v1.AutoAugmentPolicy.CIFAR10)
    view, color, gray = simclr(32), (32, 32, 3), (28, 28)
    in_v2 = v2.Compose([VALUES[0], v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), VALUES[1],
                        v2.Normalize(CIFAR_MEAN, CIFAR_STD)])  # fmt: skip
    rows |= {
        "CIFAR train": of_arrays(color, crop, flip, to_tensor, cifar),
        "CIFAR train + AutoAugment": of_arrays(color, crop, flip, policy, to_tensor, cifar),
        "CIFAR train, v2, ToImage first": of_arrays(color, in_v2),
        "CIFAR, two views of SimCLR": of_arrays(color, Views(view, view)),
        "CIFAR eval": of_arrays(color, to_tensor, cifar),
        "MNIST eval": of_arrays(gray, to_tensor, digits),
        "MNIST train, rotation and affine": of_arrays(
            gray, v1.RandomRotation(10), v1.RandomAffine(10, (0.1, 0.1), (0.9, 1.1)), to_tensor, digits
        ),
    }
    normalize, view = v2.Normalize(MEAN, STD), simclr(CROP, v1.RandomApply([v1.GaussianBlur(23, (0.1, 2.0))], p=0.5))
    segmentation = v2.Compose([v2.RandomResizedCrop(CROP), v2.RandomHorizontalFlip(), *VALUES, normalize])
    detection = v2.Compose([v2.RandomIoUCrop(), v2.RandomHorizontalFlip(), v2.Resize((320, 320)), *VALUES, normalize,
                            v2.SanitizeBoundingBoxes()])  # fmt: skip
    five = v1.Compose([v1.Resize(RESIZE), v1.FiveCrop(CROP), v1.Lambda(stack_crops), v1.Normalize(MEAN, STD)])
    rows |= {
        "segmentation, v2 with masks": Row(lambda files: WithMasks(files, segmentation), FEW),
        "detection, v2 with boxes": Row(lambda files: WithBoxes(files, detection), FEW, with_targets),
        "five crops": of_photographs(five, FEW),
        "two views of SimCLR": of_photographs(Views(view, view), VIEWS),
        "DINO, 2 + 8 crops": of_photographs(multi_crop(), VIEWS),
        f"DINO, 2 + 8 crops, batch {SMALL}": of_photographs(multi_crop()),
    }
    return rows


ROWS = all_rows()
