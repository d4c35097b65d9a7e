"""Ctrl-C and SIGTERM during a run: stop launching steps, and leave cleanly."""

from __future__ import annotations

import signal
import threading
from typing import Any


class StopSignals:
    """While entered in the main thread, turns the first SIGINT or SIGTERM into a request to stop.

    A second SIGINT raises KeyboardInterrupt at once. The handlers that were there are restored on leaving. In any
    other thread nothing is installed. `received` is the name of the first signal, or None.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be put back by it.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
