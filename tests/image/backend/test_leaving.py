"""On a machine without a device, what leaves a worker is ordinary, and its pixels were made there."""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import os
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchvision import transforms as v1
from torchvision.transforms import v2

import torch_sink
from image.cases import array_opener, encoded
from image.check import assert_same_bits
from torch_sink.image.core.ops import STOCK
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.handles.file import LazyJpegImageFile
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.handles.tensor import HANDLES, LazyTensor
from torch_sink.image.run.batch import LazyBatch

pytestmark = [
    pytest.mark.halved,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's use of torch
]

LAZY = (LazyImage, LazyJpegImageFile, LazyBatch, *HANDLES)
Pair = namedtuple("Pair", ["image", "index"])

TRANSFORMS: dict[str, Callable[[Image.Image], Any]] = {
    "tensor": v1.Compose([v1.Resize(12), v1.CenterCrop(8), v1.ToTensor()]),
    "tv_tensor": v2.Compose([v2.Resize((9, 8)), v2.ToImage()]),
    "image": v1.Resize(12),
    "file": lambda image: image,
}


class Photos(Dataset[Any]):
    def __init__(self, transform: str) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.open(io.BytesIO(encoded(20 + index, 16, index)))
        return TRANSFORMS[self.transform](image), index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        photos = Photos("tensor")
        return (photos[index] for index in range(4))


@dataclasses.dataclass
class Sample:
    image: Any
    index: int


class Batch:
    """A batch of the user's own class, as detection libraries have it."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = [Sample(*sample) for sample in samples]


class Slotted:
    """Pickles what no walk would find."""

    __slots__ = ("image",)

    def __init__(self, image: Any) -> None:
        self.image = image

    def __reduce__(self) -> Any:
        return Slotted, (self.image,)


COLLATES: dict[str, Callable[[list[Any]], Any]] = {
    "zip": lambda batch: tuple(zip(*batch, strict=True)),
    "list": lambda batch: batch,
    "dict": lambda batch: {"images": [image for image, _ in batch], "more": {"first": batch[0][0]}},
    "named tuples": lambda batch: [Pair(*sample) for sample in batch],
    "dataclasses": lambda batch: [Sample(*sample) for sample in batch],
    "object": Batch,
    "slots": lambda batch: [Slotted(image) for image, _ in batch],
    "deque": lambda batch: deque(image for image, _ in batch),
}


def parts(batch: Any) -> list[Any]:
    """Images and tensors in a batch, in order."""
    if isinstance(batch, (torch.Tensor, Image.Image)):
        return [batch]
    if isinstance(batch, dict):
        batch = list(batch.values())
    elif isinstance(batch, Batch):
        batch = batch.samples
    elif isinstance(batch, (Sample, Slotted)):
        batch = [batch.image]
    return [part for item in batch for part in parts(item)] if isinstance(batch, (list, tuple, deque)) else []


def assert_same_parts(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected) > 0
    for ours, stock in zip(actual, expected, strict=True):
        assert type(ours) is type(stock)
        if isinstance(stock, torch.Tensor):
            assert_same_bits(ours, stock)
        else:
            assert (ours.mode, ours.size, ours.info, ours.tobytes()) == (
                stock.mode,
                stock.size,
                stock.info,
                stock.tobytes(),
            )


@pytest.fixture
def no_decoding_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding of a recorded image fails in this process, and goes on in those that it forks."""
    decode, here = EncodedSource.decode, os.getpid()

    def decode_elsewhere(source: EncodedSource) -> Image.Image:
        assert os.getpid() != here, "decoded in the training process"
        return decode(source)

    monkeypatch.setattr(EncodedSource, "decode", decode_elsewhere)


def batches_of(dataset: Any, wrap: Callable[[Any], Any] = iter, kind: type = DataLoader, **options: Any) -> list[Any]:
    torch.manual_seed(9)
    loader = kind(dataset, num_workers=1, multiprocessing_context="fork", **options)
    return [part for batch in wrap(loader) for part in parts(batch)]


@pytest.mark.usefixtures("no_decoding_here")
@pytest.mark.parametrize(
    ("transform", "collate"),
    [("tensor", name) for name in COLLATES]
    + [(name, collate) for name in ("tv_tensor", "image", "file") for collate in ("zip", "slots")],
)
@pytest.mark.sampled(6)
def test_any_collate_gives_ordinary_tensors_and_images(transform: str, collate: str) -> None:
    options = {"batch_size": 2, "collate_fn": COLLATES[collate]}
    expected = batches_of(Photos(transform), **options)
    with torch_sink.image_backend("device", device="cpu"):
        actual = batches_of(Photos(transform), **options)
        assert not torch_sink.fallback_report(), str(torch_sink.fallback_report())
    assert_same_parts(actual, expected)


