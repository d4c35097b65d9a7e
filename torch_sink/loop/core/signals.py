"""Signals that arrive during a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_signals(asked_for: Collection[int]) -> Iterator[list[str]]:
    """A context with a list of the names of signals that arrive: SIGINT, SIGTERM and those that are asked for.

    At the end, also after an error, the former handlers are restored. A SIGINT or SIGTERM that nobody asked for then
    has its usual effect: KeyboardInterrupt, the end of the process, or the user's handler. A second SIGINT raises
    KeyboardInterrupt at once. Signals that the process ignores, such as SIGINT in a background job, stay ignored. Other
    threads than the main thread get an empty list.
    """
    received: list[str] = []

    def handle(number: int, frame: Any) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    has_had_effect = {*asked_for}
    usual = {number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN}
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous: dict[int, Any] = {}
    try:
        for number in usual.union(asked_for) if in_main_thread else ():
            previous[number] = signal.signal(number, handle)
        yield received
    except KeyboardInterrupt:
        has_had_effect.add(signal.SIGINT)
        raise
    finally:
        for number, handler in previous.items():
            # None: the handler was not installed from Python, which cannot restore it.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for number in previous:
            if number not in has_had_effect and signal.Signals(number).name in received:
                signal.raise_signal(number)
