"""Runs test files of a suite in processes of their own, with a time limit for each test, and reads the outcomes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_BEGIN = 600  # for imports, and for collecting 20,000 tests


class Outcome(NamedTuple):
    """What became of a test: "passed", "failed", "skipped", "xfailed", "timed out", "crashed", …"""

    outcome: str
    said: str = ""
    recorded: bool = False  # the backend recorded something for it; in the mode "kernels": they made an image
    asked: bool = False  # it asked for the type of a handle by `type(x)`


class Run(NamedTuple):
    """Test files of one folder, in one mode.

    Args:
        folder: where pytest runs.
        files: relative to it.
        mode: one of `plugin.MODES`.
        scratch: for outcomes and logs.
        packages: of the tests' own requirements; None where they are installed.
        seconds: how long a test may take.
        only: the tests to run; all where empty.
    """

    folder: Path
    files: list[str]
    mode: str
    scratch: Path
    packages: Path | None = None
    seconds: float = 120.0
    only: tuple[str, ...] = ()


def run(this: Run) -> dict[str, Outcome]:
    """The outcome of each test. A test that hangs or ends its process gets an outcome too, and the rest runs."""
    this.scratch.mkdir(parents=True, exist_ok=True)
    outcomes = this.scratch / "outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    while True:
        before = len(read(outcomes))
        status = _until_it_hangs(this, outcomes)
        begun = _unfinished(outcomes)
        if begun is not None:
            outcome = "timed out" if status is None else "crashed"
            said = f"no outcome after {this.seconds:g} s" if status is None else f"the process ended with {status}"
            _append(outcomes, test=begun, outcome=outcome, said=said)
        elif status in (0, 1, 2, 5):  # 2: files that cannot be collected
            return read(outcomes)
        if len(read(outcomes)) == before:
            ended = "did not begin" if status is None else f"ended with {status}"
            raise RuntimeError(f"pytest {ended}, and ran no test: see {this.scratch / 'log.txt'}")


def read(path: Path) -> dict[str, Outcome]:
    """The outcomes in a file, by test."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line.pop("test"): Outcome(**line) for line in lines if "test" in line}


def _unfinished(path: Path) -> str | None:
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1]).get("begins") if lines else None


def _append(path: Path, **line: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _until_it_hangs(this: Run, outcomes: Path) -> int | None:
    """Runs pytest to its end and returns its exit status; None where a test took too long, and it was killed."""
    ini = this.scratch / "pytest.ini"  # not the settings of this repository, in which folders of suites may lie
    ini.write_text("[pytest]\n")
    paths = [str(ROOT), str(ROOT / "tests"), *([str(this.packages)] if this.packages else [])]
    variables = {
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "PYTHONHASHSEED": "0",
        "PYTEST_ADDOPTS": "",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1" if this.mode == "kernels" else "0",
    }
    command = [
        *(sys.executable, "-m", "pytest", "-p", "suites.plugin", "-p", "no:cacheprovider", "-q", "--tb=short"),
        *("-c", str(ini), f"--rootdir={this.folder}", "--continue-on-collection-errors", "-W", "ignore"),
        *("--mode", this.mode, "--outcomes", str(outcomes), f"--basetemp={this.scratch / 'tmp'}"),
        *(this.only or this.files),
    ]
    with (this.scratch / "log.txt").open("a") as log:
        child = subprocess.Popen(
            command, cwd=this.folder, env={**os.environ, **variables}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            return _watched(child, outcomes, this.seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # data workers that a test left behind, too
            child.wait()


def _is_stopped(process: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() == psutil.STATUS_STOPPED
    return False


def _watched(child: subprocess.Popen[Any], outcomes: Path, seconds: float) -> int | None:
    begun = size = outcomes.stat().st_size if outcomes.exists() else 0
    since = time.monotonic()
    while child.poll() is None:
        time.sleep(0.2)
        now = outcomes.stat().st_size if outcomes.exists() else 0
        # Who stops a process, as a shell's Ctrl-Z does, means no test.
        if now != size or _is_stopped(child.pid):
            size, since = now, time.monotonic()
        if time.monotonic() - since > (seconds if size > begun else SECONDS_TO_BEGIN):
            child.send_signal(signal.SIGUSR1)  # prints its stack
            time.sleep(1)
            return None
    return child.returncode
