"""scikit-learn's 1,797 handwritten digits as JPEG files, in the folder layout that `ImageFolder` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

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


def _draw(digit: np.ndarray, tint: np.ndarray) -> Image.Image:
    gray = Image.fromarray((digit * (255 / BRIGHTEST)).astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    colors = np.asarray(gray, dtype=np.float64)[..., None] * tint
    return Image.fromarray(colors.round().astype(np.uint8))
