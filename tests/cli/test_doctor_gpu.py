"""What the doctor says on a machine with a GPU: one kernel is launched there, and what keeps it from that is named."""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from simulators.executor.target import Launched, target_only

from torch_sink.cli import doctor

pytestmark = pytest.mark.once


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """One that has a GPU and everything that Triton needs."""
    include, programs = tmp_path / "include", tmp_path / "bin"
    include.mkdir()
    programs.mkdir()
    (include / "Python.h").write_text("")
    (programs / "gcc").write_text("#!/bin/sh\n")
    (programs / "gcc").chmod(0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(include)})
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return monkeypatch


def test_a_kernel_is_launched(machine: pytest.MonkeyPatch) -> None:
    on_device: list[Any] = []

    def run(launched: Launched) -> None:
        launched.arguments[0][0] = not on_device  # a device that is right the first time only
        on_device.append((launched.kernel, launched.grid))

    launch = doctor.launch
    machine.setattr(doctor, "launch", lambda device: launch(torch.device("cpu")))
    with target_only(run):
        found, again = doctor._check_kernels(), doctor._check_kernels()
    assert found.state == "ok", found
    assert on_device == [("probe_kernel", (1, 1, 1))] * 2
    assert found.detail.startswith("one was compiled and launched in ")
    assert again.state == "broken"
    assert "the kernel that writes 1 left [0, 0" in again.detail


def no_compiler(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("PATH", "/no/such/folder")


def wrong_compiler(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("CC", "/no/such/cc")


def no_header(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(sysconfig, "get_paths", lambda: {"include": "/no/such/include"})


def no_cache(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("TRITON_CACHE_DIR", "/proc/no such folder")


def nothing(machine: pytest.MonkeyPatch) -> None:
    pass


COMPILER_FAILED = subprocess.CalledProcessError(1, ["gcc", "driver.c"])


@pytest.mark.parametrize(
    ("fault", "error", "detail", "remedy"),
    [
        (no_compiler, RuntimeError("Failed to find C compiler."), "neither gcc nor clang", "apt install gcc"),
        (wrong_compiler, FileNotFoundError("/no/such/cc"), "CC=/no/such/cc is none", "CC=/path/to/cc"),
        (no_header, COMPILER_FAILED, "needs Python.h, and it is not in /no/such/include", "apt install python3."),
        (no_cache, FileNotFoundError("/proc"), "cache /proc/no such folder cannot be written", "TRITON_CACHE_DIR"),
        (
            nothing,
            RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
            "the driver is too old for what Triton assembles (RuntimeError: Triton Error",
            "update the NVIDIA driver",
        ),
        (nothing, AssertionError("libcuda.so cannot found!\nPlease"), "does not find libcuda.so.1", "ldconfig"),
        (nothing, KeyError("new"), "KeyError: 'new'", "report it"),
    ],
)
def test_what_keeps_a_kernel_from_being_launched(
    machine: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    error: Exception,
    detail: str,
    remedy: str,
) -> None:
    def fail(device: torch.device) -> float:
        raise error

    fault(machine)
    machine.setattr(doctor, "launch", fail)
    found = doctor._check_kernels()
    assert found.state == "broken"
    assert detail in found.detail
    assert remedy in found.remedy
    assert "\n" not in found.detail


@pytest.mark.parametrize("fault", [no_compiler, no_header])
def test_what_only_the_cache_hides(machine: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    fault(machine)
    machine.setattr(doctor, "launch", lambda device: 0.1)
    found = doctor._check_kernels()
    assert found.state == "missing"
    assert "what is in Triton's cache runs; for the rest Triton needs" in found.detail


@pytest.mark.parametrize(
    ("error", "cuda", "remedy"),
    [
        (RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease"), "13.0", "update"),
        (RuntimeError("No CUDA GPUs are available"), "13.0", "nvidia-smi"),
        (AssertionError("Torch not compiled with CUDA enabled"), None, "build of torch for CUDA"),
        (None, "13.0", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_gpu_that_torch_cannot_use(
    error: Exception | None, cuda: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_has_nvidia_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = doctor._check_device()
    assert found.state == "broken"
    assert remedy in found.remedy
    assert error is None or str(error).partition("\n")[0] in found.detail
