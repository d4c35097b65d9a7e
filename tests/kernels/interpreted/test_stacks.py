"""Stacks of views, through the kernels."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from image.check import assert_same_bits, device_in_use
from image.decode.test_bad_input import corrupt
from image.run.test_stacks import TRANSFORMS, check_transform, folder, loader  # noqa: F401
from torchvision.datasets import ImageFolder

import torch_sink

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(folder: Path, name: str) -> None:  # noqa: F811
    check_transform(folder, name, workers=1)


def test_a_damaged_file_loses_its_sample_in_the_loader(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    transform = TRANSFORMS["as torchvision's docs write it"]
    expected = {index: ImageFolder(str(folder), transform)[index] for index in (0, 2)}
    shutil.copytree(folder, tmp_path / "images")
    damaged = ImageFolder(str(folder)).samples[1][0]
    (tmp_path / "images" / Path(damaged).relative_to(folder)).write_bytes(corrupt())
    with (
        torch_sink.image_backend("device", device=device_in_use()),
        torch_sink.SinkLoader(loader(tmp_path / "images", transform, 1), on_decode_error="skip") as batches,
    ):
        made = [(image.cpu(), label) for images, labels in batches for image, label in zip(images, labels, strict=True)]
    assert [label.item() for _, label in made] == [label for _, label in expected.values()]
    for (image, _), (stock, _) in zip(made, expected.values(), strict=True):
        assert_same_bits(image, stock)
