"""The tests that need a GPU, each file in a process of its own: one that ruins its CUDA context hides no other."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_commands import LONGEST_ERROR, ROOT, end_all, run_command

NOTHING_COLLECTED = 5  # exit status of pytest
MOST_AT_A_TIME = 8  # each has a CUDA context, and its share of the cores


def files_with_cuda_tests() -> list[Path]:
    """They alone are imported, for others need libraries that a GPU machine may lack; the largest first.

    `tests/project` and what lies at the top test the project itself.
    """
    folder = ROOT / "tests"
    interpreted = folder / "kernels" / "interpreted"
    files = [path for path in folder.glob("*/**/test_*.py") if "mark.cuda" in path.read_text()]
    files = [path for path in files if path.parent not in (interpreted, folder / "project")]
    return sorted([*files, *interpreted.glob("test_*.py")], key=lambda path: (-path.stat().st_size, path))


def run_tests(
    files: Sequence[Path], logs: Path, *, seconds: float | None, environment: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Run the tests marked `cuda` of each file, several files at a time; the runs as they end.

    Args:
        files: to run.
        logs: folder for the output of each.
        seconds: for all of them together; None for as long as they take.
        environment: variables beside those of this process.
    """
    deadline = None if seconds is None else time.perf_counter() + seconds
    at_a_time = max(min(len(os.sched_getaffinity(0)) // 2, MOST_AT_A_TIME), 1)
    pool = ThreadPoolExecutor(at_a_time)
    try:
        for done in as_completed([pool.submit(run_file, file, logs, deadline, environment) for file in files]):
            yield done.result()
    finally:
        # Where this process is told to end, those that run have to, and the others do not begin.
        pool.shutdown(wait=False, cancel_futures=True)
        end_all()


def run_file(file: Path, logs: Path, deadline: float | None, environment: dict[str, str]) -> dict[str, Any]:
    """One file; how many of its tests passed, failed and were skipped, and the first that failed."""
    name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else file.name
    stem = name.removesuffix(".py").replace("/", ".")
    seconds = None if deadline is None else deadline - time.perf_counter()
    if seconds is not None and seconds < 1:
        return {"name": name, "part": "tests", "status": "not started", "seconds": 0.0, "error": "no time was left"}
    outcomes = logs / f"{stem}.xml"
    outcomes.unlink(missing_ok=True)
    command = ["-m", "pytest", "-m", "cuda and not slow", "-p", "no:cacheprovider", f"--junitxml={outcomes}", str(file)]
    run = run_command(name, command, logs / f"{stem}.log", seconds=seconds, environment=environment)
    if run["exit"] == NOTHING_COLLECTED:
        run |= {"status": "passed", "error": ""}
    return {**run, "part": "tests", **read_outcomes(outcomes, run["error"])}


def read_outcomes(path: Path, error: str) -> dict[str, Any]:
    """Counts of a file's tests; the first failed one beside `error` where it was written down."""
    try:
        suite = next(ElementTree.parse(path).iter("testsuite"))
    except (OSError, ElementTree.ParseError, StopIteration):
        return {"passed": 0, "failed": 0, "skipped": 0, "error": error}
    total, failed, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "skipped"))
    failed += int(suite.get("errors", 0))
    faults = ((case, fault) for case in suite.iter("testcase") for fault in case if fault.tag in ("failure", "error"))
    case, fault = next(faults, (None, None))
    if case is not None and fault is not None and fault.get("message") != "collection failure":
        error = f"{case.get('name')}: {(fault.get('message') or '')}".partition("\n")[0][:LONGEST_ERROR]
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped, "error": error}
