"""Which way a call takes through the package: a trace of the functions that run, by file."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch_sink

PACKAGE = str(Path(torch_sink.__file__).resolve().parent)


class CallPath:
    """The calls of functions of the package, comprehensions among them, while it is active; in one thread.

    Attributes:
        calls: file and function of each.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def follow(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function, and notes what it calls; garbage of earlier code is collected before and after."""
        gc.collect()
        gc.disable()
        sys.setprofile(self._note)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(None)
            gc.enable()

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.calls.append((frame.f_code.co_filename, frame.f_code.co_name))

    @property
    def files(self) -> list[str]:
        """The files in the order in which they are entered, one after the other."""
        names = [Path(file).relative_to(PACKAGE).as_posix() for file, _ in self.calls]
        return [name for name, before in zip(names, [None, *names], strict=False) if name != before]

    @property
    def returns(self) -> int:
        """How often a file is entered that was left before."""
        return len(self.files) - len(set(self.files))


def count_calls(function: Callable[[], Any], *events: str) -> int:
    """How many functions of Python are called, or those of the profiler's `events`, such as "call" and "c_call"."""
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in (events or ("call",))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls
