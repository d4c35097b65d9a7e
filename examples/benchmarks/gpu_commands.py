"""Runs one command of `make gpu`: within its time, with a log of its own, and with the first error that it shows."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LONGEST_ERROR = 300  # characters
_RUNNING: set[subprocess.Popen[bytes]] = set()
# "torch.AcceleratorError: CUDA error: ...", as Python ends a traceback.
_ERROR = re.compile(r"Fatal Python error.*|^(?:E +)?[\w.]*(?:Error|Exception|Interrupt)(?::.*)?$", re.MULTILINE)


def run_command(
    name: str,
    command: Sequence[str],
    log: Path,
    *,
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
    under: Sequence[str] = (),
) -> dict[str, Any]:
    """Run Python with a command line; its output goes into a file.

    Args:
        name: of the run.
        command: arguments of the interpreter.
        log: the file.
        seconds: after which it is stopped, with all that it has started; None for never.
        environment: variables beside those of this process.
        under: another program, with arguments, that runs the interpreter.

    Returns:
        Name, command, status ("passed", "failed" or "out of time"), exit status, seconds, log and first error.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with log.open("w") as output:
        # A session of its own: workers end with the command that started them.
        process = subprocess.Popen(
            [*under, sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _RUNNING.add(process)
        try:
            status = "passed" if process.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            _end(process)
    exit_status = process.wait()
    taken = time.perf_counter() - started
    error = "" if status == "passed" else first_error(log.read_text(errors="replace"), exit_status)
    if status == "out of time":
        error = f"stopped after {taken:.0f} s; {error}"
    return {
        "name": name,
        "command": list(command),
        "status": status,
        "exit": exit_status,
        "seconds": taken,
        "log": str(log),
        "error": error,
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    _RUNNING.discard(process)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end_all() -> None:
    """End what other threads run."""
    for process in tuple(_RUNNING):
        _end(process)


def first_error(text: str, exit_status: int) -> str:
    """The first line of a log that names an exception, else its last line, else the exit status."""
    found = _ERROR.search(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = found[0].removeprefix("E ").strip() if found else lines[-1] if lines else f"exit status {exit_status}"
    return line[:LONGEST_ERROR]
