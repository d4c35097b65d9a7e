"""What a batch sends to its device, tried on the meta device: nothing that makes the host wait, nothing that stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda, fake_cuda
from simulators.fake_cuda.streams import FakeEvent
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate
from torchvision.transforms import v2

import torch_sink
from image.cases import encoded
from torch_sink.cli.photos import make_photo
from torch_sink.common import transfer
from torch_sink.image.decode import decode_images
from torch_sink.image.program.program import Wanted
from torch_sink.image.run.device import make_on_device
from torch_sink.triton_kernels.launching import Launcher
from torch_sink.triton_kernels.stages import stage

__all__ = ["fake_cuda"]

PIPELINES = {
    "uint8": v2.Compose([v2.RandomAutocontrast(p=1), v2.PILToTensor()]),
    "values": v2.Compose([v2.Resize((12, 12)), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.4], [0.2])]),
    "floats": v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Resize((12, 12))]),
    "erased": v2.Compose([v2.PILToTensor(), v2.RandomErasing(p=1, value="random")]),
}  # fmt: skip


class Transfers(TorchDispatchMode):
    """Notes each copy from the host to the device whose end the host would wait for."""

    def __init__(self, pinned: set[int]) -> None:
        super().__init__()
        self.pinned = pinned
        self.count, self.waited = 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        source = args[1] if func is torch.ops.aten.copy_.default else args[0] if args else None
        on_device = isinstance(result, torch.Tensor) and result.device.type == "meta"
        if on_device and isinstance(source, torch.Tensor) and source.device.type == "cpu" and source.ndim:
            waits = not (kwargs or {}).get("non_blocking") and args[2:] != (True,)
            self.count += 1
            if waits or source.untyped_storage().data_ptr() not in self.pinned:
                self.waited.append((func, tuple(source.shape)))
        return result


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Transfers]:
    """Copies to the meta device, which stands for one that has pinned memory and runs kernels."""
    pinned: set[int] = set()
    kept = []
    stock_empty = torch.empty

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        kept.append(copy)  # so that its address is nobody else's
        pinned.add(copy.untyped_storage().data_ptr())
        return copy

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = stock_empty(*size, **options)
        return pin(tensor) if pin_memory else tensor

    monkeypatch.setattr(transfer, "pins", lambda device: device.type != "cpu")
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(Launcher, "__call__", lambda kernel, *_, **__: None)
    with Transfers(pinned) as mode:
        yield mode


def on_device(pipeline: Any) -> torch.Tensor:
    """A batch of two images; the kernels that would fill it are left out."""
    with torch_sink.image_backend("device", device="meta", strict=True):
        batch = default_collate([pipeline(make_photo(16, 16, seed)) for seed in range(2)])
    return make_on_device(batch.program, Wanted(torch.device("meta")))[0]


@pytest.mark.parametrize("name", PIPELINES)
def test_no_transfer_of_a_batch_makes_the_host_wait(name: str, transfers: Transfers) -> None:
    assert on_device(PIPELINES[name]).device.type == "meta"
    # Pixels, all tables of the kernels, and where the pixels lie.
    assert transfers.count == 3
    assert transfers.waited == []


def test_no_transfer_of_decoded_images_makes_the_host_wait(transfers: Transfers) -> None:
    decode_images([encoded(20, 16, 1), encoded(16, 20, 2, "L")], device="meta")
    assert transfers.count == 2
    assert transfers.waited == []


def test_nothing_on_the_device_outlives_its_batch(transfers: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream could read it when it is freed."""
    alive: list[weakref.ref[torch.Tensor]] = []
    stock = stage.run_stage

    def watch(*tensors: Any, **options: Any) -> None:
        alive.extend(weakref.ref(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))
        stock(*tensors, **options)

    monkeypatch.setattr(stage, "run_stage", watch)
    result = on_device(PIPELINES["values"])
    gc.collect()
    left = [found() for found in alive]
    assert len(left) >= 8
    assert all(tensor is None or tensor is result for tensor in left)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_waiting_for_values_is_no_fault_where_waits_are(fake_cuda: FakeCuda) -> None:
    values = torch.arange(6, device="cuda") * 2
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            values.cpu()
        assert transfer.to_host(values).tolist() == [0, 2, 4, 6, 8, 10]
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fake_cuda", [{"seed": seed} for seed in range(4)], indirect=True)
def test_the_host_waits_for_what_it_reads_and_for_no_more(fake_cuda: FakeCuda) -> None:
    device = torch.device("cuda")
    values = transfer.to_device(torch.arange(5), device) * 3
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        torch.ones(2, device=device).add_(1)
    assert transfer.to_host(values).tolist() == [0, 3, 6, 9, 12]
    assert fake_cuda.host_waits_seen == ["event.synchronize"]


def test_the_thread_that_waits_for_values_sleeps(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take a core that training needs."""
    waited, stock = [], FakeEvent.synchronize
    monkeypatch.setattr(FakeEvent, "synchronize", lambda event: waited.append(event.blocking) or stock(event))
    assert transfer.to_host(torch.arange(3, device="cuda") * 2).tolist() == [0, 2, 4]
    assert waited == [True]


def test_what_lies_in_page_locked_memory_is_copied_by_the_device_alone(fake_cuda: FakeCuda) -> None:
    """As the files of a batch do in a slab: the host is not asked for a copy."""
    memory = torch.arange(64, dtype=torch.uint8)
    fake_cuda.host_register(memory.data_ptr(), memory.nbytes, 0)
    sent = transfer.to_device(memory[8:40], torch.device("cuda", 0))
    memory.fill_(9)
    assert sent.cpu().tolist() == [9] * 32, "the device reads the memory itself, once it comes to it"
    assert fake_cuda.host_waits_seen == ["copy to the host"]
