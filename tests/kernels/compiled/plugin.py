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

# The tests of images whose lanes do not agree after the last round: noise, or codes made for it. Then two lanes may store
# to one place, and it does not matter which is last: the status of such an image says so, and others decode it.
NOT_CONVERGED = {"test_lanes_that_do_not_agree_are_noticed", "test_damaged_images_are_skipped_or_replaced"}
HARMLESS = ("write_kernel, write.py:", "write after write without barrier")


@pytest.fixture(scope="session")
def executor() -> Iterator[Executor]:
    with compiled_on_cpu() as executor:
        yield executor
    _launches.update(executor.launches)


@pytest.fixture(autouse=True)
def _without_faults(request: pytest.FixtureRequest, executor: Executor) -> Iterator[None]:
    executor.findings.clear()
    yield
    may_collide = getattr(request.node, "originalname", "") in NOT_CONVERGED
    assert not [fault for fault in executor.faults if not (may_collide and all(words in fault for words in HARMLESS))]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for kernel, times in sorted(_launches.items()):
        terminalreporter.write_line(f"launched {kernel} {times} times")
