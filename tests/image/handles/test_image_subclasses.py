"""Images of a user's own class, as fastai's `PILImage`: stock code, stock types and stock pixels."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import functional as F1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F2

import torch_sink
from image.cases import encoded
from image.check import assert_same_bits
from torch_sink import fallback_report
from torch_sink.image.handles.array import ArrayImage
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.handles.tensor import Handle

FILE = encoded(40, 30, 3)


class Photo(Image.Image):
    """Made by a cast of an image, and remembers what it is."""

    label = "photo"

    @classmethod
    def cast(cls, image: Image.Image) -> Photo:
        image.__class__ = cls
        return image  # type: ignore[return-value]

    def upside_down(self) -> Photo:
        return Photo.cast(self.transpose(Image.Transpose.FLIP_TOP_BOTTOM))


class Resized(Photo):
    """Has a method of its own in the place of one of Pillow's."""

    def resize(self, *args: Any, **kwargs: Any) -> Resized:
        return Resized.cast(super().resize(*args, **kwargs))


def opened() -> Image.Image:
    return Image.open(io.BytesIO(FILE)).convert("RGB")


def loaded() -> Image.Image:
    image = Image.open(io.BytesIO(FILE))
    image.load()
    return image


def transformed() -> Image.Image:
    return v1.Pad(3)(v1.CenterCrop(20)(opened()))


def retain_type(result: Image.Image, argument: Image.Image) -> Image.Image:
    """What fastai does with the result of each of its transforms."""
    if isinstance(argument, type(result)):
        result.__class__ = type(argument)
    return result


CALLS: dict[str, Callable[[Any], Any]] = {
    "resize": lambda image: F1.resize(image, [12, 9]),
    "pad": lambda image: F1.pad(image, [2, 3]),
    "hflip": F1.hflip,
    "crop": lambda image: F2.crop(image, 1, 2, 8, 9),
    "center_crop": lambda image: F2.center_crop(image, [50, 10]),
    "rotate": lambda image: F2.rotate(image, 20),
    "brightness": lambda image: F1.adjust_brightness(image, 1.5),
    "saturation": lambda image: F2.adjust_saturation(image, 1.5),
    "invert": F2.invert,
    "blur": lambda image: F2.gaussian_blur(image, [3, 3]),
    "to_tensor": lambda image: F1.to_tensor(image),
    "pil_to_tensor": lambda image: F1.pil_to_tensor(image),
    "to_image": lambda image: F2.to_image(image),
    "tv_image": lambda image: tv_tensors.Image(image),
    "method": lambda image: image.upside_down(),
    "Pillow's own": ImageOps.mirror,
    "crop and pad": lambda image: retain_type(F1.pad(image.crop((2, 2, 9, 9)), [1, 1]), image),
    "v2 pipeline": v2.Compose([v2.Resize(20), v2.CenterCrop(16), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]),
}


def assert_same(made: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert_same_bits(made.materialize() if isinstance(made, Handle) else made, expected)
        return
    own = (LazyImage, ArrayImage) if type(expected) is Image.Image else ()
    assert type(made) in (type(expected), *own)
    assert (made.mode, made.size, made.tobytes()) == (expected.mode, expected.size, expected.tobytes())


@pytest.mark.parametrize("kind", [Photo, Resized])
@pytest.mark.parametrize("call", CALLS)
def test_functionals_run_in_stock_code(call: str, kind: type[Photo]) -> None:
    expected = CALLS[call](kind.cast(opened()))
    with torch_sink.image_backend("device", device="cpu"):
        made = CALLS[call](kind.cast(opened()))
        if call not in ("method", "crop and pad", "Pillow's own"):
            assert type(made) is not LazyImage
            assert f"{__name__}.{kind.__name__} is a class of its own" in str(fallback_report())
        assert_same(made, expected)


@pytest.mark.parametrize("source", [opened, loaded, transformed])
def test_a_handle_can_be_cast(source: Callable[[], Image.Image]) -> None:
    expected = Photo.cast(source())
    with torch_sink.image_backend("device", device="cpu"):
        photo = Photo.cast(source())
        assert type(photo) is Photo
        assert photo.label == "photo"
        assert_same(photo, expected)
        assert_same(photo.upside_down(), expected.upside_down())
        for twin in (copy.deepcopy(photo), pickle.loads(pickle.dumps(photo)), photo.copy()):
            assert_same(twin, expected if type(twin) is Photo else Image.Image.copy(expected))
    assert set(vars(photo)) <= set(vars(expected)) | {"info"}


def test_handles_count_as_the_stock_class() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        handle = opened()
        assert type(handle) is LazyImage
        photo = Photo.cast(opened())
        assert isinstance(photo, type(handle))
        assert issubclass(Photo, type(handle))
        assert isinstance(handle, Image.Image)
        assert not isinstance(handle, Photo)
        assert not isinstance("handle", type(handle))


def test_strict_names_the_class() -> None:
    photo = Photo.cast(opened())
    with (
        torch_sink.image_backend("device", device="cpu", strict=True),
        pytest.raises(torch_sink.UnsupportedOperation, match=r"test_image_subclasses\.Photo is a class of its own"),
    ):
        F1.hflip(photo)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF"])
def test_pillows_own_classes_record(kind: str) -> None:
    file = encoded(20, 10, 1, kind=kind)
    with torch_sink.image_backend("device", device="cpu"):
        image = Image.open(io.BytesIO(file))
        if kind == "GIF":
            image = image.convert("RGB")
        assert type(F1.hflip(image)) is LazyImage
        assert not fallback_report()
