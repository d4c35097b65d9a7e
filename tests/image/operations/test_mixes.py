"""MixUp and CutMix on batches that do not exist yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate
from torchvision.transforms import v2

import torch_sink
from image.cases import CORE, encoded, opener
from image.check import assert_same_bits, device_in_use, lazy_batch
from image.decode.test_bad_input import corrupt
from torch_sink.errors import DecodeError
from torch_sink.image.run.batch import LazyBatch

CLASSES = 7


class Photographs(torch.utils.data.Dataset):
    """Eight labeled images through torchvision's usual training pipeline."""

    def __init__(self) -> None:
        self.transform = CORE["v1 imagenet train"]()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(opener(encoded(30 + index, 40 - index, index))()), index % CLASSES


def mix(batch: list[Any]) -> Any:
    """The `collate_fn` that torchvision's documentation shows, with both transforms."""
    return v2.CutMix(num_classes=CLASSES)(*v2.MixUp(num_classes=CLASSES)(*default_collate(batch)))


def batches(workers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(5)
    loader = DataLoader(Photographs(), batch_size=4, shuffle=True, num_workers=workers, collate_fn=mix)
    return [(images.to(device_in_use()).cpu(), labels) for images, labels in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_mixes_equal_stock(workers: int) -> None:
    expected = batches(workers)
    with torch_sink.image_backend("device", device="cpu", strict=True):
        actual = batches(workers)
    for (images, labels), (stock_images, stock_labels) in zip(actual, expected, strict=True):
        assert_same_bits(images, stock_images)
        assert torch.equal(labels, stock_labels)


def test_cut_mix_of_bytes_equals_stock() -> None:
    def mixed() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(6)
        images = [CORE["v2 uint8"]()(opener(encoded(30 + index, 40 - index, index))()) for index in range(3)]
        return v2.CutMix(num_classes=CLASSES)(*default_collate([(image, index) for index, image in enumerate(images)]))

    expected, expected_labels = mixed()
    with torch_sink.image_backend("device", device="cpu", strict=True):
        images, labels = mixed()
        assert_same_bits(images.to(device_in_use()).cpu(), expected)
    assert torch.equal(labels, expected_labels)


def test_mixing_decodes_nothing() -> None:
    with torch_sink.image_backend("device", device="meta", strict=True):
        images, labels = mix([Photographs()[index] for index in range(4)])
    assert type(images) is LazyBatch
    assert [op.name for op in images.images.batch.mixes] == ["batch.mix_up", "batch.cut_mix"]
    assert labels.shape == (4, CLASSES)


def test_a_damaged_image_takes_the_one_after_it_along() -> None:
    transform = v2.Compose([v2.Resize((8, 8)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    files = [encoded(20, 20, 0), encoded(20, 20, 1), corrupt(), encoded(20, 20, 2), encoded(20, 20, 3)]
    with torch_sink.image_backend("device", device="cpu"):
        batch = lazy_batch([transform(opener(data)()) for data in files])
        mixed = v2.MixUp(num_classes=CLASSES)(batch, torch.arange(5))[0]
        with pytest.raises(DecodeError):
            mixed.__torch_sink_execute__("cpu")
        made, rows = mixed.__torch_sink_execute__("cpu", on_decode_error="skip")
    assert rows == [0, 1, 4]
    assert made.shape == (3, 3, 8, 8)
