"""Every test of the sink must end without child processes and without threads of its own."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = {child.pid for child in worker_processes()}
    threads = set(threading.enumerate())
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not is_clean(before, threads):
        time.sleep(0.02)
    assert not [child for child in worker_processes() if child.pid not in before]
    assert not set(threading.enumerate()) - threads


def is_clean(before: set[int], threads: set[threading.Thread]) -> bool:
    return {child.pid for child in worker_processes()} <= before and set(threading.enumerate()) <= threads


def worker_processes() -> list[psutil.Process]:
    """Child processes, without the two helpers that Python's multiprocessing keeps until the interpreter exits."""
    helpers = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
    return [child for child in psutil.Process().children(recursive=True) if not runs_any(child, helpers)]


def runs_any(process: psutil.Process, modules: tuple[str, ...]) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True
    return any(module in command for module in modules)
