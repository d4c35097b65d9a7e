"""Signals that end a run: they are noted while it goes on, and do afterwards what they do elsewhere."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_sink.loop.callbacks import Callback


def signals_asked_for(callbacks: Iterable[Callback]) -> set[int]:
    """The signals after which `run` returns."""
    return {number for callback in callbacks for number in callback.stop_signals}


@contextmanager
def stop_signals(callbacks: Iterable[Callback]) -> Iterator[list[str]]:
    """Gives a list to which SIGINT, SIGTERM and the callbacks' `stop_signals` add their names when they arrive.

    On leaving, also by an error, the handlers that were there are restored, and a SIGINT or SIGTERM that no callback
    asked for does what it would have done: KeyboardInterrupt, the end of the process, or a handler of the user's. A
    second SIGINT is a KeyboardInterrupt at once. Signals that the process ignores, as SIGINT where a script starts it
    in the background, stay ignored. In the main thread only.
    """
    received: list[str] = []

    def handle(number: int, frame: Any) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    asked_for = signals_asked_for(callbacks)
    usual = {number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN}
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous: dict[int, Any] = {}
    try:
        for number in (usual | asked_for) if in_main_thread else ():
            previous[number] = signal.signal(number, handle)
        yield received
    except KeyboardInterrupt:
        asked_for.add(signal.SIGINT)  # a second one has done what it does
        raise
    finally:
        for number, handler in previous.items():
            # None: the handler was not installed from Python and cannot be put back by it.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for number in previous:
            if number not in asked_for and signal.Signals(number).name in received:
                signal.raise_signal(number)
