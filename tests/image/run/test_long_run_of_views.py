"""Hundreds of batches of views: memory does not grow, in a plain loop with a worker and in a `SinkLoader`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from simulators.fake_cuda import FakeCuda, fake_cuda
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Sampler
from torchvision.datasets import ImageFolder

import torch_sink
from image.broken_files import QUIET
from image.cases import write_classes
from image.views import ALL, recorded
from torch_sink import SinkLoader
from torch_sink.image.run.device import DecodedImages
from torch_sink.triton_kernels.launching import Launcher

__all__ = ["fake_cuda"]

pytestmark = [QUIET, pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.slow)])]
FILES = 4


class Endless(Sampler[int]):
    """The files again and again."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return (number % FILES for number in range(self.count))


class Views:
    """All views of an image, by name."""

    def __call__(self, image: Any) -> Any:
        return {str(number): view(image) for number, view in enumerate(ALL)}


def loader_of(folder: Path, count: int, **options: Any) -> Any:
    dataset = ImageFolder(str(write_classes(folder, FILES)), Views())
    return DataLoader(dataset, 2, sampler=Endless(2 * count), **options)


class Memory:
    """What the process and the device hold, noted after each tenth batch."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.process, self.resident, self.on_device = psutil.Process(), list[int](), list[int]()
        self.batches = 0

    def note(self) -> None:
        self.batches += 1
        if self.batches % 10 == 0:
            torch.cuda.synchronize()
            gc.collect()  # of what the run has made: where many tests ran before, Python waits long with its own
            self.resident.append(self.process.memory_info().rss)
            self.on_device.append(torch.cuda.memory_allocated())

    def check(self, count: int) -> None:
        assert self.batches == count
        third = len(self.resident) // 3
        # That of the batch that `enumerate` still holds, whose crops are larger or smaller.
        assert max(self.on_device[2 * third :]) <= 1.2 * max(self.on_device[: 2 * third])
        assert max(self.resident[2 * third :]) - max(self.resident[: 2 * third]) < 2 << 20


@pytest.fixture
def decodings(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many programs were decoded; kernels do nothing."""
    found, begin = [0], DecodedImages.__init__

    def count(images: DecodedImages, *given: Any) -> None:
        found[0] += 1
        begin(images, *given)

    monkeypatch.setattr(DecodedImages, "__init__", count)
    monkeypatch.setattr(Launcher, "__call__", lambda *_, **__: None)
    monkeypatch.setattr("torch_sink.image.run.batch.kernels_make", lambda *_: True)
    torch_sink.set_decode_provider("pillow")
    gc.collect()
    gc.freeze()  # of other tests
    yield found
    gc.unfreeze()
    torch_sink.set_decode_provider(None)


def test_a_plain_loop(tmp_path: Path, fake_cuda: FakeCuda, decodings: list[int], count: int) -> None:
    """Some views are moved, in another order each time; some twice, and some never."""
    memory = Memory(fake_cuda)
    with torch_sink.image_backend("device", device="cuda"):
        for number, (batch, _) in enumerate(loader_of(tmp_path, count, num_workers=1)):
            views = recorded(batch)
            assert len(views) == len(ALL)
            for at in range(number % 4, number % 4 + 3):
                views[at % 4].to("cuda")
            if number % 5 == 0:
                views[number % 4].to("cuda", torch.float16)
            del batch, views
            memory.note()
    memory.check(count)
    assert count <= decodings[0] <= count + count // 5


def test_a_sink_loader(tmp_path: Path, fake_cuda: FakeCuda, decodings: list[int], count: int) -> None:
    memory = Memory(fake_cuda)
    with torch_sink.image_backend("device", device="cuda"), SinkLoader(loader_of(tmp_path, count)) as batches:
        for batch in batches:
            assert all(leaf.is_cuda for leaf in tree_leaves(batch))
            del batch
            memory.note()
    memory.check(count)
    assert decodings[0] == count
