"""The fake device for tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from torch_sink.sink import workers

from .device import FakeCuda
from .streams import FakeStream


def has_device() -> bool:
    """Whether there is a real CUDA device, which work of some size keeps busy."""
    return torch.cuda.is_available() and torch.cuda.Stream is not FakeStream


@pytest.fixture
def fake_cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A fake CUDA device, where there is no real one; its arguments by `parametrize("fake_cuda", [...], indirect=True)`."""
    if torch.cuda.is_available():
        pytest.skip("a machine with CUDA has its own")
    cuda = FakeCuda(**getattr(request, "param", {}))
    with monkeypatch.context() as patch:
        cuda.install(patch)
        yield cuda
        if workers._lives:
            gc.collect()  # loaders that the test let go of close while their device is still there
        cuda.remove()


@pytest.fixture
def rehearse(request: pytest.FixtureRequest) -> None:
    """For tests marked `cuda(rehearsed=True)`: the fake device where there is no real one."""
    marker = request.node.get_closest_marker("cuda")
    if marker is not None and marker.kwargs.get("rehearsed") and not torch.cuda.is_available():
        request.getfixturevalue("fake_cuda")
