"""The way of a batch through the package, traced: how many calls it takes, which files it enters, how often again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import worker
from torchvision import transforms as v1

import torch_sink
from image.cases import encoded, opener
from torch_sink.image.decode.providers import TritonProvider
from torch_sink.image.program.program import Program, Wanted
from torch_sink.image.run import device
from torch_sink.image.run.batch import pack
from torch_sink.triton_kernels.launching import Launcher

IMAGES = 8
META = torch.device("meta")
ROOT = Path(torch_sink.__file__).parent
PIPELINE = v1.Compose(
    [v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize((0.4,) * 3, (0.2,) * 3)]
)


class Way(NamedTuple):
    """What was called."""

    calls: int
    files: set[str]
    stays: int  # in one file, without a call in another

    @property
    def returns(self) -> int:
        """How often a file is entered that was left before."""
        return self.stays - len(self.files)


def way_of(action: Callable[[], Any]) -> Way:
    """The calls of functions of the package, but for the kernels and what launches them."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT) and "triton_kernels" not in file.parts:
            entered.append(str(file.relative_to(ROOT)))

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return Way(len(entered), set(entered), len(list(groupby(entered))))


def recorded(seed: int = 4) -> list[Any]:
    torch.manual_seed(seed)
    return [PIPELINE(opener(encoded(50 + seed, 40, seed))()) for seed in range(IMAGES)]


@pytest.mark.parametrize(("seed", "calls", "files"), [(5, 408, 21), (4, 218, 15)], ids=["new draws", "plans are kept"])
def test_a_worker_collates(monkeypatch: pytest.MonkeyPatch, seed: int, calls: int, files: int) -> None:
    with torch_sink.image_backend("device", device="meta"):
        pack([default_collate(recorded())])  # fills caches
        images = recorded(seed)
        monkeypatch.setattr(worker, "_worker_info", object())
        way = way_of(lambda: pack([default_collate(images)]))
    assert 100 < way.calls <= calls
    assert "image/program/launches.py" in way.files
    assert len(way.files) <= files


def program() -> Program:
    with torch_sink.image_backend("device", device="meta"):
        return default_collate(recorded()).program


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_device_makes_it(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    """The same way whatever the result."""
    for name in ("usable", "by_default", "is_right"):
        monkeypatch.setattr(TritonProvider, name, lambda *_: True)
    monkeypatch.setattr(Launcher, "__call__", lambda *_, **__: None)
    monkeypatch.setattr(Launcher, "prepared", lambda *_, **__: lambda *_: None)
    monkeypatch.setattr(device, "to_host_later", lambda status: lambda: torch.zeros(status.shape, dtype=status.dtype))
    made, wanted = program(), Wanted(META, dtype, memory_format)
    device.make_on_device(made, wanted)
    way = way_of(lambda: device.make_on_device(made, wanted))
    assert {"image/run/device.py", "image/decode/jpeg_decoder.py"} <= way.files
    assert way.stays <= 20
    assert len(way.files) <= 6
    assert way.returns <= 15
