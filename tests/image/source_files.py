"""Small files of every kind, and what data loaders make of them in stock code and with the backend."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch.utils.data import DataLoader
from torchvision import transforms

import torch_sink
from image.check import assert_same_bits
from torch_sink.cli.photos import make_photo

PHOTO = make_photo(64, 64, 5)
GRAY, ALPHA = PHOTO.convert("L"), PHOTO.copy()
ALPHA.putalpha(GRAY)
PIPELINE = transforms.Compose(
    [transforms.RandomResizedCrop(16), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def ycck() -> bytes:
    """A CMYK file that says that its colors are YCCK."""
    data = saved(PHOTO.convert("CMYK"), "JPEG")
    transform = data.index(b"Adobe") + 11
    return data[:transform] + b"\x02" + data[transform + 1 :]


def chroma_halved_vertically() -> bytes:
    """4:4:0: the units of a 4:2:2 file, read as columns; a square image has as many of either."""
    data = saved(PHOTO, "JPEG", subsampling="4:2:2")
    factors = data.index(b"\xff\xc0") + 11
    assert data[factors] == 0x21
    return data[:factors] + b"\x12" + data[factors + 1 :]


def turned() -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return saved(PHOTO.crop((0, 0, 64, 40)), "JPEG", exif=exif)


FILES: dict[str, Callable[[], bytes]] = {
    "JPEG, baseline": lambda: saved(PHOTO, "JPEG", quality=90),
    "JPEG, progressive": lambda: saved(PHOTO, "JPEG", progressive=True),
    "JPEG, optimized": lambda: saved(PHOTO, "JPEG", optimize=True),
    "JPEG, gray": lambda: saved(GRAY, "JPEG"),
    "JPEG, CMYK": lambda: saved(PHOTO.convert("CMYK"), "JPEG"),
    "JPEG, YCCK": ycck,
    "JPEG, stored as RGB": lambda: saved(PHOTO, "JPEG", keep_rgb=True),
    "JPEG, 4:4:4": lambda: saved(PHOTO, "JPEG", subsampling="4:4:4"),
    "JPEG, 4:2:2": lambda: saved(PHOTO, "JPEG", subsampling="4:2:2"),
    "JPEG, 4:2:0": lambda: saved(PHOTO, "JPEG", subsampling="4:2:0"),
    "JPEG, 4:4:0": chroma_halved_vertically,
    "JPEG, restart markers": lambda: saved(PHOTO, "JPEG", restart_marker_blocks=2),
    "JPEG, EXIF orientation": turned,
    "PNG": lambda: saved(PHOTO, "PNG"),
    "PNG, alpha": lambda: saved(ALPHA, "PNG"),
    "PNG, gray and alpha": lambda: saved(ALPHA.convert("LA"), "PNG"),
    "PNG, palette": lambda: saved(PHOTO.quantize(32), "PNG"),
    "PNG, transparent palette": lambda: saved(PHOTO.quantize(32), "PNG", transparency=3),
    "PNG, 1 bit": lambda: saved(PHOTO.convert("1"), "PNG"),
    "PNG, 16 bits": lambda: saved(Image.fromarray(np.asarray(GRAY).astype(np.uint16) * 257), "PNG"),
    "WebP": lambda: saved(PHOTO, "WEBP"),
    "WebP, lossless, alpha": lambda: saved(ALPHA, "WEBP", lossless=True),
    "GIF": lambda: saved(PHOTO, "GIF"),
    "GIF, animated": lambda: saved(PHOTO, "GIF", save_all=True, append_images=[ImageOps.mirror(PHOTO)]),
    "TIFF": lambda: saved(PHOTO, "TIFF"),
    "TIFF, LZW, CMYK": lambda: saved(PHOTO.convert("CMYK"), "TIFF", compression="tiff_lzw"),
    "TIFF, float": lambda: saved(GRAY.convert("F"), "TIFF"),
    "BMP": lambda: saved(PHOTO, "BMP"),
    "BMP, palette": lambda: saved(PHOTO.quantize(16), "BMP"),
}


def assert_same_batches(make: Callable[[], Any], *, batch_size: int | None = 4, collate_fn: Any = None) -> None:
    """The batches of a loader in stock code and with the backend, where fallbacks are forbidden."""

    def batches() -> list[list[torch.Tensor]]:
        torch.manual_seed(9)
        return list(DataLoader(make(), batch_size=batch_size, collate_fn=collate_fn))

    expected = batches()
    with torch_sink.image_backend("device", device="cpu", strict=True):
        made = batches()
    assert len(made) == len(expected) > 0
    for (images, target), (stock_images, stock_target) in zip(made, expected, strict=True):
        assert_same_bits(images, stock_images)
        assert torch.equal(target, stock_target)
