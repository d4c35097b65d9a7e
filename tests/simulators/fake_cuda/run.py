"""Runs what Python runs, on the fake device: `python tests/simulators/fake_cuda/run.py SCRIPT ...` or `... -m MODULE ...`.

The file `python` beside this one is a Python that does so, and `sys.executable` there: `make gpu` runs on the fake device
as `make gpu GPU_PYTHON=tests/simulators/fake_cuda/python`. Processes that Python itself starts, such as data workers, see no device.

Triton's kernels are compiled, and executed on the CPU without a look for races, which takes long; with the environment
variable TRITON_INTERPRET=1 they are interpreted. Nothing else is compiled. The profiler sees a kernel and a copy in
each piece of work, or nothing where the environment variable FAKE_CUDA_PROFILER is "blind".
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples" / "benchmarks")]

import pytest  # noqa: E402
import torch  # noqa: E402

import harness  # noqa: E402
from kernels import quick_interpreter  # noqa: E402
from simulators.executor.on_fake_cuda import compiled_on_fake_cuda  # noqa: E402
from simulators.executor.ptx.machine import Options  # noqa: E402
from simulators.fake_cuda import FakeCuda  # noqa: E402
from simulators.fake_cuda.interpreted import interpret_in_place  # noqa: E402
from torch_sink.loop.core import host_sync  # noqa: E402
from torch_sink.triton_kernels.launching import is_interpreted  # noqa: E402


def spans(work: Callable[[], Any]) -> list[tuple[str, int, int]]:
    """In the place of the profiler's."""
    harness.seconds_of(work)
    blind = os.environ.get("FAKE_CUDA_PROFILER") == "blind"
    return [] if blind else [("some_kernel", 0, 10_000), ("Memcpy DtoD", 20_000, 30_000)]


def uncompiled(model: Any = None, **_: Any) -> Any:
    """In the place of `torch.compile`, which would write kernels for the device."""
    return (lambda function: function) if model is None else model


def main(command: list[str]) -> None:
    multiprocessing.set_executable(sys.executable)
    os.environ["FAKE_CUDA_BASE"], sys.executable = sys.executable, str(Path(__file__).with_name("python"))
    patch = pytest.MonkeyPatch()
    cuda = FakeCuda()
    cuda.install(patch)
    below_python = [str(path) for path in Path(__file__).parent.glob("*.py")]  # no line of these is a user's
    patch.setattr(host_sync, "_WATCHING_FILES", (*host_sync._WATCHING_FILES, *below_python))
    patch.setattr(harness, "device_spans", spans)
    patch.setattr(torch, "compile", uncompiled)
    patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 34, 1 << 35))
    if command[:2] == ["-m", "pytest"]:
        command[2:2] = ["-p", "simulators.fake_cuda.left_out"]
    if is_interpreted():
        interpret_in_place(patch, cuda)
        quick_interpreter.install(check_overflow=False)
        run(command)
        return
    with compiled_on_fake_cuda(cuda, Options(races=False)) as executor:
        try:
            run(command)
        finally:
            if executor.faults:
                sys.exit("\n".join(["kernels did what none may do:", *executor.faults]))


def run(command: list[str]) -> None:
    """As Python does, in this process."""
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = command, str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
