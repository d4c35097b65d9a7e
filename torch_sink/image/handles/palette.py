"""Palette images: their pixels number the colors of a table, or classes, as in the masks of segmentation datasets."""

from __future__ import annotations

from typing import Any

from PIL import Image

from torch_sink.image.sources.source import Source


def has_plain_palette(image: Image.Image) -> bool:
    """True for a loaded palette image whose colors have no alpha, which every operation keeps as they are."""
    return image.mode == "P" and image.palette is not None and image.palette.mode == "RGB"


def palette_of(source: Source) -> Any:
    """A copy of the palette that a recorded image has, or None for a source of another mode."""
    image = getattr(source, "image", None)
    return image.palette.copy() if image is not None and image.mode == "P" else None


def color_planes(source: Source, mode: str) -> bytes:
    """What a conversion to `mode` makes of each of the 256 numbers, channel by channel, as `Image.point` takes it."""
    ramp = source.image.resize((256, 1))  # type: ignore[union-attr]
    ramp.frombytes(bytes(range(256)))
    return b"".join(channel.tobytes() for channel in ramp.convert(mode).split())
