"""`pytest -p kernels.compiled.plugin`: tests of the folder `interpreted` run with compiled kernels instead.

A test fails where a kernel does what none may do.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import pytest

from kernels.compiled.project import Executor, compiled_on_cpu, load_kernels

load_kernels()
# The kernels are loaded: from now on it only says that they take tensors of the CPU.
os.environ["TRITON_INTERPRET"] = "1"
_launches: Counter[str] = Counter()


@pytest.fixture(scope="session")
def executor() -> Iterator[Executor]:
    with compiled_on_cpu() as executor:
        yield executor
    _launches.update(executor.launches)


@pytest.fixture(autouse=True)
def _without_faults(executor: Executor) -> Iterator[None]:
    executor.findings.clear()
    yield
    assert not executor.faults


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for kernel, times in sorted(_launches.items()):
        terminalreporter.write_line(f"launched {kernel} {times} times")
