"""`pytest -p simulators.executor.plugin`: tests of the folder `interpreted` run with compiled kernels instead.

A test fails where a kernel does what none may do. With the environment variable KERNELS_ON_FAKE_CUDA=1 they run as on
a machine with a GPU: the device is the fake one, and a kernel takes no tensor that a real one would not take.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import pytest

from simulators.executor.on_fake_cuda import compiled_on_fake_cuda
from simulators.executor.project import Executor, compiled_on_cpu, load_kernels
from simulators.fake_cuda import FakeCuda

load_kernels()
_cuda = FakeCuda() if os.environ.get("KERNELS_ON_FAKE_CUDA") == "1" else None
if _cuda is not None:
    _cuda.install(pytest.MonkeyPatch())
else:
    # The kernels are loaded: from now on it only says that they take tensors of the CPU.
    os.environ["TRITON_INTERPRET"] = "1"
_launches: Counter[str] = Counter()


@pytest.fixture(scope="session")
def executor() -> Iterator[Executor]:
    with compiled_on_cpu() if _cuda is None else compiled_on_fake_cuda(_cuda) as executor:
        yield executor
    _launches.update(executor.launches)


@pytest.fixture(autouse=True)
def _without_faults(executor: Executor) -> Iterator[None]:
    executor.findings.clear()
    yield
    if _cuda is not None:
        _cuda.queues.drain()
    assert not executor.faults


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for kernel, times in sorted(_launches.items()):
        terminalreporter.write_line(f"launched {kernel} {times} times")
