"""What image files are beside their pixels: broken, turned by EXIF data, or of 16 bits."""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import ExifTags, Image

import torch_sink
from torch_sink.damage.report import BrokenFile
from torch_sink.image.decode.encoded import read_jpeg_header

MOST_LOOKED_AT = 2000  # files of a folder; evenly spread where it has more
_MOST_NAMED = 3
_UPRIGHT = 1  # in EXIF data, also where they say nothing
_RECIPES = "see Recipes in the documentation"


class ImageFiles(NamedTuple):
    """What was found in image files.

    Args:
        sound: those that Pillow can decode.
        broken: the others, with Pillow's message.
        turned: how many have an EXIF orientation, by which viewers turn them.
        deep: how many have 16 bits and one channel.
        among: how many files there are; more than were looked at in a large folder.
    """

    sound: list[Path]
    broken: list[BrokenFile]
    turned: int
    deep: int
    among: int

    @property
    def looked_at(self) -> int:
        """How many files were looked at."""
        return len(self.sound) + len(self.broken)


def look_at(paths: Sequence[Path]) -> ImageFiles:
    """Reads files, and decodes those of which the header leaves in doubt whether Pillow can."""
    found = ImageFiles([], [], 0, 0, len(paths))
    turned = deep = 0
    with torch_sink.image_backend("PIL"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, which says them again when the pipeline opens the file
        for path in paths[:: math.ceil(len(paths) / MOST_LOOKED_AT) or 1]:
            try:
                data = path.read_bytes()
                image = Image.open(io.BytesIO(data))
                if read_jpeg_header(data, thorough=True) is None:
                    image.load()
            except Exception as error:  # each format of Pillow's has its own
                found.broken.append(BrokenFile(str(path), re.sub(r" <_io\.BytesIO .*>", "", str(error))))
                continue
            found.sound.append(path)
            with contextlib.suppress(Exception):  # damaged EXIF data, which turn nothing
                turned += image.getexif().get(ExifTags.Base.Orientation, _UPRIGHT) in range(2, 9)
            deep += image.mode.startswith("I;16")  # whose values `convert("RGB")` clips at 255
    return found._replace(turned=turned, deep=deep)


def said_of_files(files: ImageFiles) -> list[str]:
    """What was found, and what to write, as lines."""
    is_usual = not (files.broken or files.turned or files.deep)
    what = ": none is broken, turned by EXIF data, or of 16 bits" if is_usual else ""
    lines = [f"{files.looked_at:,} of {files.among:,} files looked at{what}"]
    if files.broken:
        lines.append(f"{len(files.broken):,} x broken, and left out here:")
        lines += [f"    {file.path}: {file.reason}" for file in files.broken[:_MOST_NAMED]]
        lines += [f"    and {len(files.broken) - _MOST_NAMED:,} more"] * (len(files.broken) > _MOST_NAMED)
        lines.append('    -> repair or remove them, or set_image_backend("device", on_decode_error="skip")')
    if files.turned:
        lines.append(f"{files.turned:,} x turned by EXIF data in a viewer, and not by ImageFolder or Image.open")
        lines.append(f"    -> to turn them, begin the Compose with ImageOps.exif_transpose, which records: {_RECIPES}")
    if files.deep:
        lines.append(f"{files.deep:,} x 16 bits: ImageFolder clips values above 255, with stock code too")
        lines.append(f"    -> to keep the high bits, give the dataset a loader of its own: {_RECIPES}")
    return lines
