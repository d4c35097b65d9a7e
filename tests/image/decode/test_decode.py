"""decode_images and decode_providers: Pillow's pixels in one call, for whatever Pillow reads."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import torch_sink
from image.cases import encoded
from torch_sink import decode_images, decode_providers

FILES = [
    encoded(41, 33, 1, subsampling="4:2:0"),
    encoded(17, 11, 2, subsampling="4:4:4"),
    encoded(40, 20, 3, "L"),
    encoded(40, 20, 4, "CMYK"),
    encoded(40, 20, 5, progressive=True),
    encoded(21, 20, 6, "RGB", "PNG"),
    encoded(21, 20, 7, "P", "PNG"),
    encoded(21, 20, 8, "RGBA", "PNG"),
    encoded(21, 20, 9, "1", "PNG"),
    encoded(21, 20, 9, "I;16", "PNG"),
    encoded(21, 20, 10, "RGB", "WEBP"),
    encoded(21, 20, 11, "P", "GIF"),
    encoded(21, 20, 12, "RGB", "BMP"),
    encoded(21, 20, 13, "RGB", "TIFF"),
]


def stock(data: bytes, mode: str) -> torch.Tensor:
    pixels = np.array(Image.open(io.BytesIO(data)).convert(mode))
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pixels_are_pillows(mode: str) -> None:
    images = decode_images(FILES, mode=mode, device="cpu")
    assert len(images) == len(FILES)
    for image, data in zip(images, FILES, strict=True):
        assert image.dtype == torch.uint8
        assert image.is_contiguous()
        assert torch.equal(image, stock(data, mode))


def test_bytes_and_paths(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(FILES[0])
    for source in (FILES[0], bytearray(FILES[0]), path, str(path)):
        (image,) = decode_images([source], device="cpu")  # type: ignore[list-item]
        assert torch.equal(image, stock(FILES[0], "RGB"))
    assert decode_images([]) == []


def test_the_same_with_the_backend_on() -> None:
    with torch_sink.image_backend("device", device="cpu", strict=True):
        images = decode_images(FILES, device="cpu")
    assert all(torch.equal(image, stock(data, "RGB")) for image, data in zip(images, FILES, strict=True))


def test_broken_images(tmp_path: Path) -> None:
    path = tmp_path / "broken.jpg"
    path.write_bytes(b"no image")
    sources = [FILES[0], path, FILES[1][:200], b"", FILES[5]]
    with pytest.raises(torch_sink.DecodeError, match=r"broken\.jpg.*image 1 of its batch") as caught:
        decode_images(sources, device="cpu")
    assert (caught.value.path, caught.value.index_in_batch) == (str(path), 1)
    assert isinstance(caught.value, OSError)
    images = decode_images(sources, device="cpu", on_error="none")
    assert [image is None for image in images] == [False, True, True, True, False]
    assert torch.equal(images[0], stock(FILES[0], "RGB"))
    assert torch.equal(images[4], stock(FILES[5], "RGB"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        decode_images([tmp_path / "nowhere.jpg"])
    missing, folder = decode_images([tmp_path / "nowhere.jpg", tmp_path], on_error="none")
    assert missing is folder is None


def test_providers() -> None:
    names = decode_providers()
    assert "pillow" in names
    assert names[-1] == "pillow"
    assert len(set(names)) == len(names)
    (image,) = decode_images([FILES[0]], provider="pillow", device="cpu")
    assert torch.equal(image, stock(FILES[0], "RGB"))


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"provider 'jpeg2000' cannot be used for device 'cpu'; usable: .*'pillow'"):
        decode_images([FILES[0]], provider="jpeg2000", device="cpu")
    with pytest.raises(ValueError, match="mode must be 'RGB' or 'L', got 'CMYK'"):
        decode_images([FILES[0]], mode="CMYK")
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'none', got 'skip'"):
        decode_images([FILES[0]], on_error="skip")
    with pytest.raises(TypeError, match="got int at position 1"):
        decode_images([FILES[0], 3])  # type: ignore[list-item]


def test_a_device_that_is_not_there_is_refused_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"^device 'cuda' is not available on this machine; available: cpu$"):
        decode_images([FILES[0]], device="cuda")


def test_a_provider_that_does_not_work_here_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for use in (lambda: decode_images([FILES[0]], provider="triton"), lambda: torch_sink.set_decode_provider("triton")):
        with pytest.raises(
            ValueError, match=r"device 'cpu'; usable: \['pillow'\]; it decodes on a GPU.*TRITON_INTERPRET=1"
        ):
            use()
    with pytest.raises(ValueError, match="NVIDIA GPUs: give device='cuda'"):
        decode_images([FILES[0]], provider="nvjpeg", device="cpu")


@pytest.mark.cuda
def test_pixels_on_a_device() -> None:
    images = decode_images(FILES, device="cuda")
    for image, data in zip(images, FILES, strict=True):
        assert image.device.type == "cuda"
        assert torch.equal(image.cpu(), stock(data, "RGB"))


@pytest.mark.cuda
def test_nvjpeg_where_it_is_named() -> None:
    images = decode_images(FILES, device="cuda", provider="nvjpeg")
    for image, data in zip(images, FILES, strict=True):
        difference = (image.cpu().int() - stock(data, "RGB").int()).abs().float().mean().item()
        assert difference < 2.0
