"""Backward passes: torch's own engine, in the calling thread, with what a capture forbids it, and what it asks the driver."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .device import FakeCuda

TORCH = Path(torch.__file__).parent
HEADER = TORCH / "include/ATen/detail/AcceleratorHooksInterface.h"
ENTRIES = 64  # more than the table has
Answer = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)


def backward_of(cuda: FakeCuda, run: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass of the engine; inside a capture a node of another stream is found as the driver finds it."""

    def backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
        handles, before = [], cuda.in_thread_of_engine
        if cuda.captures.here() is not None:
            handles = [node.register_prehook(partial(_check_stale, cuda)) for node in _accumulating_nodes(roots)]
        try:
            cuda.in_thread_of_engine = before or torch._C._is_multithreading_enabled()
            with single_threaded():
                return run(roots, *args, **kwargs)
        finally:
            cuda.in_thread_of_engine = before
            for handle in handles:
                handle.remove()

    return backward


def _check_stale(cuda: FakeCuda, gradients: Any) -> None:
    capture, stream = cuda.captures.here(), cuda.current_stream()
    if capture is not None and stream not in capture.streams and not cuda.overrides_stale_streams:
        capture.fail(f"operation not permitted when stream is capturing (AccumulateGrad of {stream})")


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """The engine has no threads for devices that are not there."""
    before = torch._C._is_multithreading_enabled()
    torch._C._set_multithreading_enabled(False)
    try:
        yield
    finally:
        torch._C._set_multithreading_enabled(before)


def _accumulating_nodes(roots: Any) -> list[Any]:
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen, found = set(), []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.append(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


class Contexts:
    """Answers for the driver, where torch asks it whether a device has a context, without which nothing runs there.

    Autograd asks it before each backward pass, below everything that Python can reach, and there is no device to ask. So
    the object that answers gets a copy of its table of virtual functions with one of them replaced.
    """

    def __init__(self) -> None:
        find = ctypes.CDLL(str(TORCH / "lib/libtorch_cpu.so"))["_ZN2at6detail12getCUDAHooksEv"]
        find.restype = ctypes.c_void_p
        self._object = find()
        self._place = ctypes.c_void_p.from_address(self._object)
        self._original = self._place.value
        functions = (ctypes.c_void_p * ENTRIES).from_address(self._original)
        is_built = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(functions[_entry("isBuilt")])
        if not is_built(self._object):
            raise RuntimeError("the table of CUDA's hooks is not as its header says")
        self._table = (ctypes.c_void_p * ENTRIES)(*functions)
        self._answer = Answer(lambda _, device: True)
        self._table[_entry("hasPrimaryContext")] = ctypes.cast(self._answer, ctypes.c_void_p).value

    def install(self) -> None:
        """Answer for the driver."""
        self._place.value = ctypes.addressof(self._table)

    def remove(self) -> None:
        """Let the driver answer again."""
        self._place.value = self._original


def _entry(name: str) -> int:
    """Position of a function in the table: that in the class, behind the two destructors."""
    names = re.findall(r"\bvirtual\b[^(;]*?(~?\w+)\(", HEADER.read_text())
    if names[0] != "~AcceleratorHooksInterface":
        raise RuntimeError(f"{HEADER} does not begin with the destructor")
    return names.index(name) + 1
