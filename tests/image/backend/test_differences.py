"""What differs from stock torchvision, as docs/image_backend.md lists it: a row that is no longer true can go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.transforms import functional

import torch_sink
from torch_sink.cli.photos import make_photo

pytestmark = pytest.mark.once

REPLACED = (
    lambda: functional.to_tensor,
    lambda: v1.RandomResizedCrop.get_params,
    lambda: vars(v1.ColorJitter)["forward"],
)


def of_a_file(path: Path) -> dict[str, Any]:
    """What a program sees that asks for exact types, and whose file is emptied after it was opened."""
    make_photo(2000, 1500, seed=1).save(path)  # more than Python reads ahead
    cropped = v1.CenterCrop(20)(Image.open(path))
    tensor = v1.ToTensor()(v1.CenterCrop(20)(Image.open(path)))
    seen = {
        "exact image": type(cropped) is Image.Image,
        "exact tensor": type(tensor) is torch.Tensor,
        "kinds": (isinstance(cropped, Image.Image), isinstance(tensor, torch.Tensor)),
    }
    seen["values"] = (cropped.getpixel((3, 3)), tensor.sum().item())
    seen["exact tensor of values"] = type(tensor) is torch.Tensor
    with Image.open(path) as opened:
        path.write_bytes(b"")
        try:
            return {**seen, "emptied later": opened.getpixel((3, 3))}
        except OSError:
            return {**seen, "emptied later": None}


def test_types_and_files(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    stock = of_a_file(path)
    with torch_sink.image_backend("device", device="cpu"):
        found = of_a_file(path)
    different = {"exact image", "exact tensor", "emptied later"}
    assert {name for name in stock if found[name] != stock[name]} == different
    assert (stock["exact image"], found["exact image"]) == (True, False)
    assert (stock["exact tensor"], found["exact tensor"]) == (True, False)
    assert stock["emptied later"] is None


def test_functions_that_are_replaced() -> None:
    before = [function() for function in REPLACED]
    with torch_sink.image_backend("device", device="cpu"):
        assert not any(now() is stock for now, stock in zip(REPLACED, before, strict=True))
    assert all(now() is stock for now, stock in zip(REPLACED, before, strict=True))


def of_a_gray_tensor() -> list[Any]:
    """What an image shares with the gray tensor that it was made of."""
    photo = make_photo(40, 30, seed=1).convert("L")
    photo.putpixel((5, 5), 3)
    tensor = functional.pil_to_tensor(photo)
    image, written = functional.to_pil_image(tensor), functional.to_pil_image(tensor)
    tensor.fill_(7)
    try:
        written.load()[5, 5] = 9  # type: ignore[index]
    except ValueError as error:
        return [image.getpixel((5, 5)), str(error)]
    return [image.getpixel((5, 5)), written.getpixel((5, 5))]


def test_images_of_gray_tensors() -> None:
    assert of_a_gray_tensor() == [7, "image is readonly"]
    with torch_sink.image_backend("device", device="cpu"):
        assert of_a_gray_tensor() == [3, 9]


class Labeled(torch.utils.data.Dataset[Any]):
    def __init__(self, path: Path) -> None:
        self.path, self.transform = path, v1.Compose([v1.CenterCrop(20), v1.ToTensor()])

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self.transform(Image.open(self.path)), index


def test_small_tensors_of_a_batch(tmp_path: Path) -> None:
    make_photo(40, 30, seed=1).save(tmp_path / "photo.jpg")

    def is_shared() -> bool:
        ((_, labels),) = DataLoader(Labeled(tmp_path / "photo.jpg"), 2, num_workers=1)
        return bool(labels.is_shared())

    assert is_shared()
    with torch_sink.image_backend("device"):
        assert not is_shared()
