"""Runs the tests of the folder `interpreted` in processes with Triton's interpreter, and fails where they fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("interpreted")
FILES = sorted(FOLDER.glob("test_*.py"))


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """One process a file, all at once."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    processes = {
        file.name: subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--tb=short", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=FOLDER.parents[2],
        )
        for file in FILES
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", [file.name for file in FILES])
def test_interpreted(name: str, runs: dict[str, subprocess.Popen[str]]) -> None:
    printed, _ = runs[name].communicate(timeout=600)
    assert runs[name].returncode == 0, printed
    summary = printed.strip().splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    assert passed, printed
    assert int(passed[1]) >= 5, f"{name} holds fewer tests than it did: {summary}"
    assert not re.search(r"skipped|error| failed", summary), printed
