"""Nothing outlives its SinkLoader: garbage collection and interpreter exit close what the user did not."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch_sink.common import after_fork_in_child

_lives: weakref.WeakSet[Life] = weakref.WeakSet()
_left: list[Callable[[], object]] = []  # close at exit: no thread can be started for them any more


class Life:
    """The life of a SinkLoader: whether it can still be used, and what closes it.

    `close` runs once: called by the user, by garbage collection or at exit. `ended` is the error message once the
    loader cannot be used; checking it is cheaper than asking for the process id at each fetch.
    """

    def __init__(self, loader: Any, producer: Any, opener: Any, slots: Any) -> None:
        self.ended: str | None = None
        self.is_foreign = False  # in a child of the process that the SinkLoader belongs to
        self.close = weakref.finalize(loader, self._end, producer, opener, slots)
        self.close.atexit = False  # weakref's own exit hook may run after torch's
        _lives.add(self)
        run_first_at_exit()

    def _end(self, producer: Any, opener: Any, slots: Any) -> None:
        """Closes producer, workers and memory, in this order; not in a forked child, which owns none of them."""
        if self.is_foreign:
            return
        self.ended = "this SinkLoader is closed; make a new one"
        closing = [producer.close, opener.close, slots.close]
        if threading.current_thread() is producer.thread:
            # Garbage was collected in the thread that is to be stopped, which waits for nobody.
            try:
                threading.Thread(target=_call_all, args=(closing,), name="torch_sink-close").start()
            except RuntimeError:  # from Python 3.12 on, once the interpreter ends
                _left.extend(closing)
        else:
            _call_all(closing)


def _end_lives_of_parent() -> None:
    for life in list(_lives):
        life.is_foreign = True
        life.ended = (
            "this SinkLoader was made before os.fork(); its thread and workers belong to the parent process. "
            "Make a new SinkLoader in the child."
        )


after_fork_in_child(_end_lives_of_parent)


def run_first_at_exit() -> None:
    """Makes our exit hook the latest, which runs first: before torch forbids the shutdown of workers.

    Called again when workers were started: torch may have registered a hook that waits 5 s for each of them.
    """
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    _call_all([*(life.close for life in list(_lives)), *_left])


def _call_all(closing: Iterable[Callable[[], object]]) -> None:
    """Calls all in order, even if one raises, as the cleanup of a user's generator may."""
    with contextlib.ExitStack() as stack:
        for close in reversed(list(closing)):
            stack.callback(close)
