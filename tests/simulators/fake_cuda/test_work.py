"""Kernels give the CPU's numbers, in the order that streams and events ask for and in no other."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from loop.reference import make_batches, make_model
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from .device import FakeCuda

pytestmark = pytest.mark.halved

SEEDS = range(12)
any_order = pytest.mark.parametrize("fake_cuda", [{"seed": seed, "devices": 2} for seed in SEEDS], indirect=True)


def train(device: str, make_optimizer: Any) -> list[Tensor]:
    model = make_model(dropout=0.0).to(device)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for inputs, targets in make_batches(4):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return [value.cpu() for value in (*losses, *model.state_dict().values())]


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    ],
    ids=["SGD", "Adam fused", "RMSprop foreach"],
)
def test_training_has_the_bits_of_the_cpu(fake_cuda: FakeCuda, make_optimizer: Any) -> None:
    ours, plain = train("cuda", make_optimizer), train("cpu", make_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_memory_is_garbage_until_a_kernel_has_run(fake_cuda: FakeCuda) -> None:
    made = torch.empty(3, device="cuda")
    assert made.isnan().all()
    assert made.is_cuda
    assert type(made) is Tensor
    assert torch.full((2,), 7.0, device="cuda").cpu().tolist() == [7.0, 7.0]
    assert torch.arange(3, device="cuda").sum().item() == 3


def read_on_another_stream(waits: bool) -> Tensor:
    source = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    source.add_(1)
    if waits:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copy = source * 1
    torch.cuda.synchronize()
    return copy.cpu()


@any_order
def test_a_wait_orders_streams(fake_cuda: FakeCuda) -> None:
    assert read_on_another_stream(waits=True).tolist() == [1] * 4


def test_a_missing_wait_shows_in_some_order(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("a machine with CUDA has its own")
    seen = set()
    for seed in SEEDS:
        cuda = FakeCuda(seed=seed)
        with monkeypatch.context() as patch:
            cuda.install(patch)
            seen.add(read_on_another_stream(waits=False)[0].item())
            cuda.remove()
    assert seen == {0.0, 1.0}


@pytest.mark.parametrize("waits", [True, False])
def test_staging_memory_is_read_when_the_copy_runs(fake_cuda: FakeCuda, waits: bool) -> None:
    staging = torch.empty(2, pin_memory=True)
    assert staging.is_pinned()
    assert not torch.empty(2).is_pinned()
    staging.fill_(1)
    target = torch.empty(2, device="cuda")
    target.copy_(staging, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    if waits:
        event.synchronize()
    staging.fill_(2)
    assert target.tolist() == ([1.0, 1.0] if waits else [2.0, 2.0])


def test_pageable_memory_is_taken_over_at_once(fake_cuda: FakeCuda) -> None:
    source = torch.ones(2)
    target = torch.empty(2, device="cuda")
    target.copy_(source, non_blocking=True)
    source.fill_(2)
    assert target.tolist() == [1.0, 1.0]


@any_order
@pytest.mark.parametrize("records", [True, False])
def test_freed_memory_is_overwritten_on_the_stream_it_came_from(fake_cuda: FakeCuda, records: bool) -> None:
    stream = torch.cuda.Stream()
    source = torch.ones(2, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            copy = source * 1
    if records:
        source.record_stream(stream)
    del source
    torch.empty(2, device="cuda")
    torch.cuda.synchronize()
    if records:
        assert copy.tolist() == [1.0, 1.0]
    else:
        # In some orders the reader is quick enough, as on a device.
        assert copy.tolist() == [1.0, 1.0] or copy.isnan().all()


@pytest.mark.parametrize("mode", ["warn", "error"])
@pytest.mark.parametrize(
    "read",
    [lambda t: t.item(), lambda t: t.nonzero(), lambda t: t.cpu(), lambda t: t[t > 0], lambda t: torch.ones(1).to(t)],
    ids=["item", "nonzero", "cpu", "mask", "to the device"],
)
def test_the_sync_debug_mode_sees_waits(fake_cuda: FakeCuda, read: Any, mode: str) -> None:
    value = torch.ones(1, device="cuda")
    with pytest.warns(UserWarning, match="prototype"):
        torch.cuda.set_sync_debug_mode(mode)
    if mode == "warn":
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
            read(value)
    else:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            read(value)
    (value + 1).add_(value)
    torch.cuda.synchronize()  # not seen, as by the real one


def test_the_sync_debug_mode_is_one_for_all_threads(fake_cuda: FakeCuda) -> None:
    failures = []

    def read() -> None:
        try:
            torch.ones(1, device="cuda").item()
        except RuntimeError as error:
            failures.append(str(error))

    with pytest.warns(UserWarning, match="prototype"):
        torch.cuda.set_sync_debug_mode("error")
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert failures == ["called a synchronizing CUDA operation"]


@any_order
def test_an_event_is_recorded_on_the_current_device(fake_cuda: FakeCuda) -> None:
    value = torch.zeros(1, device="cuda:1")
    assert value.device.index == 1
    assert torch.cuda.current_device() == 0
    value.add_(1)
    event = torch.cuda.Event()
    event.record()
    assert event.recorded_on == torch.cuda.current_stream(0)
    with torch.cuda.device(1):
        other = torch.cuda.Event()
        other.record()
        assert torch.empty(1, device="cuda").device.index == 1
        with pytest.raises(RuntimeError, match="Event device cuda:0 does not match"):
            event.record()
    other.synchronize()
    assert fake_cuda.allocator.on_host(value).item() == 1


@pytest.mark.parametrize("fake_cuda", [{"devices": 2}], indirect=True)
@pytest.mark.parametrize("where", [None, "cpu", "cuda", "cuda:1", {"cuda:1": "cuda:0"}])
def test_saved_tensors_are_loaded_where_they_were_or_elsewhere(fake_cuda: FakeCuda, where: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2).to("cuda:1")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 3, device="cuda:1")).sum().backward()
    optimizer.step()
    saved = {
        "weight": model.weight,
        "row": model.weight.detach()[1],
        "moment": optimizer.state[model.weight]["exp_avg"],
    }
    torch.save({**saved, "host": torch.ones(2)}, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", map_location=where)
    device = {None: "cuda:1", "cuda": "cuda:0"}.get(where, where) if not isinstance(where, dict) else "cuda:0"
    assert {name: str(loaded[name].device) for name in saved} == dict.fromkeys(saved, device)
    assert loaded["host"].is_cuda == (where in ("cuda", "cuda:1"))
    assert all(torch.equal(loaded[name].cpu(), tensor.cpu()) for name, tensor in saved.items())
    loaded["weight"].data.add_(1)
    assert torch.equal(loaded["row"].cpu(), saved["row"].cpu() + 1), "views of one storage"


@pytest.mark.parametrize("fake_cuda", [{"devices": 2}], indirect=True)
def test_two_devices_have_events_and_waits_of_their_own(fake_cuda: FakeCuda) -> None:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for index, event in enumerate(events):
        event.record(torch.cuda.current_stream(index))
    torch.cuda.synchronize(1)
    assert events[1].query()
    torch.cuda.synchronize()
    assert events[0].query()
    with pytest.raises(RuntimeError, match="two devices"):
        events[0].elapsed_time(events[1])


def test_autograd_runs_on_the_stream_of_the_forward_pass(fake_cuda: FakeCuda) -> None:
    weight = torch.ones(2, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    seen = []
    with torch.cuda.stream(stream):
        loss = (weight * 2).sum()
        loss.register_hook(lambda gradient: seen.append(torch.cuda.current_stream()))
    loss.backward()
    assert seen == [stream]
    assert torch.cuda.current_stream() != stream


def test_backward_passes_run_in_a_thread_of_the_engine(fake_cuda: FakeCuda) -> None:
    """Where they see the streams, modes and autocast of the thread that asked, and nothing that Python keeps for it."""
    threads, here = [], threading.local()
    here.known = True

    def look(gradient: Tensor) -> None:
        threads.append((threading.current_thread().name, hasattr(here, "known"), torch.is_autocast_enabled("cuda")))
        modes.append(len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()))

    modes: list[int] = []
    weight = torch.ones(2, device="cuda", requires_grad=True)
    loss = (weight * 2).sum()
    loss.register_hook(look)
    with torch.autocast("cuda"), FlopCounterMode(display=False):
        loss.backward(retain_graph=True)
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward()
    assert threads == [(fake_cuda.engine.name, False, True), ("MainThread", True, False)]
    assert modes == [1, 0]
    loss = (weight * 2).sum()
    loss.register_hook(lambda gradient: fail())
    with pytest.raises(ValueError, match="in a hook") as failed:
        loss.backward()
    assert any(frame.name == "fail" for frame in traceback.extract_tb(failed.value.__traceback__))


def fail() -> None:
    raise ValueError("in a hook")


def test_kernels_without_a_deterministic_form_say_so(fake_cuda: FakeCuda) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        value = torch.ones(1, 1, 4, 4, device="cuda", requires_grad=True)
        torch.nn.AvgPool2d(2)(value).sum().backward()
        with pytest.warns(UserWarning, match=r"_adaptive_avg_pool2d_backward does not have a deterministic"):
            torch.nn.AdaptiveAvgPool2d(2)(value).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


ON_TWO_DEVICES: dict[str, Any] = {
    "a sum": lambda device, host: device + host,
    "a sum in place": lambda device, host: device.add_(host),
    "a comparison of all values": lambda device, host: torch.equal(device, host),
    "a comparison with a number": lambda device, host: torch.equal(device[0], host[0]),
    "two devices": lambda device, host: device * host.to("cuda:1"),
    "a choice": lambda device, host: torch.where(host > 0, device, 0),
    "several": lambda device, host: torch.cat([device, host]),
}


@pytest.mark.parametrize("fake_cuda", [{"devices": 2}], indirect=True)
@pytest.mark.parametrize("name", ON_TWO_DEVICES)
def test_a_kernel_takes_tensors_of_one_device(fake_cuda: FakeCuda, name: str) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        ON_TWO_DEVICES[name](torch.ones(3, device="cuda"), torch.ones(3))


def test_numbers_and_indices_may_lie_on_the_host(fake_cuda: FakeCuda) -> None:
    values = torch.arange(4.0, device="cuda")
    assert (values * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
    assert values[torch.tensor([3, 1])].tolist() == [3, 1]
    values[torch.tensor([0])] = 9.0
    assert torch.where(values > 1, values, torch.tensor(-1.0)).tolist() == [9, -1, 2, 3]


LACKING_KERNELS: dict[str, Any] = {
    "a product of integers": lambda: (
        torch.ones(2, 2, dtype=torch.int64, device="cuda") @ torch.ones(2, 2, dtype=torch.int64, device="cuda")
    ),
    "pooling bytes": lambda: functional.max_pool2d(torch.ones(1, 1, 4, 4, dtype=torch.uint8, device="cuda"), 2),
    "resizing bytes": lambda: functional.interpolate(
        torch.ones(1, 1, 4, 4, dtype=torch.uint8, device="cuda"), (2, 2), mode="bilinear", antialias=True
    ),
    "adding uint16": lambda: torch.ones(2, dtype=torch.uint16, device="cuda") + 1,
}


@pytest.mark.parametrize("name", LACKING_KERNELS)
def test_cuda_has_no_kernel(fake_cuda: FakeCuda, name: str) -> None:
    with pytest.raises(NotImplementedError, match='_cuda" not implemented for torch'):
        LACKING_KERNELS[name]()
