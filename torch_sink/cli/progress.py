"""Says what a command does while it measures: a line for each step, with its seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO

Step = Callable[[str], AbstractContextManager[object]]


@contextmanager
def step(doing: str, file: TextIO | None = None) -> Iterator[None]:
    """Prints what is done inside, and then how long it took; by default to stderr, as stdout is for the answer."""
    file = file or sys.stderr
    print(f"{doing} ...", end=" ", file=file, flush=True)
    begun = time.perf_counter()
    try:
        yield
    except BaseException:
        print(file=file, flush=True)  # the error gets a line of its own
        raise
    print(f"{time.perf_counter() - begun:.1f} s", file=file, flush=True)


def silent(doing: str) -> AbstractContextManager[None]:
    """A `step` that prints nothing."""
    return nullcontext()
