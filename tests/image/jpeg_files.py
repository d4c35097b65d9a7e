"""JPEG files of every kind that the JPEG kernels decode, made here, and damage done to them."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image, ImageDraw

from torch_sink import decode_images
from torch_sink.cli.photos import make_photo
from torch_sink.image.decode import providers as decode
from torch_sink.image.decode.jpeg_block import MARKER_BYTES, JpegBatch, JpegFile, JpegFiles, batch_of
from torch_sink.triton_kernels import jpeg_rows
from torch_sink.triton_kernels.shapes import TileShape

# {name of a column, or of how many there are, in the tables of files: its number}
COLUMN = {name: value for name, value in vars(jpeg_rows).items() if name.isupper()}
SAMPLINGS = ("4:4:4", "4:2:2", "4:2:0", "4:4:0", "gray")
CONTENTS = ("photo", "noise", "bilevel", "white", "text")
DAMAGES = ("bit flipped", "cut off", "zeroed", "doubled", "header bit flipped")


def picture(content: str, width: int, height: int, seed: int) -> Image.Image:
    """An RGB image of some kind."""
    generator = np.random.default_rng(seed)
    if content == "photo":
        return make_photo(width, height, seed)
    if content == "noise":
        return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
    if content == "bilevel":
        return Image.fromarray(generator.integers(0, 2, (height, width, 3), dtype=np.uint8) * 255)
    image = Image.new("RGB", (width, height), "white")
    if content == "text":
        for line in range(0, height, 12):
            ImageDraw.Draw(image).text((3, line), f"line {line} of seed {seed}", fill="black")
    return image


def jpeg(
    width: int,
    height: int,
    sampling: str = "4:2:0",
    *,
    content: str = "photo",
    seed: int = 0,
    quality: int = 90,
    restart_blocks: int = 0,
    optimize: bool = False,
) -> bytes:
    """A baseline file.

    Args:
        width: pixels.
        height: pixels.
        sampling: one of SAMPLINGS.
        content: one of CONTENTS.
        seed: of what the picture shows.
        quality: Pillow's, 1 to 100.
        restart_blocks: MCUs between restart markers; 0 for none.
        optimize: Huffman tables of its own.
    """
    # Pillow writes no 4:4:0. The same units in another order are such a file, with a picture of other shape.
    written = (2 * width, -(-height // 2)) if sampling == "4:4:0" else (width, height)
    image = picture(content, *written, seed)
    buffer = io.BytesIO()
    save = {"quality": quality, "optimize": optimize, "restart_marker_blocks": restart_blocks}
    if sampling == "gray":
        image.convert("L").save(buffer, "JPEG", **save)
    else:
        named = "4:2:2" if sampling == "4:4:0" else sampling
        image.save(buffer, "JPEG", subsampling=("4:4:4", "4:2:2", "4:2:0").index(named), **save)
    data = bytearray(buffer.getvalue())
    if sampling == "4:4:0":
        frame = data.index(b"\xff\xc0")
        data[frame + 5 : frame + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
        data[frame + 11] = 0x12
    return bytes(data)


def with_quantization(data: bytes, values: Sequence[int]) -> bytes:
    """The file with one table of 64 values of 16 bits in the place of each of its tables."""
    changed = bytearray(data)
    at = changed.find(b"\xff\xdb")
    while at >= 0:
        length = int.from_bytes(changed[at + 2 : at + 4], "big")
        table = b"".join(value.to_bytes(2, "big") for value in values)
        segment = b"\xff\xdb\x00\x83" + bytes((0x10 | changed[at + 4] & 15,)) + table
        changed[at : at + 2 + length] = segment
        at = changed.find(b"\xff\xdb", at + len(segment))
    return bytes(changed)


def damaged(data: bytes, damage: str, seed: int) -> bytes:
    """The file with one of DAMAGES done to it, and its end marker in place."""
    chance = random.Random(seed)
    scan = data.index(b"\xff\xda") + 14
    end = len(data) - 2
    at = chance.randrange(scan, end)
    changed = bytearray(data)
    if damage == "bit flipped":
        changed[at] ^= 1 << chance.randrange(8)
    elif damage == "cut off":
        del changed[at:end]
    elif damage == "zeroed":
        length = min(20, end - at)
        changed[at : at + length] = bytes(length)
    elif damage == "doubled":
        changed[at:at] = changed[at : min(at + 7, end)]
    else:
        changed[chance.randrange(2, scan)] ^= 1 << chance.randrange(8)
    return bytes(changed)


def stock(data: bytes, mode: str = "RGB") -> torch.Tensor | None:
    """What Pillow decodes, uint8 [C, H, W]; None where it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pixels = np.array(Image.open(io.BytesIO(data)).convert(mode))
        except (OSError, SyntaxError, ValueError):
            return None
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)


@contextmanager
def watched_pillow() -> Iterator[list[object]]:
    """The sources that the Pillow provider decodes meanwhile."""
    provider = decode.PROVIDERS["pillow"]
    seen: list[object] = []

    def watching(sources: Sequence[object], *rest: object) -> object:
        seen.extend(sources)
        return type(provider).decode(provider, sources, *rest)  # type: ignore[arg-type]

    with mock.patch.object(provider, "decode", watching, create=True):
        yield seen


def check_files(files: Sequence[bytes], device: str, mode: str = "RGB") -> list[int]:
    """Every file gives Pillow's pixels or error; returns which of them Pillow itself had to decode."""
    with watched_pillow() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        images = decode_images(files, provider="triton", device=device, mode=mode, on_error="none")
    for number, (image, data) in enumerate(zip(images, files, strict=True)):
        expected = stock(data, mode)
        assert (image is None) == (expected is None), f"file {number}: {image if image is None else 'pixels'}"
        if expected is not None:
            different = int((image.cpu() != expected).sum())
            assert not different, f"file {number}, {tuple(expected.shape)}: {different} values differ"
    paths = {getattr(source, "path", "") for source in seen}
    return [number for number in range(len(files)) if f"bytes at position {number}" in paths]


def segments_of(file: JpegFile) -> list[tuple[int, int]]:
    """Position and length of the entropy-coded data of each piece of a file, in bytes."""
    begins = [file.scan.begin, *file.cuts[1:-1]]
    return [(begin, end - MARKER_BYTES - begin) for begin, end in zip(begins, file.cuts[1:], strict=True)]


def batch_and_tables(files: JpegFiles, boxes: np.ndarray, bits: int, *tile: TileShape) -> tuple[JpegBatch, list[Any]]:
    """A batch, and the tables of its images, segments and windows."""
    batch, tables, _ = batch_of(files, boxes, bits, *tile)
    columns = [COLUMN[f"{name}_COLUMNS"] for name in ("IMAGE", "SEGMENT", "WINDOW")]
    shapes = zip((batch.image_rows, batch.segment_rows, batch.image_rows), columns, strict=True)
    begins = [begin // 4 for begin in (batch.images, batch.segments, batch.windows)]
    return batch, [
        tables[at:][: rows * columns].reshape(rows, columns) for at, (rows, columns) in zip(begins, shapes, strict=True)
    ]
