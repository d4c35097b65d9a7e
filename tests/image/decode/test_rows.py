"""Without a device, rows of a file below the first crop are not decoded: stock's pixels, and its errors."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torchvision.datasets.folder import default_loader
from torchvision.transforms import functional as F

import torch_sink
from image.cases import encoded
from image.check import assert_same_bits
from image.jpeg_files import CONTENTS, DAMAGES, SAMPLINGS, damaged, jpeg
from torch_sink.image.decode.source import EncodedSource, encoded_source

pytestmark = pytest.mark.halved

SIZES = ((67, 83), (40, 128), (9, 33), (128, 17))


def source_of(data: bytes, mode: str | None = None) -> EncodedSource:
    source = encoded_source(data, "a file", mode)
    assert source is not None
    return source


def assert_rows(data: bytes, counts: Iterator[int] | list[int], mode: str | None = None) -> int:
    """Each count of rows is the beginning of the whole image; returns how often they were decoded alone."""
    source, alone = source_of(data, mode), 0
    whole = np.asarray(source.decode())
    for count in counts:
        image = source.decode_rows(count)
        if image is not None:
            alone += 1
            assert image.size == (source.size[0], count)
            assert image.mode == source.mode
            assert np.array_equal(np.asarray(image), whole[:count])
    return alone


@pytest.mark.parametrize("restart_blocks", [0, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rows_are_final(sampling: str, restart_blocks: int) -> None:
    wanted = alone = 0
    for seed, (size, content) in enumerate((size, content) for size in SIZES for content in CONTENTS):
        kinds = {"quality": (50, 90, 100)[seed % 3], "optimize": bool(seed % 2), "restart_blocks": restart_blocks}
        data = jpeg(*size, sampling, content=content, seed=seed, **kinds)  # type: ignore[arg-type]
        counts = [count for count in range(1, size[1]) if count * 16 < size[1] * 15]
        wanted += len(counts)
        alone += assert_rows(data, counts, "RGB" if seed % 2 else None)
    assert alone > 0.98 * wanted  # a gray row may begin with the value that marks one that was not decoded


def test_rows_of_photographs() -> None:
    folder, chance = os.environ.get("TORCH_SINK_PHOTOS"), random.Random(1)
    files = sorted(Path(folder).rglob("*.jp*g"))[:12] if folder else []
    for data in [file.read_bytes() for file in files] or [encoded(500, 375, seed) for seed in range(3)]:
        height = source_of(data).header.height
        assert assert_rows(data, [chance.randrange(1, height * 14 // 16) for _ in range(4)], "RGB") == 4


def test_only_sound_baseline_files_of_one_scan() -> None:
    plain = encoded(60, 80, 1)
    assert source_of(plain).decode_rows(40) is not None
    assert [source_of(plain).decode_rows(count) for count in (-3, 0, 79, 80, 90)] == [None] * 5
    middle = len(plain) // 2
    others = {
        "progressive": encoded(60, 80, 1, progressive=True),
        "CMYK": encoded(60, 80, 1, mode="CMYK"),
        "a marker in the scan": plain[:middle] + b"\xff\xc4\x00\x05" + plain[middle:],
        "bytes after the end": plain + b"\0\0\xff\xd9",
    }
    assert [name for name, data in others.items() if source_of(data).decode_rows(40) is not None] == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_stocks(damage: str, tmp_path: Path) -> None:
    """The same crop as in stock code, or an error where that raises one."""
    path, raised = tmp_path / "image.jpg", 0
    for seed in range(60):
        sampling = SAMPLINGS[seed % len(SAMPLINGS)]
        path.write_bytes(damaged(jpeg(50, 60, sampling, seed=seed, restart_blocks=seed % 3), damage, seed))
        results = []
        for backend in (torch_sink.image_backend("PIL"), torch_sink.image_backend("device", device="cpu")):
            with backend:
                try:
                    image = F.to_tensor(F.crop(default_loader(path), 3, 5, seed % 50 + 1, 40))
                    results.append(torch.utils.data.default_collate([image]).clone())
                except (OSError, SyntaxError, Image.DecompressionBombError, torch_sink.DecodeError):
                    results.append(None)
        raised += results[0] is None
        assert (results[0] is None) == (results[1] is None), seed
        if results[0] is not None:
            assert_same_bits(results[1], results[0])
    assert raised < 60


@pytest.mark.parametrize("kind", ["cut off", "a second table"])
def test_errors_below_the_crop_are_raised(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, path = encoded(60, 80, 1), tmp_path / "image.jpg"
    cut = data[: len(data) * 3 // 4]
    path.write_bytes(cut if kind == "cut off" else cut + b"\xff\xc4\x00\x03\x00\xff\xd9")

    def crop() -> torch.Tensor:
        return torch.utils.data.default_collate([F.to_tensor(F.crop(default_loader(path), 0, 0, 8, 60))]).clone()

    with pytest.raises(OSError, match=r"truncated|broken data stream"):
        crop()
    with torch_sink.image_backend("device", device="cpu"), pytest.raises((OSError, torch_sink.DecodeError)):
        crop()
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    expected = crop()
    with torch_sink.image_backend("device", device="cpu"):
        assert_same_bits(crop(), expected)


def test_the_image_itself_has_all_pixels() -> None:
    data = encoded(60, 80, 1)
    expected = Image.open(io.BytesIO(data)).convert("RGB")
    with torch_sink.image_backend("device", device="cpu"):
        for image in (Image.open(io.BytesIO(data)), Image.open(io.BytesIO(data)).convert("RGB")):
            cropped = image.crop((0, 0, 60, 20))
            assert cropped.tobytes() == expected.crop((0, 0, 60, 20)).tobytes()
            assert image.tobytes() == expected.tobytes()
            assert image.size == expected.size


def test_fewer_rows_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, heights = tmp_path / "image.jpg", []
    path.write_bytes(encoded(60, 80, 1))
    load = ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: heights.append(image.height) or load(image))
    with torch_sink.image_backend("device", device="cpu"):
        F.crop(default_loader(path), 10, 0, 30, 60).tobytes()
    assert heights == [40]


def test_a_header_that_pillow_cannot_read(tmp_path: Path) -> None:
    """The error names the file, as that of the whole image does."""
    path, data = tmp_path / "image.jpg", encoded(60, 50, 1)
    path.write_bytes(data[:2] + b"\xff\xee\0\7Adobe" + data[2:])
    with pytest.raises(OSError):  # noqa: PT011
        default_loader(str(path))
    with torch_sink.image_backend("device", device="cpu"):
        image = default_loader(str(path))
        with pytest.raises(OSError, match=r"image\.jpg"):
            image.crop((0, 0, 20, 20)).tobytes()
