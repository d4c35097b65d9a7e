"""Mistakes raise what they raise in stock code, word for word: no message names a class of torch_sink."""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import default_collate
from torchvision import transforms as T
from torchvision.datasets.folder import default_loader
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.handles.tensor import LazyTensor, LazyTVImage

Step = Callable[[Any], Any]
HALF = [0.5] * 3
# Each is applied to the image of a JPEG file, one step after the other; the last one raises.
MISTAKES: dict[str, list[Step]] = {
    "ToTensor twice": [T.ToTensor(), T.ToTensor()],
    "ToTensor twice, behind RandomApply": [T.RandomApply([T.ToTensor()], p=1.0), T.ToTensor()],
    "ToTensor behind ToImage": [v2.ToImage(), T.ToTensor()],
    "PILToTensor of a tensor": [T.ToTensor(), T.PILToTensor()],
    "pil_to_tensor of a tensor": [T.ToTensor(), v2.functional.pil_to_tensor],
    "ToTensor of five crops": [T.FiveCrop(20), T.ToTensor()],
    "ToPILImage of an image": [T.ToPILImage()],
    "ToPILImage of a batch": [T.ToTensor(), lambda x: x[None], T.ToPILImage()],
    "ToPILImage of five channels": [T.ToTensor(), lambda x: x.repeat(2, 1, 1), T.ToPILImage()],
    "Normalize before ToTensor": [T.Normalize(HALF, HALF)],
    "v2 Normalize before ToImage": [v2.Normalize(HALF, HALF)],
    "normalize of an image": [lambda x: v2.functional.normalize(x, HALF, HALF)],
    "to_dtype of an image": [lambda x: v2.functional.to_dtype(x, torch.float32)],
    "Normalize of bytes": [T.PILToTensor(), T.Normalize(HALF, HALF)],
    "Normalize with four means": [v2.ToImage(), v2.ToDtype(torch.float32, True), v2.Normalize([0.5] * 4, [0.5] * 4)],
    "RandomErasing before ToTensor": [T.RandomErasing(p=1.0)],
    "erase of an image": [lambda x: F.erase(x, 1, 1, 1, 1, torch.zeros(1))],
    "resize of a list": [lambda x: v2.functional.resize([x], 1)],
    "resize to a word": [lambda x: F.resize(x, "20")],
    "crop with a word": [lambda x: F.crop(x, "a", 1, 1, 1)],
    "crop larger than the image": [T.RandomCrop(100)],
    "two gray channels": [T.Grayscale(2)],
    "attribute of an image": [lambda x: x.shape],
    "attribute of a tensor": [T.ToTensor(), lambda x: x.convert("RGB")],
    "image plus number": [lambda x: x + 1],
    "number plus image": [lambda x: 1 + x],
    "image divided": [lambda x: x / 255.0],
    "image subscripted": [lambda x: x[0]],
    "len of an image": [len],
    "iter of an image": [iter],
    "image called": [lambda x: x()],
    "tensor called": [T.ToTensor(), lambda x: x()],
    "tensor plus image": [lambda x: T.ToTensor()(x) + x],
    "tensor plus text": [T.ToTensor(), lambda x: x + "a"],
    "torch.tensor": [torch.tensor],
    "torch.from_numpy": [torch.from_numpy],
    "torch.stack": [lambda x: torch.stack([x, x])],
    "torch.mean": [torch.mean],
    "convolution": [lambda x: torch.nn.Conv2d(3, 3, 3)(x)],
    "fromarray of a tensor": [T.ToTensor(), Image.fromarray],
    "ImageOps of a tensor": [T.ToTensor(), ImageOps.flip],
    "size assigned": [lambda x: setattr(x, "size", (1, 1))],
    "open of an image": [Image.open],
    "open of a tensor": [T.ToTensor(), open],
    "attribute of a batch": [T.ToTensor(), lambda x: default_collate([x, x]).no_such_thing],
    "attribute of a stack": [T.ToTensor(), lambda x: torch.stack([x, x]).no_such_thing],
}


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    path = tmp_path_factory.mktemp("photos") / "photo.jpg"
    Image.fromarray(pixels).save(path)
    return path


def error_of(steps: list[Step], value: Any) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011, PT012  which one, and where, is what is compared
        for step in steps:
            value = step(value)
    return re.sub("0x[0-9A-Fa-f]+", "0x", f"{type(caught.value).__name__}: {caught.value}")


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.sampled(30)
def test_message_is_that_of_stock_code(mistake: str, photo: Path) -> None:
    stock = error_of(MISTAKES[mistake], default_loader(str(photo)))
    with torch_sink.image_backend("device"):
        image = default_loader(str(photo))
        assert type(image) is LazyImage
        assert error_of(MISTAKES[mistake], image) == stock


def test_types_print_as_stock_types(photo: Path) -> None:
    def types() -> list[str]:
        with Image.open(photo) as opened:
            image = default_loader(str(photo))
            tensor = T.ToTensor()(image)
            made = [opened, image, tensor, v2.ToImage()(image), default_collate([tensor]), torch.stack([tensor])]
            return [str(type(each)) for each in made]

    stock = types()
    with torch_sink.image_backend("device"):
        assert types() == stock


@pytest.mark.parametrize("make", [lambda image: image, T.ToTensor(), v2.ToImage()], ids=["image", "tensor", "tv image"])
def test_pickles_find_the_class_behind_the_name(make: Step, photo: Path) -> None:
    with torch_sink.image_backend("device"):
        handle = make(default_loader(str(photo)))
        again = pickle.loads(pickle.dumps(handle))
        assert type(again) is type(handle)
        assert type(again) in (LazyImage, LazyTensor, LazyTVImage)
        assert np.array_equal(np.asarray(again), np.asarray(handle))


def test_the_report_names_the_dtype_that_has_no_kernel_and_the_attribute_that_is_set(photo: Path) -> None:
    with torch_sink.image_backend("device"):
        F.convert_image_dtype(T.ToTensor()(default_loader(str(photo))), torch.float64)
        T.ToTensor()(default_loader(str(photo))).requires_grad = True
        report = str(torch_sink.fallback_report())
    assert "no kernel for torch.float32 tensors that become torch.float64 " in report
    assert "torch: requires_grad = ..." in report


WAYS: dict[str, Callable[[Any], Any]] = {
    "==": lambda x: x == torch.ones(x.shape),
    "/": lambda x: 3 / x,
    "sub": lambda x: torch.ones(x.shape) - x,
    "|": lambda x: x | torch.ones(x.shape, dtype=x.dtype),
    "&": lambda x: x & torch.ones(x.shape, dtype=x.dtype),
    "x[...]": lambda x: x[0, 0, 0],
    "x[...] = ...": lambda x: x.__setitem__((0, 0, 0), 1),
    "mul": lambda x: torch.ops.aten.mul.Tensor(x, x),
    "grad": lambda x: x.grad,
    "grad = ...": lambda x: setattr(x, "grad", None),
    "bool": bool,
    "numpy.asarray": np.asarray,
    "sum": torch.sum,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_report_writes_what_a_program_writes(photo: Path, way: str) -> None:
    with torch_sink.image_backend("device"):
        with contextlib.suppress(RuntimeError):  # it has many values
            WAYS[way](T.PILToTensor()(default_loader(str(photo))))
        assert {operation for operation, _ in torch_sink.fallback_report().counts} == {f"torch: {way}"}
