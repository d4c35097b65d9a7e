"""What the layers share; here, what not every operating system has: forks, and a choice of cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def after_fork_in_child(function: Callable[[], Any]) -> None:
    """Calls `function` in every child that is forked; a no-op where processes cannot fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def is_running(process: int) -> bool:
    """Whether the process with this number exists. On Windows nothing can ask without ending it: True."""
    if sys.platform == "win32":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
