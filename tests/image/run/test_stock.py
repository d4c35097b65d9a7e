"""Batches that a machine without a device makes itself: stock code's bits, and the last calls once for many images."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms as v1
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

import torch_sink
from image.cases import array_opener, encoded
from image.check import assert_same_bits
from torch_sink.image.core.fallback import executing
from torch_sink.image.core.ops import STOCK
from torch_sink.image.decode.encoded import EncodedSource

pytestmark = pytest.mark.halved

_STATISTICS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_SCALED = v2.ToDtype(torch.float32, scale=True)
Transform = Callable[[Any], Any]


def _sometimes(*transforms: Transform) -> Transform:
    return v1.RandomApply(transforms, p=0.5)


def _by_arithmetic(image: Any) -> Any:
    return (v1.functional.pil_to_tensor(image).float() / 255 - 0.45) / 0.225 * 1.7


@pytest.fixture(autouse=True)
def _without_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A JPEG file of 60 x 50 pixels."""
    path = tmp_path / "image.jpg"
    path.write_bytes(encoded(60, 50, 1))
    return path


TAILS: dict[str, Transform] = {
    "ToTensor": v1.ToTensor(),
    "PILToTensor": v1.PILToTensor(),
    "Normalize": v1.Compose([v1.ToTensor(), v1.Normalize(*_STATISTICS)]),
    "Normalize in place": v1.Compose([v1.ToTensor(), v1.Normalize(*_STATISTICS, inplace=True)]),
    "Normalize sometimes": v1.Compose([v1.ToTensor(), _sometimes(v1.Normalize(*_STATISTICS))]),
    "ConvertImageDtype": v1.Compose([v1.PILToTensor(), v1.ConvertImageDtype(torch.float32), v1.Normalize(0.5, 0.2)]),
    "half precision": v1.Compose([v1.ToTensor(), v1.ConvertImageDtype(torch.float16)]),
    "v2": v2.Compose([v2.ToImage(), _SCALED, v2.Normalize(*_STATISTICS)]),
    "v2, unscaled": v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32), v2.Normalize([127.0] * 3, [60.0] * 3)]),
    "v2, tensors flipped": v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip(), _SCALED, v2.Normalize(*_STATISTICS)]),
    "v2, floats flipped": v2.Compose([v2.ToImage(), _SCALED, v2.RandomHorizontalFlip(), v2.Normalize(*_STATISTICS)]),
    "arithmetic": _by_arithmetic,
    "read by other code": v1.Compose([v1.ToTensor(), _sometimes(v1.Lambda(torch.clone)), v1.Normalize(*_STATISTICS)]),
}
HEADS: dict[str, list[Transform]] = {
    "eval": [],
    "train": [v1.RandomCrop(24, padding=4), v1.RandomHorizontalFlip()],
    "gray": [v1.RandomGrayscale(0.5)],
}


