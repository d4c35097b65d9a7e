"""Runs the tests of the folder `interpreted` in a process with Triton's interpreter, and fails where they fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kernels import seen
from kernels.releases import elsewhere, everyday

pytestmark = pytest.mark.timeout(1800)  # the first one waits for all files

FOLDER = Path(__file__).with_name("interpreted")
LEFT_OUT = re.compile(rf"^pytestmark = \[?\s*pytest\.mark\.{elsewhere()}\b", re.MULTILINE)
NAME = "interpreted"
IS_SEEN = seen.is_seen(NAME)
AGAIN = ("test_float_pipelines.py", "test_jpeg_tables.py", "test_uint8.py")
HERE = sorted(file.name for file in FOLDER.glob("test_*.py") if not LEFT_OUT.search(file.read_text()))
# Where all have passed with this very code and Triton, the short ones run.
FILES = [name for name in HERE if name in AGAIN] if IS_SEEN else HERE
OUTCOME = re.compile(r"/(test_\w+\.py)::.* (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)")


def run_folder(marked: str, seconds: int, files: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """One process for all files: each would load torch anew, which takes seconds."""
    options = ["-v", "-m", marked, "-p", "no:cacheprovider", "--tb=short", "-o", "console_output_style=classic"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(FOLDER / name) for name in files or [""])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        env=environment,
        cwd=FOLDER.parents[2],
    )


@pytest.fixture(scope="module")
def finished() -> subprocess.CompletedProcess[str]:
    return run_folder(everyday(), 1500, FILES)


@pytest.mark.parametrize("name", FILES)
def test_interpreted(name: str, finished: subprocess.CompletedProcess[str]) -> None:
    outcomes = Counter(outcome for file, outcome in OUTCOME.findall(finished.stdout) if file == name)
    assert set(outcomes) == {"PASSED"}, finished.stdout[-20_000:]
    assert outcomes["PASSED"] >= 2, f"{name} holds fewer tests than it did"


def test_the_process_ends_well(finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0, finished.stdout[-20_000:]
    ran = sum(file in FILES for file, _ in OUTCOME.findall(finished.stdout))
    assert re.search(rf"\b{ran} passed", finished.stdout.splitlines()[-1])
    if not IS_SEEN:
        seen.note(NAME)


@pytest.mark.slow
def test_interpreted_slow_tests() -> None:
    finished = run_folder("slow", 6 * 3600)
    assert finished.returncode == 0, finished.stdout[-20_000:]
    assert re.search(r"\b\d+ passed", finished.stdout.splitlines()[-1])
