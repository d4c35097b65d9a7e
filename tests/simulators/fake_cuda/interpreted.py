"""Triton's interpreter on the memory of the fake device, in a process that has it from its start."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from triton.runtime.interpreter import GridExecutor

from .device import FakeCuda
from .kernels import check_pointers


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
