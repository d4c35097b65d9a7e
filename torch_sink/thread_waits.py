"""Where the host may wait, and who is told when it does: for each thread by itself, unlike torch's sync debug mode."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Any

import torch

_WAITS = "called a synchronizing CUDA operation"


class _Here(threading.local):
    """What holds for this thread."""

    allowances = watches = 0  # regions that allow waits, and watches that look for them
    report: Callable[[], None] | None = None  # called when torch sees a wait for the device


here = _Here()
# Held while a CUDA graph is captured: a wait for the whole device, in whatever thread, would be the capture's end.
capture_lock = threading.RLock()
_mode_is_ours = False


class host_sync_allowed(ContextDecorator):
    """Inside `no_host_sync()`: a region of this thread in which the host may wait, such as a sink's end.

    A class, because every step enters it and a generator would cost three times as much. Decorates functions too.
    """

    def _recreate_cm(self) -> host_sync_allowed:
        return host_sync_allowed()  # for each call its own

    def __enter__(self) -> None:
        here.allowances += 1
        # Where the mode is ours, a wait in here is passed over; where it is the user's, only switching it off helps.
        self._cuda_mode = 0 if _mode_is_ours else _cuda_debug_mode()
        if self._cuda_mode:
            _set_cuda_debug_mode(0)

    def __exit__(self, *exc_info: object) -> None:
        if self._cuda_mode:
            _set_cuda_debug_mode(self._cuda_mode)
        here.allowances -= 1


@contextmanager
def waits_watched() -> Iterator[None]:
    """Inside a region that allows waits: a part that is watched nevertheless, such as an evaluation in a callback."""
    allowances, here.allowances = here.allowances, 0
    try:
        yield
    finally:
        here.allowances = allowances


@contextmanager
def device_waits(report: Callable[[], None]) -> Iterator[None]:
    """Call `report()` at each wait of this thread for the device that torch's sync debug mode sees.

    The mode is one for the process: producers and loaders may wait as they like, so it warns, and only the warnings of
    this thread count. What `report` raises is raised by the line that waits. Where the user has set the mode, it does
    what it was set for, and nothing is reported.
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

    with warnings.catch_warnings():
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
    """torch warns that its mode does not see every wait, which is why it is one of three ways of looking here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
