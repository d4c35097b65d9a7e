"""Image files broken in many ways, datasets over them, and the plain loop that catches what stock code raises."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.io import decode_image
from torchvision.transforms import v2

import torch_sink
from image.check import assert_same_bits
from image.source_files import FILES
from torch_sink.image.handles.tensor import Handle

COUNT = 48  # of the files that most tests read
# What stock code says of such files, and of workers that are forked.
QUIET = pytest.mark.filterwarnings(
    "ignore:.*multi-threaded, use of fork:DeprecationWarning", "ignore::UserWarning", "ignore:.*DecompressionBomb"
)

JPEG = [make() for name, make in FILES.items() if name.startswith("JPEG")]
OTHERS = [FILES[name]() for name in ("PNG", "PNG, palette", "WebP", "GIF", "TIFF", "BMP")]

V1 = transforms.Compose([transforms.RandomResizedCrop(12), transforms.RandomHorizontalFlip(), transforms.ToTensor()])
V2 = v2.Compose(
    [v2.ToImage(), v2.RandomCrop(40), v2.ColorJitter(0.4), v2.Resize(12), v2.ToDtype(torch.float32, scale=True)]
)


def _truncate(data: bytearray, r: random.Random) -> None:
    del data[r.randrange(len(data)) :]


def _flip_bits(data: bytearray, r: random.Random) -> None:
    for _ in range(r.choice((1, 2, 5, 20))):
        data[r.randrange(len(data))] ^= 1 << r.randrange(8)


def _change_header(data: bytearray, r: random.Random) -> None:
    data[r.randrange(min(len(data), 600))] = r.randrange(256)


def _zeros(data: bytearray, r: random.Random) -> None:
    begin = r.randrange(len(data))
    length = len(data[begin : begin + r.choice((1, 10, 100, 1000))])
    data[begin : begin + length] = bytes(length)


def _swap_markers(data: bytearray, r: random.Random) -> None:
    marks = [match.start() + 1 for match in re.finditer(rb"\xff[^\x00\xff]", bytes(data))] or [0, 1]
    one, two = r.choice(marks), r.choice(marks)
    data[one], data[two] = data[two], data[one]


def _leave_out(data: bytearray, r: random.Random) -> None:
    begin = r.randrange(len(data))
    del data[begin : begin + r.choice((1, 2, 50))]


WAYS: Sequence[Callable[[bytearray, random.Random], None]] = (
    _truncate, _flip_bits, _change_header, _zeros, _swap_markers, _leave_out,
)  # fmt: skip


def break_one(r: random.Random) -> bytes:
    """An image file, changed in one of many ways; some are still whole afterwards, as far as Pillow is concerned."""
    data = bytearray(r.choice(JPEG) if r.random() < 0.7 else r.choice(OTHERS))
    r.choice(WAYS)(data, r)
    return bytes(data)


def certainly_broken(folder: Path) -> list[Callable[[Path], object]]:
    """Each puts something that nobody can open in the place of a file."""
    return [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"This is no image, whatever its name says.\n" * 20),
        lambda path: path.write_bytes(JPEG[0][: len(JPEG[0]) // 2]),
        lambda path: path.write_bytes(OTHERS[0][: len(OTHERS[0]) // 2]),
        lambda path: path.write_bytes(b"\x00\x00\x00" + JPEG[0][3:]),
        lambda path: path.symlink_to(folder / "nowhere.jpg"),
        lambda path: path.symlink_to(path.name),
        lambda path: path.mkdir(),
    ]


def write_tree(folder: Path, count: int, seed: int, good_share: float = 0.6) -> list[Path]:
    """Files in two classes: whole ones, surely broken ones, and ones with damage of which Pillow may notice nothing."""
    r = random.Random(seed)
    paths = [folder / f"class_{number % 2}" / f"{number:05}.jpg" for number in range(count)]
    hopeless = certainly_broken(folder)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = r.random()
        if kind < good_share:
            path.write_bytes(r.choice(JPEG) if r.random() < 0.7 else r.choice(OTHERS))
        elif kind < (1 + good_share) / 2:
            path.write_bytes(break_one(r))
        else:
            r.choice(hopeless)(path)
    return paths


# --- datasets: what users write


def loaded(path: str) -> Image.Image:
    return default_loader(path)


def opened(path: str) -> Image.Image:
    return Image.open(path).convert("RGB")


def opened_in_block(path: str) -> Image.Image:
    with open(path, "rb") as file, Image.open(file) as image:
        return image.convert("RGB")


def checked(path: str) -> Image.Image:
    """Opens a file and finds out whether it can be decoded."""
    image = Image.open(path).convert("RGB")
    image.load()
    return image


def decoded(path: str) -> torch.Tensor:
    return decode_image(path, mode="RGB")


OPENERS: dict[str, Callable[[str], Any]] = {
    "default_loader": loaded, "Image.open": opened, "open and Image.open": opened_in_block,
}  # fmt: skip


class Files(Dataset[Any]):
    """Opens, then transforms."""

    def __init__(self, paths: Sequence[Path], load: Callable[[str], Any], transform: Callable[[Any], Any]) -> None:
        self.paths, self.load, self.transform = [os.fspath(path) for path in paths], load, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.load(self.paths[index])), index


class Together(Files):
    """A dataset that gives the samples of a batch at once."""

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, int]]:
        images = [self.load(self.paths[index]) for index in indices]
        return [(self.transform(image), index) for image, index in zip(images, indices, strict=True)]


class Stream(IterableDataset[Any]):
    """The same as a stream; `goes_on` is the plain loop that catches stock code's exceptions."""

    def __init__(
        self,
        paths: Sequence[Path],
        load: Callable[[str], Any],
        transform: Callable[[Any], Any],
        goes_on: bool = False,
        buffer: int = 0,
    ) -> None:
        self.files, self.goes_on, self.buffer = Files(paths, load, transform), goes_on, buffer

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        held: list[Any] = []
        for index in range(first, len(self.files), step):
            try:
                sample = self.files[index]
            except Exception:
                if not self.goes_on:
                    raise
                continue
            held.append(sample)
            if len(held) > self.buffer:
                yield held.pop(0)
        yield from held


