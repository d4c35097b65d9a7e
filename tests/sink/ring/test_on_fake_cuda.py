"""The ring as it is on CUDA, on a device that is none: each wait is needed, and what else a capture asks of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda

from torch_sink.sink import SinkLoader
from torch_sink.sink.device import SlotProtocol, copy_stream_of

pytestmark = pytest.mark.halved

SEEDS = range(6)


def is_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a slow consumer sees every batch as it is."""
    cuda = FakeCuda(seed=seed)
    with monkeypatch.context() as patch:
        cuda.install(patch)
        batches = [torch.full((8,), float(step)) for step in range(12)]
        with SinkLoader(batches, slots=2) as loader:
            seen = [batch * 1 for batch in loader]
        values = [value.tolist() for value in seen]
        cuda.remove()
    return values == [batch.tolist() for batch in batches]


@pytest.mark.parametrize("wait", [None, "begin_staging", "begin_filling", "begin_use"])
def test_each_wait_of_the_ring_is_needed(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, wait: Any) -> None:
    if wait is not None:
        monkeypatch.setattr(SlotProtocol, wait, lambda protocol, slot: None)
    assert all([is_right(seed, monkeypatch) for seed in SEEDS]) == (wait is None)


def test_kernels_that_fill_slots_go_before_those_of_training(fake_cuda: FakeCuda) -> None:
    assert copy_stream_of.__wrapped__(torch.device("cuda", 0)).priority < torch.cuda.Stream().priority


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_the_host_waits_for_its_own_memory_only(fake_cuda: FakeCuda, where: str) -> None:
    """Not for batches that lie on the device: their thread is that which trains."""
    batches = [(torch.full((4,), float(step), device=where), torch.tensor([step], device=where)) for step in range(9)]
    torch.cuda.synchronize()
    fake_cuda.waits.clear()
    with SinkLoader(batches, slots=2) as loader:
        seen = [values * numbers for values, numbers in loader]
        waits = fake_cuda.waits["MainThread", "event.synchronize", "sleeps"]
    assert waits == (7 if where == "cpu" else 0)
    assert [value.tolist() for value in seen] == [[float(step * step)] * 4 for step in range(9)]
