"""Backward passes: torch's own engine, in a thread of the device, with what a capture forbids it, and what it asks the driver."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

if TYPE_CHECKING:
    from .device import FakeCuda

TORCH = Path(torch.__file__).parent
HEADER = TORCH / "include/ATen/detail/AcceleratorHooksInterface.h"
ENTRIES = 64  # more than the table has
Answer = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)


class EngineThread:
    """The thread in which autograd runs the backward passes of a device, with the state of the thread that asks for one.

    That is what torch hands on: streams, modes that see operators and functions, autocast. What Python keeps for a
    thread, such as a `threading.local`, is not.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="autograd of the fake device", daemon=True)
        self.caller: int | None = None  # the thread for which it works

    @property
    def name(self) -> str:
        """Of the thread."""
        return self._thread.name

    @property
    def is_current(self) -> bool:
        """Whether it is the calling thread."""
        return threading.current_thread() is self._thread

    def call(self, function: Callable[[], Any]) -> Any:
        """What a function returns or raises there."""
        if not self._thread.is_alive():
            self._thread.start()
        answer: Future[Any] = Future()
        self.caller = threading.get_ident()
        try:
            self._asked.put((function, _ThreadState(self._cuda), answer))
            return answer.result()
        finally:
            self.caller = None
            del answer, function  # the traceback of an error holds this frame

    def end(self) -> None:
        """End the thread."""
        self._asked.put(None)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            function, state, answer = asked
            try:
                with state, single_threaded():
                    answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)
            del asked, function, state, answer  # they hold the graph of the backward pass


class _ThreadState:
    """State of the calling thread; as a context, in another thread."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._device = torch._C._accelerator_getDeviceIndex()
        self._streams = [cuda.current_stream(index) for index in range(cuda.device_count)]
        self._dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack()
        self._function_modes = overrides._get_current_function_mode_stack()
        self._autocast = [
            torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in ("cuda", "cpu")
        ]  # fmt: skip

    def __enter__(self) -> None:
        for stream in self._streams:
            torch._C._accelerator_setStream(stream.handle)
        torch._C._accelerator_setDeviceIndex(self._device)
        for context in self._autocast:
            context.__enter__()
        for mode in self._function_modes:
            overrides._push_mode(mode)
        for mode in self._dispatch_modes:
            _python_dispatch._push_mode(mode)

    def __exit__(self, *error: Any) -> None:
        for _ in self._dispatch_modes:
            _python_dispatch._pop_mode()
        for _ in self._function_modes:
            overrides._pop_mode()
        for context in reversed(self._autocast):
            context.__exit__(*error)


def backward_of(cuda: FakeCuda, run: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass of the engine, in its thread unless it was told otherwise.

    Inside a capture a node of another stream is found as the driver finds it.
    """

    def backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
        handles, engine = [], cuda.engine
        if cuda.captures.here() is not None:
            handles = [node.register_prehook(partial(_check_stale, cuda)) for node in _accumulating_nodes(roots)]
        try:
            if torch._C._is_multithreading_enabled() and not engine.is_current and any(one.is_cuda for one in roots):
                return engine.call(partial(run, roots, *args, **kwargs))
            with single_threaded():
                return run(roots, *args, **kwargs)
        finally:
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
