"""Nothing outlives its SinkLoader: garbage collection and interpreter exit close what the user did not."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

_open: set[weakref.finalize[..., Any]] = set()
_lock = threading.Lock()


def register(close: weakref.finalize[..., Any]) -> None:
    """Runs `close` at interpreter exit, before torch forbids the shutdown of workers."""
    close.atexit = False  # weakref's own exit hook may run after torch's
    with _lock:
        _open.difference_update([one for one in _open if not one.alive])
        _open.add(close)
    run_first_at_exit()


def run_first_at_exit() -> None:
    """Makes our exit hook the latest, which runs first.

    Called again when workers were started: torch may have registered a hook that waits 5 s for each of them.
    """
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def close_parts(producer: Any, source: Any, slots: Any, pid: int) -> None:
    """Closes producer, workers and memory, in this order; does nothing in a forked child, which owns none of them."""
    if os.getpid() != pid:
        return
    closing = [producer.close, source.close, slots.close]
    if producer.is_running_here():
        # Garbage was collected in the thread that is to be stopped, which waits for nobody.
        threading.Thread(target=_call_all, args=(closing,), name="torch_sink-close").start()
    else:
        _call_all(closing)


def _call_all(closing: Sequence[Callable[[], object]]) -> None:
    """In order, the later ones also when an earlier one raises, as the cleanup of a user's generator may."""
    with contextlib.ExitStack() as stack:
        for close in reversed(closing):
            stack.callback(close)


def _close_all() -> None:
    with _lock:
        closers = list(_open)
    _call_all(closers)
