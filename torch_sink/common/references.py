"""References that do not keep what others own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def reference(value: Any, when_gone: Callable[[], object] | None = None) -> Callable[[], Any]:
    """Gives the value as long as somebody else keeps it, then None; a value that knows no such references is kept.

    `when_gone()` is called when it goes; not once the reference itself is gone.
    """
    try:
        return weakref.ref(value, None if when_gone is None else lambda _: when_gone())
    except TypeError:  # a list
        return lambda: value