class Catching(Dataset[Any]):
    """Stock code around a dataset: None in the place of a sample that raises."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception:
            return None


def as_list(samples: list[Any]) -> list[Any]:
    """A collate function that keeps samples."""
    return samples


def stock_samples(dataset: Any, seed: int, **options: Any) -> list[list[Any]]:
    """The batches of the plain loop in stock code, as lists of samples; None where stock code raises."""
    torch.manual_seed(seed)
    return list(DataLoader(Catching(dataset), collate_fn=as_list, **options))


def without_broken(batches: list[list[Any]]) -> list[Any]:
    """The batches that are left without the samples that are None."""
    left = [[sample for sample in batch if sample is not None] for batch in batches]
    return [default_collate(batch) for batch in left if batch]


def pixels(image: Image.Image) -> torch.Tensor:
    """A transform that records nothing, and draws."""
    array = np.asarray(image.resize((12, 12))).astype(np.float32)
    return torch.from_numpy(array) + torch.rand(1)


def tree(folder: Path, transform: Any = V1) -> ImageFolder:
    return ImageFolder(str(folder), transform)


def backend(policy: str = "skip", **options: Any) -> Any:
    return torch_sink.image_backend("device", device="cpu", on_decode_error=policy, **options)


def batches(dataset: Any, policy: str, seed: int = 1, **options: Any) -> list[Any]:
    with backend(policy):
        torch.manual_seed(seed)
        return list(DataLoader(dataset, **options))


def assert_same_batches(made: list[Any], expected: list[Any]) -> None:
    assert len(made) == len(expected) > 0
    for (images, labels), (stock_images, stock_labels) in zip(made, expected, strict=True):
        # Without a batch, a handle comes as far as the loop.
        assert_same_bits(images.materialize() if isinstance(images, Handle) else images, stock_images)
        assert torch.equal(torch.as_tensor(labels), torch.as_tensor(stock_labels))


def said_of(error: BaseException) -> str:
    """The message of an error and its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def broken_reason(path: Path) -> str | None:
    """What stock code says of a file."""
    try:
        with Image.open(path) as image:
            image.convert("RGB")
    except Exception as error:
        return str(error)
    return None
