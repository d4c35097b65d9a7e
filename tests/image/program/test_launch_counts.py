"""How many kernels a batch launches: the longest chain of any of its images, whatever else it holds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate
from torchvision import transforms as v1
from torchvision.transforms import v2

import torch_sink
from image.cases import encoded, opener
from torch_sink.image.program.program import Wanted
from torch_sink.image.run.device import make_on_device
from torch_sink.triton_kernels.launching import Launcher

TO_FLOATS = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
CROP = v1.RandomResizedCrop(24)
# Of bytes, of floats, and of both; each gives float32 [3, 24, 24].
PIPELINES: list[Any] = [
    v1.Compose([CROP, v1.ToTensor()]),
    v1.Compose([v1.CenterCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.RandomErasing(p=1)]),
    v1.Compose([CROP, v1.ColorJitter(0.4, 0.4, 0.4, 0.1), v1.ToTensor(), v1.Normalize((0.5,), (0.5,))]),
    v1.Compose([CROP, v1.RandAugment(3), v1.ToTensor()]),
    v2.Compose([*TO_FLOATS, v2.RandomResizedCrop(24), v2.RandomHorizontalFlip()]),
    v2.Compose([*TO_FLOATS, v2.Resize((24, 24)), v2.ColorJitter(0.4, 0.4, 0.4, 0.1), v2.GaussianBlur(3)]),
    v2.Compose([CROP, *TO_FLOATS, v2.RandomHorizontalFlip(1.0),
                v2.ToDtype(torch.uint8, scale=True), v2.RandomEqualize(1.0), v2.ToDtype(torch.float32, scale=True)]),
    v1.Compose([v1.ToTensor(), v1.ToPILImage(), CROP, v1.RandomAutocontrast(1.0), v1.ToTensor()]),
]  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each kernel is launched; they do nothing."""
    found: Counter[str] = Counter()
    monkeypatch.setattr(Launcher, "__call__", lambda kernel, *_, **__: found.update([kernel.name]))
    with torch_sink.image_backend("device", device="meta", strict=True):
        yield found


def launches(handles: list[Any], launched: Counter[str]) -> Counter[str]:
    """What one batch launches."""
    launched.clear()
    batch = default_collate(handles)
    make_on_device(batch.program, Wanted(torch.device("meta")))
    return Counter(launched)


@pytest.mark.parametrize("seed", range(6))
def test_a_mixture_launches_its_longest_chain(seed: int, launched: Counter[str]) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [(60, 40), (40, 61), (33, 33)]
    handles = [draw.choice(PIPELINES)(opener(encoded(*draw.choice(sizes), at))()) for at in range(8)]
    alone = [launches([handle], launched) for handle in handles]
    mixed = launches(handles, launched)
    assert mixed["stage_kernel"] == max(each["stage_kernel"] for each in alone)
    assert mixed["prologue_kernel"] == 1
    assert max(each["statistics_kernel"] for each in alone) <= mixed["statistics_kernel"] < mixed["stage_kernel"]
    draw.shuffle(handles)
    assert launches(handles * 4, launched) == mixed
