"""What a process holds, and what is left of it when a program is done."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil


def traces() -> dict[str, set[Any]]:
    """What this process holds: its workers, threads, open files, segments of shared memory, and temporary files."""
    helpers = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # Python keeps them until it ends
    me = psutil.Process()
    workers = [one.pid for one in me.children(recursive=True) if not any(name in command(one) for name in helpers)]
    # That of a real device is none of Python's, and stays as well.
    threads = {one for one in threading.enumerate() if one.name != "autograd of the fake device"}
    segments = {one.path for one in me.memory_maps() if "/dev/shm" in one.path or "memfd" in one.path}
    return {
        "processes": set(workers),
        "threads": threads,
        "open files": {one.path for one in me.open_files()},
        "segments": segments,
        "temporary files": {path for path in Path(tempfile.gettempdir()).iterdir() if not is_kept(path)},
    }


def is_kept(path: Path) -> bool:
    """Whether a temporary file is the folder that torch 2.8 makes where `torch.distributed.nn` is imported."""
    return (path / "_remote_module_non_scriptable.py").is_file()


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "multiprocessing.resource_tracker"  # it has just ended: nothing is left of it


def left_since(before: dict[str, set[Any]], seconds: float = 5.0) -> dict[str, set[Any]]:
    """What this process holds and did not hold before, once it has had time to end.

    Some libraries' iterators are cycles, with stock code too; when Python would collect them is chance.
    """
    gc.collect()
    deadline = time.monotonic() + seconds
    while left := {name: more for name, now in traces().items() if (more := now - before[name])}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return left


@contextmanager
def nothing_left_behind(seconds: float = 5.0) -> Iterator[None]:
    before = traces()
    yield
    left = left_since(before, seconds)
    assert not left, left
