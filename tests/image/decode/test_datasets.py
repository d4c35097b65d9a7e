"""The datasets of torchvision: their batches equal stock."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets, transforms
from torchvision.datasets import cifar

from image.source_files import FILES, PIPELINE, assert_same_batches
from torch_sink.cli.photos import make_photo


def opened(path: str) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of file, in two folders."""
    root = tmp_path_factory.mktemp("classes")
    for number, (name, make) in enumerate(FILES.items()):
        folder = root / str(number % 2)
        folder.mkdir(exist_ok=True)
        (folder / f"{number:02}.{name.split(',')[0].lower()}").write_bytes(make())
    return root


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_image_folder(classes: Path) -> None:
    assert_same_batches(lambda: datasets.ImageFolder(str(classes), PIPELINE))


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_dataset_folder_with_a_loader_of_its_own(classes: Path) -> None:
    assert_same_batches(lambda: datasets.DatasetFolder(str(classes), opened, ("jpeg", "png", "webp"), PIPELINE))


@pytest.mark.parametrize("kind", [datasets.CIFAR10, datasets.CIFAR100])
def test_cifar(tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "check_integrity", lambda *args: True)  # the files are our own
    label = "labels" if kind is datasets.CIFAR10 else "fine_labels"
    folder = tmp_path / kind.base_folder
    folder.mkdir()
    pixels = np.stack([np.asarray(make_photo(32, 32, seed)).transpose(2, 0, 1).ravel() for seed in range(3)])
    for name, _ in kind.train_list:
        (folder / name).write_bytes(pickle.dumps({"data": pixels, label: [3, 1, 2]}))
    (folder / kind.meta["filename"]).write_bytes(pickle.dumps({kind.meta["key"]: list("abcdef")}))
    transform = transforms.Compose(
        [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )
    assert_same_batches(lambda: kind(str(tmp_path), transform=transform))


@pytest.mark.parametrize("kind", [datasets.MNIST, datasets.FashionMNIST])
def test_mnist(tmp_path: Path, kind: Any) -> None:
    raw = tmp_path / kind.__name__ / "raw"
    raw.mkdir(parents=True)
    pixels = np.stack([np.asarray(make_photo(28, 28, seed).convert("L")) for seed in range(5)])
    for part in ("train", "t10k"):
        files = {
            f"{part}-images-idx3-ubyte": bytes([0, 0, 8, 3, *np.array([5, 28, 28], ">u4").tobytes()])
            + pixels.tobytes(),
            f"{part}-labels-idx1-ubyte": bytes([0, 0, 8, 1, *np.array([5], ">u4").tobytes(), 1, 2, 3, 4, 5]),
        }
        for name, data in files.items():
            (raw / name).write_bytes(data)
            (raw / f"{name}.gz").write_bytes(gzip.compress(data))
    transform = transforms.Compose(
        [transforms.RandomRotation(10), transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    )
    assert_same_batches(lambda: kind(str(tmp_path), transform=transform))