def _batch(images: Iterable[Any], transform: Transform) -> torch.Tensor:
    torch.manual_seed(5)
    batch: torch.Tensor = default_collate([transform(image) for image in images])
    assert type(batch) is torch.Tensor
    return batch


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tail", TAILS)
def test_a_batch_has_stock_codes_bits(head: str, tail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_sink.image.run.stock._BYTES_AT_ONCE", 20_000)  # several parts of a batch
    transform = v1.Compose([*HEADS[head], TAILS[tail]])
    images = [array_opener(28, 30, seed)() for seed in range(6)]
    expected, state = _batch(images, transform), torch.get_rng_state()
    with torch_sink.image_backend("device", device="cpu"):
        actual = _batch(images, transform)
    assert_same_bits(actual, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_gray_images_files_and_tensors_in_one_batch(tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    path.write_bytes(encoded(28, 30, 1))
    convert, normalize = v1.Compose([v1.Grayscale(), v1.ToTensor()]), v1.Normalize(0.1307, 0.3081)
    arrays = [array_opener(28, 30, seed)() for seed in range(3)]

    def batch() -> torch.Tensor:
        images = [*arrays, default_loader(path), *[image.convert("L") for image in arrays], default_loader(path)]
        finished = normalize(torch.ones(1, 30, 28))
        return default_collate([finished, *[normalize(convert(image)) for image in images], finished])

    expected = batch()
    with torch_sink.image_backend("device", device="cpu"):
        assert_same_bits(batch(), expected)


class _Counting(TorchDispatchMode):
    """How many operators of torch run inside."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tail", ["Normalize", "v2"])
def test_small_images_are_converted_and_normalized_together(tail: str) -> None:
    images = [array_opener(32, 32, seed)() for seed in range(64)]
    with torch_sink.image_backend("device", device="cpu"):
        handles = [TAILS[tail](image) for image in images]
        with _Counting() as counting:
            default_collate(handles)
    assert counting.count < len(images)


@pytest.mark.parametrize("module", [v1, v2])
def test_views_of_a_file_decode_it_once(module: Any, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = [] if module is v1 else [v2.ToImage()]
    last = [v1.ToTensor()] if module is v1 else [_SCALED]
    view = module.Compose([*first, module.RandomResizedCrop(20), module.RandomHorizontalFlip(), *last])

    def batch() -> list[torch.Tensor]:
        torch.manual_seed(3)
        images = [default_loader(photo) for _ in range(2)]
        views: list[torch.Tensor] = default_collate([[view(image) for _ in range(6)] for image in images])
        return views

    expected, decoded, decode = batch(), [], EncodedSource.decode
    monkeypatch.setattr(EncodedSource, "decode", lambda source: decoded.append(source) or decode(source))
    with torch_sink.image_backend("device", device="cpu"):
        for made, wanted in zip(batch(), expected, strict=True):
            assert_same_bits(made, wanted)
    assert len(decoded) == 2


@pytest.mark.parametrize("module", [v1, v2])
@pytest.mark.parametrize("kind", ["FiveCrop", "TenCrop"])
@pytest.mark.parametrize("resize", [[], [v1.Resize(30)]], ids=["whole", "resized"])
def test_crops_of_a_file_open_it_once(
    module: Any, kind: str, resize: list[Transform], photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crops = v1.Compose([*resize, getattr(module, kind)(20), v1.Lambda(_stack)])
    expected, opened, opens = crops(default_loader(photo)), [], EncodedSource.open
    monkeypatch.setattr(EncodedSource, "open", lambda source: opened.append(source) or opens(source))
    with torch_sink.image_backend("device", device="cpu"):
        assert_same_bits(crops(default_loader(photo)), expected)
    assert len(opened) == 1


@pytest.mark.parametrize(("module", "first"), [(v1, [v1.ToTensor()]), (v2, [v2.ToImage(), _SCALED])], ids=["v1", "v2"])
@pytest.mark.parametrize("name", ["v1.hflip", "v1.vflip"])  # v2's kernel calls `Tensor.flip`
def test_ten_crops_of_a_tensor_flip_it_once(
    name: str, module: ModuleType, first: list[Transform], photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ten_crop = module.TenCrop(20, vertical_flip=".v" in name)
    crops = v1.Compose([*first, ten_crop, v1.Lambda(torch.stack)])
    expected, flipped, flip = crops(default_loader(photo)), [], STOCK[name]
    monkeypatch.setitem(STOCK, name, lambda image: flipped.append(image) or flip(image))
    with torch_sink.image_backend("device", device="cpu"):
        assert_same_bits(crops(default_loader(photo)), expected)
    assert len(flipped) == 1


def test_views_of_crops_of_a_file(photo: Path) -> None:
    def views() -> list[torch.Tensor]:
        image = default_loader(photo)
        crop = image.crop((3, 4, 43, 34))
        tensor = v1.functional.to_tensor(crop)
        others = [image.crop((0, 0, 30, 20)), crop.resize((9, 8)), crop.crop((5, 6, 20, 20)), crop, image]
        return [torch.from_numpy(each.numpy()) for each in (tensor, *map(v1.functional.to_tensor, others))]

    expected = views()
    with torch_sink.image_backend("device", device="cpu"):
        for made, wanted in zip(views(), expected, strict=True):
            assert_same_bits(made, wanted)


def test_files_that_stock_code_opens_are_pillows(photo: Path) -> None:
    with torch_sink.image_backend("device", device="cpu"):
        with executing(), Image.open(photo) as image:
            assert type(image) is JpegImageFile
        with Image.open(photo) as image:
            assert type(image) is not JpegImageFile


def test_views_after_the_values_of_the_first_were_read(photo: Path) -> None:
    stock = default_loader(photo)
    with torch_sink.image_backend("device", device="cpu"):
        image = default_loader(photo)
        first = v1.functional.to_tensor(image)
        assert first.numpy().max() <= 1
        for box in [(0, 0, 20, 20), (0, 0, 20, 30), (5, 5, 40, 40)]:
            assert_same_bits(v1.functional.to_tensor(image.crop(box)), v1.functional.to_tensor(stock.crop(box)))
    assert_same_bits(first, v1.functional.to_tensor(stock))


def _stack(crops: Iterable[Any]) -> torch.Tensor:
    return torch.stack([v1.functional.to_tensor(crop) for crop in crops])


class Stacks(Dataset[Any]):
    """Of each sample: a stack of images, and whether it lies in shared memory."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[torch.Tensor, bool]:
        stack = _stack([array_opener(8, 8, seed)() for seed in range(3)])
        return stack, stack.is_shared()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_stack_of_one_sample_takes_no_shared_memory() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        (stacks, are_shared), *_ = DataLoader(Stacks(), 2, num_workers=1)
    assert stacks.shape == (2, 3, 3, 8, 8)
    assert not are_shared.any()


@pytest.mark.once_on_oldest
def test_bits_on_a_processor_without_vectors() -> None:
    """These calls make each value of one value, rounded as IEEE 754 says, wherever it lies."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "test_a_batch_has"]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout
