"""Where the host may wait for the device, and reports where it does, thread by thread.

torch's sync debug mode, which this uses, is one setting for the whole process.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Any

import torch

_WAITS = "called a synchronizing CUDA operation"


class _Here(threading.local):
    """The state of one thread."""

    allowances = watches = 0  # how many regions that allow waits, and watches for waits, the thread is inside of
    report: Callable[[], None] | None = None  # called when torch sees this thread wait for the device


here = _Here()
# Held while a CUDA graph is captured: a wait for the whole device in any thread would make the capture fail.
capture_lock = threading.RLock()
_mode_is_ours = False  # whether `device_waits` has set torch's sync debug mode


class host_sync_allowed(ContextDecorator):
    """A region of this thread in which the host may wait, even inside `no_host_sync()`; also a decorator.

    It is a class because every step enters it: a generator-based context manager takes three times as long.
    """

    def _recreate_cm(self) -> host_sync_allowed:
        return host_sync_allowed()  # a decorated function may be entered by several threads

    def __enter__(self) -> None:
        here.allowances += 1
        # `device_waits` ignores waits in here; a mode that the user has set has to be switched off.
        self._cuda_mode = 0 if _mode_is_ours else _cuda_debug_mode()
        if self._cuda_mode:
            _set_cuda_debug_mode(0)

    def __exit__(self, *exc_info: object) -> None:
        if self._cuda_mode:
            _set_cuda_debug_mode(self._cuda_mode)
        here.allowances -= 1


@contextmanager
def waits_watched() -> Iterator[None]:
    """A part of a region that allows waits in which they are not allowed, such as an evaluation in a callback."""
    allowances, here.allowances = here.allowances, 0
    try:
        yield
    finally:
        here.allowances = allowances


@contextmanager
def device_waits(report: Callable[[], None]) -> Iterator[None]:
    """Calls `report()` whenever torch's sync debug mode sees this thread wait for the device.

    The mode holds for the whole process, in which producers and loaders may wait. So it is set to warn, and only the
    warnings of this thread count. Its backward passes run in it too, not in a thread that autograd has for the device,
    so that what waits there is seen. An exception of `report` is raised at the line that waits. If the user has set the
    mode, it keeps its effect and nothing is reported.
    """
    global _mode_is_ours
    if _cuda_debug_mode():
        yield
        return
    show = warnings.showwarning

    def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if not str(message).startswith(_WAITS):
            show(message, *args, **kwargs)
        elif here.report is not None and not here.allowances:
            here.report()

    with warnings.catch_warnings(), torch.autograd.set_multithreading_enabled(False):
        warnings.filterwarnings("always", message=_WAITS)
        warnings.showwarning = note  # type: ignore[assignment]
        here.report, _mode_is_ours = report, True
        _set_cuda_debug_mode("warn")
        try:
            yield
        finally:
            _set_cuda_debug_mode("default")
            here.report, _mode_is_ours = None, False


def _cuda_debug_mode() -> int:
    return torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0


def _set_cuda_debug_mode(mode: int | str) -> None:
    """Sets torch's sync debug mode, without its warning that it misses some waits: two other watches see those."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