@pytest.mark.usefixtures("no_decoding_here")
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Photos("tensor"), {"batch_size": None}),
        (Stream(), {"batch_size": 2, "collate_fn": COLLATES["zip"]}),
        (Photos("tensor"), {"batch_size": 2, "collate_fn": COLLATES["zip"], "kind": StatefulDataLoader}),
        (Photos("tensor"), {"batch_size": 2, "collate_fn": COLLATES["zip"], "wrap": torch_sink.SinkLoader}),
    ],
    ids=["samples", "iterable", "torchdata", "SinkLoader"],
)
def test_any_loader_gives_ordinary_tensors(dataset: Any, options: dict[str, Any]) -> None:
    expected = batches_of(dataset, **{**options, "wrap": iter})
    with torch_sink.image_backend("device", device="cpu"):
        assert_same_parts(batches_of(dataset, **options), expected)


@pytest.mark.usefixtures("no_decoding_here")
def test_a_pool_returns_ordinary_tensors_and_images() -> None:
    for transform in TRANSFORMS:
        expected = [Photos(transform)[index][0] for index in range(4)]
        with (
            torch_sink.image_backend("device", device="cpu"),
            multiprocessing.get_context("fork").Pool(2) as pool,
        ):
            actual = pool.map(Photos(transform).__getitem__, range(4))
        assert_same_parts([image for image, _ in actual], expected)


def test_a_damaged_file_raises_in_the_batch_where_it_is() -> None:
    class Damaged(Photos):
        def __getitem__(self, index: int) -> tuple[Any, int]:
            data = encoded(64, 64, index)
            middle = len(data) * 2 // 3
            data = data[:middle] + b"\xff\x07" + data[middle + 2 :] if index == 2 else data
            return v1.ToTensor()(Image.open(io.BytesIO(data)).convert("RGB")), index

    with torch_sink.image_backend("device", device="cpu"):
        loader = iter(DataLoader(Damaged("tensor"), 1, num_workers=1, collate_fn=COLLATES["list"]))
        assert [next(loader)[0][1] for _ in range(2)] == [0, 1]
        with pytest.raises(OSError, match="in memory"):
            next(loader)
        assert next(loader)[0][1] == 3


def test_for_a_device_handles_travel() -> None:
    """The pixels are made there: what leaves the worker is what it recorded."""
    with torch_sink.image_backend("device", device="meta"):
        (batch,) = DataLoader(Photos("tensor"), 4, num_workers=1, collate_fn=COLLATES["list"])
        assert [type(image) for image, _ in batch] == [LazyTensor] * 4


def test_batches_without_images_are_left_alone() -> None:
    class Numbers(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            worker = get_worker_info()
            assert worker is not None
            return {"worker": worker.id, "type": int, "set": {index}, "function": COLLATES["list"]}

    with torch_sink.image_backend("device", device="cpu"):
        for batch in DataLoader(Numbers(), 2, num_workers=1, collate_fn=cyclic):
            assert batch["again"] is batch
            assert [sample["set"] for sample in batch["samples"]] == [{0}, {1}]


def cyclic(samples: list[Any]) -> Any:
    assert all(sample["type"] is int and sample["function"] is COLLATES["list"] for sample in samples)
    batch: dict[str, Any] = {"samples": [{"set": sample["set"]} for sample in samples]}
    batch["again"] = batch
    return batch


def test_the_usual_last_calls_write_to_the_batch_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tensors less for each image of ImageNet, each of pages that are made anew."""
    pipeline = v1.Compose([v1.ToTensor(), v1.Normalize([0.4, 0.5, 0.3], [0.2, 0.3, 0.25])])
    images = [array_opener(9, 8, seed) for seed in range(3)]
    expected = default_collate([pipeline(image()) for image in images])
    with torch_sink.image_backend("device", device="cpu"):
        samples = [pipeline(image()) for image in images]
        written: list[int] = []
        stock = STOCK["v1.normalize"]
        monkeypatch.setitem(
            STOCK, "v1.normalize", lambda values, *args: written.append(values.data_ptr()) or stock(values, *args)
        )
        batch = default_collate(samples)
        assert_same_bits(batch, expected)
        assert written == [batch.data_ptr()]
