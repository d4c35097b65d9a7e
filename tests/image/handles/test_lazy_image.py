"""LazyImage: a Pillow image to whoever asks, and nothing is decoded before somebody does."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import joblib
import numpy as np
import pytest
import torch
import warm
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps, ImageTransform
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor
from torchvision import transforms
from torchvision.datasets.folder import default_loader
from torchvision.transforms import functional as F
from torchvision.transforms.functional import hflip, resize

import torch_sink
from image.cases import array_opener, encoded
from torch_sink.image.handles.file import LazyJpegImageFile
from torch_sink.image.handles.image import LazyImage, LazyPixels, lazy_image

pytestmark = pytest.mark.halved


@pytest.fixture(params=["RGB", "L"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    file = tmp_path / "photo.jpg"
    file.write_bytes(encoded(53, 37, 4, request.param, quality=92))
    return file


@pytest.fixture
def active() -> Iterator[None]:
    with torch_sink.image_backend("device", device="cpu"):
        yield


def opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert(image.mode)


def stock_and_lazy(path: Path, function: Callable[[Image.Image], Any]) -> tuple[Any, Any]:
    """What a function gives for a stock image, and for a handle with some calls recorded."""
    results = []
    for name, settings in (("PIL", {}), ("device", {"device": "cpu"})):
        with torch_sink.image_backend(name, **settings):
            image = opened(path).crop((3, 2, 50, 36)).resize((31, 22))
            assert (type(image) is LazyImage) == (name == "device")
            results.append(function(image))
    return results[0], results[1]


def drawn(image: Image.Image) -> bytes:
    ImageDraw.Draw(image).line((0, 0, 20, 20), fill=255)
    return image.tobytes()


def thumbnail(image: Image.Image) -> tuple[Any, bytes]:
    image.thumbnail((9, 9))
    return image.size, image.tobytes()


def pasted(image: Image.Image) -> bytes:
    image.paste(image.crop((0, 0, 4, 4)), (5, 5))
    image.putpixel((1, 1), 7 if image.mode == "L" else (7, 8, 9))
    return image.tobytes()


def saved(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


ACCESS: dict[str, Callable[[Image.Image], Any]] = {
    "metadata": lambda image: (image.size, image.width, image.height, image.mode, image.getbands(), image.format),
    "asarray": lambda image: np.asarray(image).tolist(),
    "array": lambda image: np.array(image).tolist(),
    "array interface": lambda image: sorted(image.__array_interface__),
    "getpixel": lambda image: image.getpixel((3, 4)),
    "getbbox": lambda image: image.getbbox(),
    "getextrema": lambda image: image.getextrema(),
    "histogram": lambda image: image.histogram(),
    "load": lambda image: image.load()[2, 3],
    "filter": lambda image: image.filter(ImageFilter.GaussianBlur(2)).tobytes(),
    "point": lambda image: image.point(lambda value: 255 - value).tobytes(),
    "split": lambda image: [band.tobytes() for band in image.split()],
    "quantize": lambda image: image.convert("RGB").quantize(8).tobytes(),
    "draw": drawn,
    "thumbnail": thumbnail,
    "paste": pasted,
    "save": saved,
    "ops": lambda image: ImageOps.mirror(ImageOps.expand(image, 2)).tobytes(),
    "enhance": lambda image: ImageEnhance.Contrast(image).enhance(1.7).tobytes(),
    "exif transpose": lambda image: ImageOps.exif_transpose(image).tobytes(),
    "every transpose": lambda image: [image.transpose(method).tobytes() for method in Image.Transpose],
    "rotations": lambda image: [image.rotate(angle, expand=angle > 90).tobytes() for angle in (0, 33, 90, 180, 270)],
    "crop outside": lambda image: image.crop((-5, -6, 50, 60)).tobytes(),
    "crop of floats": lambda image: image.crop((0.6, 1.5, 7.5, 8.4)).tobytes(),
    "empty crop": lambda image: image.crop((4, 4, 4, 9)).size,
    "crop, a list": lambda image: image.crop([1, 2, 9, 9]).tobytes(),
    "crop of everything": lambda image: image.crop().tobytes(),
    "resize, reducing gap": lambda image: image.resize((5, 4), Image.Resampling.BICUBIC, reducing_gap=1.5).tobytes(),
    "resize, box": lambda image: image.resize((5, 4), box=(1, 2, 20, 20)).tobytes(),
    "resize, default filter": lambda image: image.resize((14, 50)).tobytes(),
    "resize, same size": lambda image: image.resize(image.size).tobytes(),
    "resize, list": lambda image: image.resize([8, 9]).tobytes(),
    "resize, numpy": lambda image: image.resize((np.int64(8), np.int64(9))).tobytes(),
    "reduce": lambda image: image.reduce(3).tobytes(),
    "transform": lambda image: image.transform((9, 8), Image.AFFINE, (1, 0.2, 0, 0.1, 1, 0), Image.BICUBIC).tobytes(),
    "mesh": lambda image: image.transform((9, 8), Image.QUAD, (0, 0, 0, 9, 9, 9, 9, 0)).tobytes(),
    "convert": lambda image: [image.convert(mode).tobytes() for mode in ("L", "RGB", "RGBA", "CMYK", "1", "HSV", "F")],
    "convert, default": lambda image: image.convert().tobytes(),
    "convert, palette": lambda image: image.convert("P", palette=Image.ADAPTIVE, colors=5).tobytes(),
    "pickle": lambda image: pickle.loads(pickle.dumps(image)).tobytes(),
    "pickle, read": lambda image: (image.load(), pickle.loads(pickle.dumps(image)).tobytes())[1],
    "copy": lambda image: [copy.copy(image).tobytes(), copy.deepcopy(image).tobytes(), image.copy().tobytes()],
    "equality": lambda image: (image == image.copy(), image == image.transpose(0), image != image.copy()),
    "context manager": lambda image: image.__enter__().tobytes(),
    "info": lambda image: sorted(map(str, image.info)),
    "exif": lambda image: dict(image.getexif()),
    "blend": lambda image: Image.blend(image, image.transpose(0), 0.3).tobytes(),
    "merge": lambda image: Image.merge("RGB", [image.convert("L")] * 3).tobytes(),
    "composite": lambda image: Image.composite(image, image.transpose(1), image.convert("L")).tobytes(),
    "alpha": lambda image: (image.putalpha(100), image.mode, image.tobytes())[1:],
    "entropy": lambda image: image.entropy(),
    "repr": lambda image: len(image._repr_png_()) > 0,
    "tensor": lambda image: F.pil_to_tensor(image).tolist(),
}


@pytest.mark.parametrize("name", ACCESS)
@pytest.mark.sampled(50)
def test_access_gives_what_pillow_gives(path: Path, name: str) -> None:
    stock, lazy = stock_and_lazy(path, ACCESS[name])
    assert lazy == stock


REFUSED: dict[str, Callable[[Image.Image], Any]] = {
    "crop turned round": lambda image: image.crop((9, 9, 3, 3)),
    "resize to nothing": lambda image: image.resize((0, 4)),
    "resize, unknown filter": lambda image: image.resize((4, 4), 99),
    "resize, reducing gap": lambda image: image.resize((4, 4), reducing_gap=0.5),
    "resize, floats": lambda image: image.resize((4.5, 4)),
    "crop, an array": lambda image: image.crop(np.array([1, 2, 9, 9])),
    "transpose, a list": lambda image: image.transpose([1]),
    "transform, one side": lambda image: image.transform((20,), Image.Transform.AFFINE, (1, 0, 0, 0, 1, 0)),
    "transform, a list": lambda image: image.transform((9, 8), [0], (1, 0, 0, 0, 1, 0)),
    "convert": lambda image: image.convert("no mode"),
    "getpixel": lambda image: image.getpixel((1000, 0)),
    "attribute": lambda image: image.no_such_thing,
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_pillows(path: Path, name: str) -> None:
    def error(image: Image.Image) -> tuple[type, str]:
        with pytest.raises(Exception) as caught:  # noqa: PT011  which one is what is compared
            REFUSED[name](image)
        return type(caught.value), str(caught.value)

    stock, lazy = stock_and_lazy(path, error)
    assert lazy == stock


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """A device of another process makes the pixels."""
    with torch_sink.image_backend("device", device="meta"):
        yield


def test_nothing_is_decoded_by_recording(path: Path, elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(image: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(JpegImageFile, "load", refuse)
    handle = default_loader(str(path))
    assert (handle.size, handle.mode, handle.getbands()) == ((53, 37), "RGB", ("R", "G", "B"))
    for record in (F.hflip, F.vflip, lambda image: F.resize(image, 20), lambda image: F.pad(image, 3), F.to_tensor):
        handle = record(handle)
    assert handle.is_recording
    with Image.open(path) as image:
        assert image.convert("RGB").is_recording
        assert F.hflip(image).is_recording
        assert (image.size, image.format) == ((53, 37), "JPEG")


def test_functionals_bound_early_record(path: Path, active: None) -> None:
    handle = hflip(resize(default_loader(str(path)), [8, 9]))
    assert type(handle) is LazyImage
    assert handle.is_recording


def test_later_writes_are_not_seen_by_earlier_handles(path: Path) -> None:
    def write_after_recording(image: Image.Image) -> list[bytes]:
        turned, copied, same = F.hflip(image), image.copy(), image
        image.paste(9 if image.mode == "L" else (9, 9, 9), (0, 0, 20, 20))
        again = F.hflip(image)
        copied.putpixel((0, 0), 3 if image.mode == "L" else (1, 2, 3))
        return [turned.tobytes(), copied.tobytes(), same.tobytes(), again.tobytes(), image.tobytes()]

    stock, lazy = stock_and_lazy(path, write_after_recording)
    assert lazy == stock


def test_writes_to_a_plain_image_are_not_seen_either(active: None) -> None:
    image = array_opener(12, 10)()
    before = image.transpose(Image.FLIP_LEFT_RIGHT).tobytes()
    handle = F.hflip(image)
    assert type(handle) is LazyImage
    image.paste((0, 0, 0), (0, 0, 12, 10))
    assert handle.tobytes() == before


def test_where_stock_returns_the_same_object_so_do_we(path: Path, active: None) -> None:
    handle = default_loader(str(path))
    assert lazy_image(handle) is handle
    assert F.resize(handle, [37, 53]) is handle
    assert handle.copy() is not handle
    gray = handle.convert("L")
    assert F.adjust_hue(gray, 0.1) is gray


def test_comparing_with_what_is_no_such_image_reads_no_pixels(path: Path, active: None) -> None:
    handle = opened(path)
    others: list[Any] = [None, "photo", [handle.size], Image.open(path)]
    assert handle not in others
    assert handle.is_recording  # type: ignore[attr-defined]
    assert not torch_sink.fallback_report()


def test_an_opened_file_stays_what_it_is(path: Path) -> None:
    with torch_sink.image_backend("PIL"), Image.open(path) as stock:
        info, pixels, mode = dict(stock.info), stock.tobytes(), stock.mode
        stock_draft = stock.draft("L", (10, 10))
    with torch_sink.image_backend("device", device="cpu"):
        with Image.open(path) as image:
            assert isinstance(image, JpegImageFile)
            assert type(image) is LazyJpegImageFile
            assert (image.format, image.mode, image.size, image.info) == ("JPEG", mode, (53, 37), info)
            assert image.filename == str(path)
            assert image.tobytes() == pixels
            assert image.draft("L", (10, 10)) == stock_draft
        with Image.open(path) as image:
            image.verify()
        with Image.open(path) as image:
            image.draft(mode, (20, 15))
            drafted = image.convert(mode)
    with torch_sink.image_backend("PIL"), Image.open(path) as stock:
        stock.draft(mode, (20, 15))
        assert drafted.tobytes() == stock.convert(mode).tobytes()


def test_a_file_opened_by_the_user_is_left_open(path: Path, active: None) -> None:
    with path.open("rb") as file:
        image = Image.open(file)
        handle = image.convert("RGB")
        assert not file.closed
    assert handle.tobytes()


def test_no_file_stays_open(path: Path, active: None) -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept = []
    for _ in range(50):
        kept.append(Image.open(path))
        kept.append(kept[-1].convert("RGB"))
        kept.append(default_loader(str(path)))
    assert len(os.listdir("/proc/self/fd")) == before


TRANSFORMS: dict[str, tuple[Any, ...]] = {
    "affine": (Image.Transform.AFFINE, (1, 0.1, 2, 0, 1, 3)),
    "extent": (Image.Transform.EXTENT, (0, 0, 5, 5)),
    "quad": (Image.Transform.QUAD, (0, 0, 0, 5, 5, 5, 5, 0)),
    "perspective": (Image.Transform.PERSPECTIVE, (1, 0.1, 2, 0, 1, 3, 0.01, 0.01)),
    "mesh": (Image.Transform.MESH, [((0, 0, 5, 5), (0, 0, 0, 5, 5, 5, 5, 0))]),
    "object": (ImageTransform.AffineTransform((1, 0.1, 2, 0, 1, 3)),),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_by_every_method(path: Path, name: str) -> None:
    stock, lazy = stock_and_lazy(path, lambda image: image.transform((9, 8), *TRANSFORMS[name]).tobytes())
    assert lazy == stock


TO_TENSOR = transforms.ToTensor()  # which looks its function up when it is called


@pytest.mark.parametrize("use", [TO_TENSOR, lambda image: image.load(), lambda image: image.convert("RGB")])
def test_a_verified_file_has_to_be_opened_again(path: Path, use: Callable[[Image.Image], Any]) -> None:
    def error() -> tuple[type, str]:
        image = Image.open(path)
        image.verify()
        with pytest.raises(Exception) as caught:  # noqa: PT011  which one is what is compared
            use(image)
        return type(caught.value), str(caught.value)

    stock = error()
    with torch_sink.image_backend("device", device="cpu"):
        assert error() == stock


@pytest.mark.parametrize("pickled", [joblib.hash, lambda image: pickle.dumps(image, protocol=2)])
def test_an_open_file_is_used_after_it_was_pickled(path: Path, pickled: Callable[[Image.Image], Any]) -> None:
    def used(image: Image.Image) -> Tensor:
        pickled(image)
        return TO_TENSOR(image)

    stock = used(Image.open(path))
    with torch_sink.image_backend("device", device="cpu"):
        image = Image.open(path)
        assert type(image) is LazyJpegImageFile
        assert torch.equal(used(image), stock)


def test_what_replaced_image_open_earlier_reaches_the_default_loader(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(encoded(30, 20, 1))
    program = f"""
