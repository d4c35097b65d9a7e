"""`pytest -p kernels.compiled.plugin`: tests of the folder `interpreted` run with compiled kernels, in the executor.

The package is told, by the variable that it looks at, that kernels take tensors of the CPU; the kernels were loaded
before, so they are compiled. Memory that nobody wrote holds garbage. A test fails where a kernel does what none may do.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"

import pytest
import torch

import torch_sink.triton_kernels
from kernels.compiled.executor import Executor, executed
from kernels.compiled.ptx.findings import Finding

for module in pkgutil.walk_packages(torch_sink.triton_kernels.__path__, f"{torch_sink.triton_kernels.__name__}."):
    importlib.import_module(module.name)
os.environ["TRITON_INTERPRET"] = "1"

# What a finding is allowed for, and why it does no harm.
ALLOWED: dict[Finding, str] = {}

STOCK_EMPTY = torch.empty
_GARBAGE = torch.Generator().manual_seed(1)


def empty_with_garbage(*arguments: Any, **options: Any) -> torch.Tensor:
    tensor = STOCK_EMPTY(*arguments, **options)
    if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.dtype != torch.bool:
        memory = STOCK_EMPTY(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        memory.random_(0, 256, generator=_GARBAGE)
    return tensor


@pytest.fixture(scope="session")
def executor() -> Iterator[Executor]:
    with executed() as executor, mock.patch.object(torch, "empty", empty_with_garbage):
        yield executor


@pytest.fixture(autouse=True)
def _no_findings(executor: Executor) -> Iterator[None]:
    executor.findings.clear()
    yield
    found = [f"{finding} ({times} times)" for finding, times in executor.findings.items() if finding not in ALLOWED]
    assert not found


def pytest_terminal_summary(terminalreporter: Any) -> None:
    pass
