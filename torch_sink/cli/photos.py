"""Makes photo-like JPEG files, for machines without photographs."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

_SIZE = (500, 375)  # the usual one of ImageNet


def make_photo(width: int, height: int, seed: int) -> Image.Image:
    """Draw an RGB image that costs a decoder as much as a photograph: 1/f noise, hard edges and grain.

    Sizes are in pixels, and equal seeds give equal images.
    """
    random = np.random.default_rng(seed)
    pixels = random.uniform(60, 190, size=3) * np.ones((height, width, 1))
    cell = max(width, height)
    while cell >= 2:
        coarse = random.normal(size=(height // cell + 2, width // cell + 2, 3))
        # The channels of a photograph are correlated, so they share most of the noise.
        coarse = 0.75 * coarse.mean(axis=2, keepdims=True) * 3**0.5 + 0.35 * coarse
        channels = [Image.fromarray(coarse[..., channel].astype(np.float32)) for channel in range(3)]
        enlarged = [np.asarray(each.resize((width, height), Image.Resampling.BICUBIC)) for each in channels]
        pixels += 5.5 * cell**0.38 * np.stack(enlarged, axis=-1)
        cell //= 2
    pixels += random.normal(scale=5.0, size=(height, width, 1))
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        left, top = int(random.integers(0, width)), int(random.integers(0, height))
        right, bottom = left + int(random.integers(2, width // 4 + 3)), top + int(random.integers(2, height // 4 + 3))
        color = tuple(int(value) for value in random.integers(0, 256, size=3))
        draw.ellipse((left, top, right, bottom), outline=color, width=3)
        draw.line((left, bottom, right, top), fill=color, width=2)
    return image


def photo_file(seed: int) -> bytes:
    """A baseline JPEG file of 500 x 375 pixels and about 100 kB, with as many codes as ImageNet's have on average.

    As there, three of four files have chroma of full size (4:4:4), and the others of half the size (4:2:0).
    """
    file = io.BytesIO()
    subsampling, quality = ("4:2:0", 97) if seed % 4 == 3 else ("4:4:4", 93)
    make_photo(*_SIZE, seed).save(file, "JPEG", quality=quality, subsampling=subsampling)
    return file.getvalue()


def write_photos(folder: str | Path, count: int = 48, classes: int = 4) -> list[Path]:
    """Write an `ImageFolder` tree of files that `photo_file` makes.

    The folders of classes are filled in turn. Returns the paths, in the order in which they were made.
    """
    paths = [Path(folder) / f"class_{index % classes}" / f"{index:04d}.jpg" for index in range(count)]
    for seed, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo_file(seed))
    return paths
