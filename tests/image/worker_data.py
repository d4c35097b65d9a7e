"""Datasets, collate functions and probes for data workers; in a module, so that spawned workers find them."""

from __future__ import annotations

import json
import sys
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageFile, ImageFilter
from torch.utils.data import Dataset, default_collate, get_worker_info
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torch_sink.image.decode.encoded import EncodedSource

Pair = namedtuple("Pair", ["image", "target"])


def train_transform() -> transforms.Compose:
    """The ImageNet pipeline, small."""
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(20),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )


def sharpen(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.SHARPEN)


def sharpened_transform() -> transforms.Compose:
    """User code that calls Pillow, between transforms."""
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(20),
            transforms.Lambda(sharpen),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
        ]
    )


def jitter_transform() -> v2.Compose:
    """A v2 pipeline whose images take different operations."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(20),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )


class Structured(Dataset[Any]):
    """An ImageFolder whose samples have another form."""

    def __init__(self, folder: str, form: str) -> None:
        self.images, self.form = ImageFolder(folder, train_transform()), form

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image, target = self.images[index]
        if self.form == "bare":
            return image
        if self.form == "dict":
            return {"image": image, "target": target, "nested": {"again": [image, float(index)]}}
        if self.form == "namedtuple":
            return Pair(image, target)
        return [image, (target, {"path": self.images.samples[index][0]})]


def stacking_collate(batch: Sequence[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """What many scripts write themselves."""
    return torch.stack([image for image, _ in batch]), torch.tensor([target for _, target in batch])


def count_decodes(worker: int) -> None:
    """A `worker_init_fn`: from now on this worker counts what it decodes."""
    stock_load, stock_decode = ImageFile.ImageFile.load, EncodedSource.decode

    def load(image: Any) -> Any:
        _decodes.append("Pillow")
        return stock_load(image)

    def decode(source: Any) -> Any:
        _decodes.append(source.path)
        return stock_decode(source)

    ImageFile.ImageFile.load = load  # type: ignore[method-assign]
    EncodedSource.decode = decode  # type: ignore[method-assign]


_decodes: list[str] = []


def kernel_modules() -> list[str]:
    """The modules with device code that this process has imported; those of plain integers hold none."""
    return [
        name
        for name in sys.modules
        if name.startswith("torch_sink.triton_kernels")
        and name != "torch_sink.triton_kernels"
        and not name.endswith(("rows", ".shapes"))
    ]


class WatchedCollate:
    """`default_collate` that writes down, after every batch, what its worker has done so far."""

    def __init__(self, folder: Path, start_method: str) -> None:
        self.folder = folder
        # A forked worker has what its parent had imported already.
        self.inherited = set(kernel_modules()) if start_method == "fork" else set()

    def __call__(self, batch: list[Any]) -> Any:
        collated = default_collate(batch)
        seen = {
            "decodes": len(_decodes),
            "cuda": torch.cuda.is_initialized(),
            "kernels": bool(set(kernel_modules()) - self.inherited),
        }
        info = get_worker_info()
        assert info is not None, "only workers are watched"
        (self.folder / f"{info.id}.json").write_text(json.dumps(seen))
        return collated
