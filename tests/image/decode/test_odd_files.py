"""Damaged and odd files: the same pixels or the same error as in stock Pillow, at the same place."""

from __future__ import annotations

import io
import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.datasets.folder import default_loader
from torchvision.transforms import functional as F

import torch_sink
from image.random_pipelines import same_value
from torch_sink.cli.photos import make_photo

pytestmark = pytest.mark.halved


def _opened(path: str, use: Callable[[Image.Image], Image.Image]) -> Image.Image:
    with Image.open(path) as image:
        return use(image)


WAYS: dict[str, Callable[[str], Any]] = {
    "loader": default_loader,
    "open": lambda path: Image.open(io.BytesIO(Path(path).read_bytes())),
    "convert": lambda path: _opened(path, lambda image: image.convert("RGB")),
    "to gray": lambda path: _opened(path, lambda image: image.convert("L")),
    "crop": lambda path: _opened(path, lambda image: F.crop(image.convert("RGB"), 0, 1, image.height // 2, 5)),
    "resize": lambda path: _opened(path, lambda image: F.resize(image.convert("RGB"), [8, 9])),
}


def _attempt(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except Exception as error:
            return error


def _pixels(image: Any) -> Any:
    if isinstance(image, Exception):
        return image
    tensor = _attempt(lambda: F.pil_to_tensor(image))
    # NumPy's memory has to be there; `clone` would record.
    return _attempt(lambda: torch.from_numpy(tensor.numpy().copy())) if isinstance(tensor, torch.Tensor) else tensor


def check_file(path: str, way: str) -> str:
    """Compares one file; returns what became of it: "pixels", "error", or "error of the scan"."""
    opened = _attempt(lambda: WAYS[way](path))
    expected = _pixels(opened)
    with torch_sink.image_backend("device", device="cpu"):
        handle = _attempt(lambda: WAYS[way](path))
        actual = _pixels(handle)
    if isinstance(expected, Exception):
        assert isinstance(actual, type(expected)), f"{way}: {actual!r} instead of {expected!r}"
        if isinstance(opened, Exception) == isinstance(handle, Exception):
            return "error"
        # Only damage behind a well-formed header and in front of the end marker may show later.
        assert isinstance(actual, torch_sink.DecodeError), f"{way}: {actual!r} instead of {opened!r} at once"
        assert way == "open" or path in str(actual)
        assert Path(path).read_bytes()[-2:] == b"\xff\xd9"
        return "error of the scan"
    if isinstance(actual, Exception):
        raise AssertionError(f"{way}: a file that stock reads") from actual
    same_value(actual, expected)
    return "pixels"


def _damaged_files() -> dict[str, bytes]:
    buffer = io.BytesIO()
    make_photo(64, 48, 1).save(buffer, "JPEG", quality=90)
    whole = buffer.getvalue()
    scan = whole.index(b"\xff\xda")
    half = len(whole) // 2
    return {
        "whole": whole,
        "empty": b"",
        "text": b"this is no image\n",
        "cut in the header": whole[:100],
        "cut at the scan": whole[: scan + 8],
        "cut in half": whole[:half],
        "without its last bytes": whole[:-2],
        "cut in half, with an end marker": whole[:half] + b"\xff\xd9",
        "zeros in the scan": whole[:half] + bytes(300) + whole[half + 300 :],
        "junk after the end": whole + b"junk",
        "two files in one": whole + whole,
        "end marker alone": b"\xff\xd8\xff\xd9",
        "no tables": whole[:2] + whole[scan:],
        "no size": whole.replace(b"\x00\x30\x00\x40", b"\x00\x00\x00\x40", 1),
        "length beyond the file": whole[:4] + b"\xff\xff" + whole[6:],
    }


@pytest.mark.parametrize("name", list(_damaged_files()))
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.sampled(40)
def test_damaged_files(tmp_path: Path, name: str, way: str) -> None:
    path = tmp_path / "file.jpg"
    path.write_bytes(_damaged_files()[name])
    outcome = check_file(str(path), way)
    assert outcome == "pixels" or name != "whole"


def _refused_by_libjpeg() -> dict[str, bytes]:
    """Complete files whose markers libjpeg stops at, in front of the first scan and behind it."""
    files = []
    for progressive in (False, True):
        buffer = io.BytesIO()
        make_photo(64, 48, 1).save(buffer, "JPEG", quality=90, progressive=progressive)
        files.append(buffer.getvalue())
    baseline, progressive_file = files
    frame, scan = (baseline.index(marker) for marker in (b"\xff\xc0", b"\xff\xda"))
    table = progressive_file.index(b"\xff\xc4")
    quantization = baseline.index(b"\xff\xdb")
    later = progressive_file.index(b"\xff\xda", progressive_file.index(b"\xff\xda") + 2)

    def changed(data: bytes, at: int, *values: int) -> bytes:
        return data[:at] + bytes(values) + data[at + len(values) :]

    return {
        "codes that do not fit": changed(progressive_file, table + 5, 3),
        "a DC symbol beyond 15": changed(progressive_file, table + 21, 16),
        "a table numbered 4": changed(progressive_file, table + 4, 4),
        "a quantization table numbered 4": changed(baseline, quantization + 4, 4),
        "a Huffman table that is not there": changed(baseline, scan + 6, 0x22),
        "a quantization table that is not there": changed(baseline, frame + 12, 3),
        "an unknown component in the scan": changed(baseline, scan + 5, 77),
        "the same component twice in the scan": changed(baseline, scan + 7, baseline[scan + 5]),
        "units of too many blocks": changed(baseline, frame + 11, 0x44),
        "a sampling factor of 0": changed(baseline, frame + 11, 0x20),
        "wider than libjpeg allows": changed(baseline, frame + 5, 0, 1, 0xFF, 0xFF),
        "a later scan beyond the spectrum": changed(progressive_file, later + 7, 1, 64),
        "a later scan of too low a bit": changed(progressive_file, later + 9, 0x0E),
        "a later scan that refines nothing": changed(progressive_file, later + 9, 0x31),
        "a later scan without its table": changed(progressive_file, later + 6, 0x03),
        "a second frame": progressive_file[:-2] + progressive_file[progressive_file.index(b"\xff\xc2") :],
    }


@pytest.mark.parametrize("name", list(_refused_by_libjpeg()))
@pytest.mark.parametrize("way", ["loader", "convert", "to gray", "resize"])
@pytest.mark.sampled(32)
def test_markers_that_libjpeg_stops_at(tmp_path: Path, name: str, way: str) -> None:
    """The error comes from the call that raises it in stock code."""
    path = tmp_path / "file.jpg"
    path.write_bytes(_refused_by_libjpeg()[name])
    assert check_file(str(path), way) == "error"


def test_an_oversized_image_is_refused_or_warned_about_as_in_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.jpg"
    make_photo(64, 48, 1).save(path)
    for limit, kind in ((64 * 48 // 3, Image.DecompressionBombError), (64 * 48 - 1, Image.DecompressionBombWarning)):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        for way in ("loader", "convert"):
            with torch_sink.image_backend("device", device="cpu"), warnings.catch_warnings():
                warnings.simplefilter("error")
                with pytest.raises(kind):
                    WAYS[way](str(path))


@pytest.mark.once_on_oldest
@pytest.mark.filterwarnings("ignore")
def test_a_collection_of_odd_files() -> None:
    """TORCH_SINK_ODD_JPEGS names a folder of odd and broken JPEG files."""
    folder = os.environ.get("TORCH_SINK_ODD_JPEGS")
    if not folder:
        pytest.skip("TORCH_SINK_ODD_JPEGS names no folder of odd JPEG files")
    files = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    assert files, f"no JPEG file in {folder}"
    outcomes = Counter(check_file(str(path), way) for path in files for way in WAYS)
    assert outcomes["pixels"] > 0
    # Markers inside the only scan of a baseline file are found when it is decoded.
    assert outcomes["error of the scan"] <= 9 * len(WAYS)
    assert sum(outcomes.values()) == len(files) * len(WAYS)


@pytest.mark.parametrize("mode", ["RGBA", "CMYK", "1", "I;16", "LA"])
def test_images_of_other_modes_are_reported(mode: str) -> None:
    image = Image.new(mode, (8, 6))
    advice = ": convert it to 'RGB' or 'L' first"
    with torch_sink.image_backend("device", device="cpu"):
        before = sum(torch_sink.fallback_report().counts.values())
        F.resize(image, [4, 4], F.InterpolationMode.NEAREST)
        assert sum(torch_sink.fallback_report().counts.values()) > before
        assert repr(mode) in str(torch_sink.fallback_report())
    with (
        torch_sink.image_backend("device", device="cpu", strict=True),
        pytest.raises(torch_sink.UnsupportedOperation, match=rf"no kernel for mode {mode!r}{advice}\)"),
    ):
        F.resize(image, [4, 4], F.InterpolationMode.NEAREST)
