"""What the layers share; here, what not every operating system has: forks, and a choice of cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def after_fork_in_child(function: Callable[[], Any]) -> None:
    """Calls `function` in every child that is forked; a no-op where processes cannot fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
