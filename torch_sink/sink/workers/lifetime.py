"""Nothing outlives its SinkLoader: garbage collection and interpreter exit close what the user did not."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch_sink.common.platforms import after_fork_in_child

_open: set[weakref.finalize[..., Any]] = set()
_lock = threading.Lock()
_lives: weakref.WeakSet[Life] = weakref.WeakSet()


class Life:
    """Whether a SinkLoader can still be used.

    Attributes:
        ended: why it cannot, or None. Each fetch looks at it, so it is set from outside: by a hook after a fork, and
            not by asking the system for the process every time.
    """

    def __init__(self) -> None:
        self.ended: str | None = None
        self._pid = os.getpid()
        _lives.add(self)

    @property
    def is_foreign(self) -> bool:
        """Whether this is a child of the process that the SinkLoader belongs to."""
        return self._pid != os.getpid()


def _end_lives_of_parent() -> None:
    for life in list(_lives):
        life.ended = (
            "this SinkLoader was made before os.fork(); its thread and workers belong to the parent process. "
            "Make a new SinkLoader in the child."
        )


after_fork_in_child(_end_lives_of_parent)


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


def close_parts(producer: Any, source: Any, slots: Any, life: Life) -> None:
    """Closes producer, workers and memory, in this order; does nothing in a forked child, which owns none of them."""
    if life.is_foreign:
        return
    life.ended = "this SinkLoader is closed; make a new one"
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