import functools, PIL.Image
from torchvision.datasets.folder import default_loader
stock = PIL.Image.open
PIL.Image.open = functools.wraps(stock)(lambda *args: stock(*args).resize((7, 5)))
import torch_sink
torch_sink.set_image_backend("device", device="cpu")
print(default_loader({str(path)!r}).size)
"""
    assert warm.run("-c", program, timeout=300).stdout == "(7, 5)\n"


OPENED: dict[str, Callable[[Path], Image.Image]] = {
    "opened": Image.open,
    "loaded": opened,
    "default loader": lambda path: default_loader(str(path)),
    "recorded on": lambda path: resize(hflip(default_loader(str(path))), [9, 8]),
}


@pytest.mark.parametrize("protocol", [0, 2, 3])
@pytest.mark.parametrize("name", OPENED)
def test_pickles_for_other_programs_are_those_of_stock_images(path: Path, name: str, protocol: int) -> None:
    """Those that `torch.save` writes, and that joblib takes hashes of."""
    with torch_sink.image_backend("PIL"):
        stock = OPENED[name](path)
        expected = pickle.dumps(stock, protocol), joblib.hash({"image": stock})
    with torch_sink.image_backend("device", device="cpu"):
        image = OPENED[name](path)
        assert isinstance(image, LazyPixels)
        assert joblib.hash({"image": image}) == expected[1]
        assert pickle.dumps(OPENED[name](path), protocol) == expected[0]


def test_what_replaces_image_open_reaches_the_default_loader(path: Path, active: None) -> None:
    assert type(default_loader(str(path))) is LazyImage
    with mock.patch("PIL.Image.open", return_value=Image.new("RGB", (7, 5))):
        assert default_loader(str(path)).size == (7, 5)
    assert type(default_loader(str(path))) is LazyImage
