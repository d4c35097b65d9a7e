"""Runs what Python runs, on the fake device: `python tests/fake_cuda/run.py SCRIPT ...` or `... -m MODULE ...`.

Triton's kernels run in its interpreter, nothing is compiled, and the profiler sees a kernel and a copy in each piece of
work, or nothing where the environment variable FAKE_CUDA_PROFILER is "blind".
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples" / "benchmarks")]

import pytest  # noqa: E402
import torch  # noqa: E402
from triton.runtime.interpreter import GridExecutor  # noqa: E402

import harness  # noqa: E402
from fake_cuda import FakeCuda  # noqa: E402
from fake_cuda.kernels import check_pointers  # noqa: E402
from kernels import quick_interpreter  # noqa: E402


def spans(work: Callable[[], Any]) -> list[tuple[str, int, int]]:
    """In the place of the profiler's."""
    harness.seconds_of(work)
    blind = os.environ.get("FAKE_CUDA_PROFILER") == "blind"
    return [] if blind else [("some_kernel", 0, 10_000), ("Memcpy DtoD", 20_000, 30_000)]


def interpret_in_place(patch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    """Interpreted kernels read and write the device's memory, which is the host's, when all before them is done.

    Triton copies what they get to the host; what lies at an address that they get would be elsewhere. And it interprets
    for one thread at a time.
    """
    launch, lock = GridExecutor.__call__, threading.RLock()

    def one_at_a_time(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return launch(self, *args, **kwargs)

    def as_they_are(self: GridExecutor, args: Any, kwargs: Any) -> tuple[Any, Any]:
        check_pointers(cuda, args)
        cuda.queues.drain()
        return args, kwargs

    patch.setattr(GridExecutor, "__call__", one_at_a_time)
    patch.setattr(GridExecutor, "_init_args_hst", as_they_are)
    patch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)


def uncompiled(model: Any = None, **_: Any) -> Any:
    """In the place of `torch.compile`, which would write kernels for the device."""
    return (lambda function: function) if model is None else model


def main(command: list[str]) -> None:
    patch = pytest.MonkeyPatch()
    cuda = FakeCuda()
    cuda.install(patch)
    interpret_in_place(patch, cuda)
    patch.setattr(harness, "device_spans", spans)
    patch.setattr(torch, "compile", uncompiled)
    patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    quick_interpreter.install(check_overflow=False)
    sys.argv = command[1:] if command[0] == "-m" else command
    if command[0] == "-m":
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
