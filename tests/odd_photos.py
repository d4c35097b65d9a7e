"""Image files of many kinds: gray, progressive, CMYK, turned by EXIF, PNG, ..."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch_sink.cli.photos import make_photo

SIZES = ((500, 375), (375, 500), (500, 333), (501, 373), (333, 500), (640, 480), (61, 47), (500, 400), (500, 375))
EXIF_ORIENTATION_TAG = 0x0112


class FileKind(NamedTuple):
    """How one generated image is stored: its Pillow mode and the arguments of `Image.save`."""

    name: str
    mode: str = "RGB"
    suffix: str = ".jpg"
    save: Mapping[str, Any] = MappingProxyType({})
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


def write_odd_photos(folder: Path, count: int = 48, classes: int = 4) -> None:
    """An `ImageFolder` tree; every second file is of an odd kind."""
    kinds = cycle([kind for odd_kind in ODD_KINDS for kind in (PLAIN, odd_kind)])
    for index, kind in zip(range(count), kinds, strict=False):
        image = make_photo(*SIZES[index % len(SIZES)], seed=index)
        path = folder / f"class_{index % classes}" / f"{index:04d}_{kind.name}{kind.suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        arguments = dict(kind.save)
        if kind.orientation is not None:
            exif = arguments["exif"] = image.getexif()
            exif[EXIF_ORIENTATION_TAG] = kind.orientation
        converted = image if kind.mode == "RGB" else image.convert(kind.mode)
        if kind.mode == "RGBA":
            converted.putalpha(image.convert("L"))
        converted.save(path, **arguments)
