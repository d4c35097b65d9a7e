"""Photo-like image files for tests and benchmarks on machines that have no photographs at hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

SIZES = ((500, 375), (375, 500), (500, 333), (501, 373), (333, 500), (640, 480), (61, 47), (500, 400), (500, 375))
EXIF_ORIENTATION_TAG = 0x0112


@dataclass(frozen=True)
class FileKind:
    """How one generated image is stored: its Pillow mode and the arguments of `Image.save`."""

    name: str
    mode: str = "RGB"
    suffix: str = ".jpg"
    save: dict[str, Any] = field(default_factory=dict)
    orientation: int | None = None


PLAIN = FileKind("baseline_420", save={"quality": 94, "subsampling": "4:2:0"})
ODD_KINDS = (
    FileKind("baseline_444", save={"quality": 90, "subsampling": "4:4:4"}),
    FileKind("baseline_422", save={"quality": 85, "subsampling": "4:2:2"}),
    FileKind("gray", "L", save={"quality": 90}),
    FileKind("progressive", save={"quality": 88, "progressive": True}),
    FileKind("cmyk", "CMYK", save={"quality": 90}),
    FileKind("exif_rotated", save={"quality": 90}, orientation=6),
    FileKind("optimized", save={"quality": 75, "optimize": True}),
    FileKind("png_rgb", suffix=".png"),
    FileKind("png_palette", "P", suffix=".png"),
    FileKind("png_alpha", "RGBA", suffix=".png"),
)


def make_photo(width: int, height: int, seed: int) -> Image.Image:
    """Draw an RGB image with the statistics that matter to a decoder: 1/f noise, hard edges and grain.

    Args:
        width: width in pixels.
        height: height in pixels.
        seed: equal seeds give equal images.
    """
    random = np.random.default_rng(seed)
    pixels = random.uniform(60, 190, size=3) * np.ones((height, width, 1))
    cell = max(width, height)
    while cell >= 2:
        coarse = random.normal(size=(height // cell + 2, width // cell + 2, 3))
        # Colors of a photograph vary together: most of the noise is shared by the channels.
        coarse = 0.75 * coarse.mean(axis=2, keepdims=True) * 3**0.5 + 0.35 * coarse
        pixels += 5.5 * cell**0.38 * _enlarge(coarse, width, height)
        cell //= 2
    pixels += random.normal(scale=5.0, size=(height, width, 1))
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    _draw_edges(image, random)
    return image


def write_photos(folder: str | Path, count: int = 48, classes: int = 4, *, odd: bool = True) -> list[Path]:
    """Write an `ImageFolder` tree of generated images, about 500 x 375 pixels and 100 kB each.

    Args:
        folder: created if missing; holds one folder per class afterwards.
        count: number of files.
        classes: number of class folders, filled in turn.
        odd: also write gray, progressive, CMYK, rotated and PNG files, every second file; otherwise all are baseline
            JPEG files with 4:2:0 chroma.

    Returns:
        The paths, in the order in which they were made.
    """
    paths = []
    kinds = _kinds(odd)
    for index in range(count):
        kind = next(kinds)
        width, height = SIZES[index % len(SIZES)] if odd else SIZES[0]
        path = Path(folder) / f"class_{index % classes}" / f"{index:04d}_{kind.name}{kind.suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(make_photo(width, height, seed=index), path, kind)
        paths.append(path)
    return paths


def _kinds(odd: bool) -> Iterator[FileKind]:
    if not odd:
        return cycle([PLAIN])
    return cycle([kind for odd_kind in ODD_KINDS for kind in (PLAIN, odd_kind)])


def _enlarge(coarse: np.ndarray, width: int, height: int) -> np.ndarray:
    channels = [Image.fromarray(coarse[..., channel].astype(np.float32)) for channel in range(3)]
    return np.stack([np.asarray(c.resize((width, height), Image.Resampling.BICUBIC)) for c in channels], axis=-1)


def _draw_edges(image: Image.Image, random: np.random.Generator) -> None:
    draw = ImageDraw.Draw(image)
    width, height = image.size
    for _ in range(6):
        left, top = int(random.integers(0, width)), int(random.integers(0, height))
        right, bottom = left + int(random.integers(2, width // 4 + 3)), top + int(random.integers(2, height // 4 + 3))
        color = tuple(int(value) for value in random.integers(0, 256, size=3))
        draw.ellipse((left, top, right, bottom), outline=color, width=3)
        draw.line((left, bottom, right, top), fill=color, width=2)


def _save(image: Image.Image, path: Path, kind: FileKind) -> None:
    arguments = dict(kind.save)
    if kind.orientation is not None:
        exif = image.getexif()
        exif[EXIF_ORIENTATION_TAG] = kind.orientation
        arguments["exif"] = exif
    converted = image if kind.mode == "RGB" else image.convert(kind.mode)
    if kind.mode == "RGBA":
        converted.putalpha(image.convert("L"))
    converted.save(path, **arguments)
