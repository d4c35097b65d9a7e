"""Helpers that every layer shares; in this file, those for processes, forks and weak references."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def after_fork_in_child(function: Callable[[], Any]) -> None:
    """Calls `function` in every child that is forked; a no-op where processes cannot fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def reference(value: Any, when_gone: Callable[[], object] | None = None) -> Callable[[], Any]:
    """Makes a weak reference: it returns `value` while something else keeps it alive, then None.

    A list supports no weak references; for such a value the result keeps it alive. `when_gone()` is called when the
    value is collected, unless the reference was dropped before.
    """
    try:
        return weakref.ref(value, None if when_gone is None else lambda _: when_gone())
    except TypeError:
        return lambda: value
