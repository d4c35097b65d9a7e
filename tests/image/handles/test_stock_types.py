"""The classes of lazy images and tensors stand for the stock classes: in `isinstance`, as keys, in pickles and in `==`."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from torch import nn
from torch.utils.data import default_collate
from torchvision import tv_tensors
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.cases import array_opener, encoded

FILE, OTHER = encoded(19, 14, 3), encoded(19, 14, 4)
array = array_opener(19, 14, 3)


def opened(data: bytes = FILE) -> Image.Image:
    return Image.open(io.BytesIO(data))


def tv_image() -> torch.Tensor:
    return v2.functional.to_image(opened())


MADE: dict[str, Callable[[], Any]] = {
    "file": opened,
    "image": lambda: F.hflip(opened()),
    "array": array,
    "tensor": lambda: F.to_tensor(opened()),
    "tv_tensor": tv_image,
    "batch": lambda: default_collate([F.to_tensor(opened())] * 2),
}
OBJECTS: list[Callable[[], Any]] = [
    *MADE.values(), lambda: Image.new("L", (2, 2)), lambda: JpegImageFile(io.BytesIO(FILE)), lambda: torch.ones(2),
    lambda: nn.Parameter(torch.ones(2)), lambda: tv_tensors.Image(torch.ones(3, 4, 5)),
    lambda: tv_tensors.Mask(torch.ones(4, 5)), lambda: 1,
]  # fmt: skip
CLASSES = [object, Image.Image, ImageFile.ImageFile, JpegImageFile, torch.Tensor, tv_tensors.TVTensor, tv_tensors.Image]


def kinships(name: str) -> list[Any]:
    """How the class of what is made relates to objects, to stock classes and to itself."""
    kind = type(MADE[name]())
    of_objects = [isinstance(make(), kind) for make in OBJECTS]
    return [*of_objects, *(issubclass(each, kind) for each in CLASSES), *(issubclass(kind, each) for each in CLASSES)]


# With "meta", stacks of handles stay lazy.
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MADE)
def test_what_isinstance_says_of_a_type_is_stock_codes(name: str, device: str) -> None:
    expected = kinships(name)
    with torch_sink.image_backend("device", device=device):
        assert kinships(name) == expected


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MADE)
def test_a_type_travels_as_the_stock_type(name: str, device: str) -> None:
    stock = type(MADE[name]())
    with torch_sink.image_backend("device", device=device):
        kind = type(MADE[name]())
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            data = pickle.dumps({kind: [kind, name]}, protocol)
            assert b"torch_sink" not in data
            assert pickle.loads(data) == {stock: [stock, name]}


KEYED: dict[str, Callable[[Any], Any]] = {
    "dtypes": lambda kind: v2.ToDtype({kind: torch.float64, "others": None}),
    "fills": lambda kind: v2.RandomRotation((30, 30), fill={kind: 99, "others": 3}),
}


@pytest.mark.parametrize("name", KEYED)
def test_a_type_of_a_handle_is_a_key_for_all_of_its_kind(name: str) -> None:
    sample = [tv_image().clone(), tv_tensors.Mask(torch.ones(1, 14, 19))]
    expected = KEYED[name](tv_tensors.Image)(sample)
    with torch_sink.image_backend("device", device="cpu"):
        transform = KEYED[name](type(tv_image()))
        for image in (tv_image(), sample[0]):
            for travels in (False, True):
                used = pickle.loads(pickle.dumps(transform)) if travels else transform
                for made, stock in zip(used([image, sample[1]]), expected, strict=True):
                    assert made.dtype == stock.dtype
                    assert torch.equal(made, stock)


def test_files_are_equal_to_what_a_pickle_gives() -> None:
    def equalities() -> list[bool]:
        image, copied = opened(), pickle.loads(pickle.dumps(opened()))
        written, other, gray = opened(), opened(OTHER), opened().convert("L")
        written.info["written"] = 1
        pairs = [(image, copied), (image, opened()), (image, written), (image, other), (image, gray)]
        pairs += [(image, image.copy()), (image.copy(), image.convert("RGB")), (array(), array()), (image, 3)]
        pairs += [(F.hflip(image), F.hflip(copied)), (array().copy(), Image.fromarray(np.asarray(array())))]
        return [answer for one, two in pairs for answer in (one == two, two == one, one != two)]

    expected = equalities()
    with torch_sink.image_backend("device", device="cpu"):
        assert equalities() == expected
    assert set(expected) == {True, False}
