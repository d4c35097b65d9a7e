"""The layout that a SinkLoader asks for: no plan knows it, and the process that trains opens no calls for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from image.check import assert_same_bits, device_in_use
from image.jpeg_files import jpeg
from image.operations.test_mixes import CLASSES
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import torch_sink
from torch_sink.image.program.block import Packed
from torch_sink.image.run.shared import SharedProgram

BYTES = [v1.CenterCrop((9, 11)), v1.RandomHorizontalFlip(1.0)]
TENSOR = v1.ToTensor()
LAST, CONTIGUOUS = torch.channels_last, torch.contiguous_format
LAYOUTS = [LAST, CONTIGUOUS]

pytestmark = [
    pytest.mark.once_on_oldest,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Packed]]:
    """Batches whose calls this process opens."""
    seen: list[Packed] = []
    stock: Any = Packed.contents.fget  # type: ignore[attr-defined]

    def contents(packed: Packed) -> Any:
        if packed._contents is None:
            seen.append(packed)
        return stock(packed)

    monkeypatch.setattr(Packed, "contents", property(contents))
    torch_sink.set_decode_provider("triton")
    yield seen
    torch_sink.set_decode_provider(None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images" / "all").mkdir(parents=True)
    for seed in range(2):
        (tmp_path / "images" / "all" / f"{seed}.jpg").write_bytes(jpeg(13 - seed, 12, seed=seed, quality=20))
    return tmp_path / "images"


def mixed(samples: list[Any]) -> Any:
    torch.manual_seed(6)
    return v2.MixUp(num_classes=CLASSES)(*default_collate(samples))


def loader(folder: Path, *more: Any, start: str = "fork", **options: Any) -> DataLoader[Any]:
    """One batch."""
    dataset = ImageFolder(str(folder), v1.Compose([*BYTES, *(more or [TENSOR])]))
    return DataLoader(dataset, 2, num_workers=1, multiprocessing_context=start, **options)


def in_slots(source: Any, layout: torch.memory_format, **options: Any) -> list[torch.Tensor]:
    with torch_sink.SinkLoader(source, device=device_in_use(), memory_format=layout, **options) as batches:
        return [images.clone() for images, _ in batches]


def check(made: list[torch.Tensor], source: Any, layout: torch.memory_format, **options: Any) -> None:
    """Bits and strides are those of stock torchvision."""
    expected = [images.to(memory_format=layout, **options) for images, _ in source]
    assert len(made) == len(expected) == 1
    for images, stock in zip(made, expected, strict=True):
        assert_same_bits(images.cpu(), stock)


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_no_plan_is_opened(folder: Path, opened: list[Packed], start: str) -> None:
    with torch_sink.image_backend("device", device=device_in_use()):
        made = in_slots(loader(folder, start=start), LAST)
    check(made, loader(folder), LAST)
    assert not opened


def test_a_type_and_a_policy_open_none_either(folder: Path, opened: list[Packed]) -> None:
    with torch_sink.image_backend("device", device=device_in_use()):
        made = in_slots(loader(folder), LAST, dtype=torch.bfloat16, on_decode_error="skip")
    check(made, loader(folder), LAST, dtype=torch.bfloat16)
    assert not opened


def test_mixed_batches(folder: Path, opened: list[Packed]) -> None:
    with torch_sink.image_backend("device", device=device_in_use()):
        made = in_slots(loader(folder, collate_fn=mixed), LAST)
    check(made, loader(folder, collate_fn=mixed), LAST)
    assert not opened


def test_half_precision_of_the_pipeline_s_own(folder: Path, opened: list[Packed]) -> None:
    to_half = v1.PILToTensor(), v1.ConvertImageDtype(torch.float16)
    with torch_sink.image_backend("device", device=device_in_use(), strict=True):
        made = in_slots(loader(folder, *to_half), LAST)
    check(made, loader(folder, *to_half), LAST)
    assert not opened


def test_each_loader_has_its_own(folder: Path, opened: list[Packed], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time, over one DataLoader."""
    source, one_at_a_time, make = loader(folder), threading.Lock(), SharedProgram.make  # as the interpreter needs it

    def alone(*arguments: Any) -> Any:
        with one_at_a_time:
            return make(*arguments)

    monkeypatch.setattr(SharedProgram, "make", alone)
    with (
        torch_sink.image_backend("device", device=device_in_use()),
        torch_sink.SinkLoader(source, device=device_in_use(), memory_format=LAST) as last,
        torch_sink.SinkLoader(source, device=device_in_use()) as contiguous,
    ):
        made = [[images.clone() for images, _ in batches] for batches in zip(last, contiguous, strict=True)]
    for number, wanted in enumerate(LAYOUTS):
        check([each[number] for each in made], source, wanted)
    assert not opened


@pytest.mark.parametrize("wanted", LAYOUTS, ids=str)
def test_batches_that_were_made_before_anybody_asked(
    folder: Path, opened: list[Packed], wanted: torch.memory_format
) -> None:
    with torch_sink.image_backend("device", device=device_in_use()):
        made = in_slots(list(loader(folder)), wanted)
    check(made, loader(folder), wanted)
    assert not opened


@pytest.mark.parametrize("layout", [*LAYOUTS, torch.preserve_format])
def test_a_move_takes_the_layouts_that_tensors_take(layout: torch.memory_format, folder: Path) -> None:
    images, _ = next(iter(loader(folder)))
    expected = images.to("cpu", memory_format=layout)
    with torch_sink.image_backend("device", device=device_in_use()):
        images, _ = next(iter(loader(folder)))
        made = images.to(device_in_use(), memory_format=layout)
    assert_same_bits(made.cpu(), expected)
    assert made.stride() == expected.stride()
