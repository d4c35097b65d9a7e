"""What the demo trains: a small network on scikit-learn's 1,797 handwritten digits, as folders of JPEG files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

SIDE = 64
BRIGHTEST = 16


def write_digits(folder: Path, *, seed: int = 0) -> tuple[int, int]:
    """Write `folder/train/<digit>/*.jpg` and `folder/test/<digit>/*.jpg`, 64 x 64 pixels, RGB.

    Args:
        folder: created if missing. A finished tree is left alone.
        seed: decides which fifth of the images is the test split, and the tint of each.

    Returns:
        The number of training and of test images.
    """
    digits = load_digits()
    numbers = np.arange(len(digits.images))
    train, test = train_test_split(numbers, test_size=0.2, random_state=seed, stratify=digits.target)
    tints = np.random.default_rng(seed).uniform(0.6, 1.0, size=(len(numbers), 3))
    finished = folder / "complete"
    if not finished.exists():
        for split, members in (("train", train), ("test", test)):
            for number in members:
                path = folder / split / str(digits.target[number]) / f"{number:04d}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                _draw(digits.images[number], tints[number]).save(path, quality=92)
        finished.touch()
    return len(train), len(test)


def make_model() -> nn.Module:
    """Takes images [N, 3, 32, 32], gives scores [N, 10]."""
    layers: list[nn.Module] = []
    for channels_in, channels_out in ((3, 24), (24, 48), (48, 96)):
        layers += [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(96, 10))


def write_results(model: nn.Module, folder: str, **values: Any) -> None:
    """Write what a script measured, and the accuracy on the test images, to `folder/results.json`."""
    normalize = transforms.Normalize((0.28, 0.28, 0.28), (0.32, 0.32, 0.32))
    pipeline = transforms.Compose([transforms.Resize(32), transforms.ToTensor(), normalize])
    images = ImageFolder(f"{folder}/test", pipeline)
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        right = sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in DataLoader(images, 64))
    Path(folder, "results.json").write_text(json.dumps({**values, "accuracy": right / len(images)}))


def _draw(digit: np.ndarray, tint: np.ndarray) -> Image.Image:
    gray = Image.fromarray((digit * (255 / BRIGHTEST)).astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    colors = np.asarray(gray, dtype=np.float64)[..., None] * tint
    return Image.fromarray(colors.round().astype(np.uint8))
