"""Every test of the sink must end without child processes and without threads of its own."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from simulators.fake_cuda import fake_cuda, rehearse

from sink.simulated_device import ImmediateOps
from torch_sink.sink import loader as loader_module
from torch_sink.sink.producer import Producer
from torch_sink.sink.ring import DeviceRing

__all__ = ["fake_cuda", "rehearse"]


@pytest.fixture(autouse=True)
def rehearsed(rehearse: None) -> None:
    """CUDA tests run everywhere, on what there is."""


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = {child.pid for child in worker_processes()}
    threads = set(threading.enumerate())
    yield
    gc.collect()
    deadline = time.monotonic() + 30  # on a busy machine; how soon they have to end, their own tests say
    for left in (*multiprocessing.active_children(), *(set(threading.enumerate()) - threads)):
        left.join(max(deadline - time.monotonic(), 0))
    children = [child for child in worker_processes() if child.pid not in before]
    assert not psutil.wait_procs(children, timeout=max(deadline - time.monotonic(), 0))[1]
    assert not set(threading.enumerate()) - threads


def wait_for(producer: Producer, condition: Callable[[], bool]) -> None:
    """Waits until something holds of what the producer's thread guards."""
    with producer.changed:
        assert producer.changed.wait_for(condition, 60)


@pytest.fixture
def on_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device ring whose device is the host."""
    monkeypatch.setattr(
        loader_module,
        "make_slots",
        lambda form, slots, max_bytes: DeviceRing(slots or 3, form, ImmediateOps(), max_bytes),
    )


@pytest.fixture(params=["host", "ring"])
def place(request: pytest.FixtureRequest) -> str:
    """Slots on the host, and a device ring whose device is the host."""
    if request.param == "ring":
        request.getfixturevalue("on_a_ring")
    return request.param


def worker_processes() -> list[psutil.Process]:
    """Child processes, without the two helpers that Python's multiprocessing keeps until the interpreter exits."""
    helpers = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
    return [child for child in psutil.Process().children(recursive=True) if not runs_any(child, helpers)]


def runs_any(process: psutil.Process, modules: tuple[str, ...]) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True
    return any(module in command for module in modules)
