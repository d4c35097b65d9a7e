"""What `make` and `.ci/run` promise of the suite: a slow test fails alone, and every release in between is tried."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def pytest_flags() -> list[str]:
    """Those that `make test` hands to pytest."""
    text = re.search(r"^PYTEST_FLAGS \?= ((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE)
    assert text is not None
    return shlex.split(text[1].replace("\\\n", " "))


SLOW_TESTS = """
import time
import pytest

@pytest.mark.parametrize("number", range(6))
def test_some(number):
    time.sleep(60 if number == 1 else 0)
"""


@pytest.mark.slow
def test_a_slow_test_fails_alone_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(SLOW_TESTS)
    flags = [f.replace("--timeout=600", "--timeout=2") for f in pytest_flags()]
    assert flags != pytest_flags()
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *flags, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 failed, 5 passed" in finished.stdout
    assert "test_some[1]" in finished.stdout
    assert "Timeout" in finished.stdout


def test_every_release_of_torch_that_is_promised_is_tried_once_a_week() -> None:
    (oldest,) = re.findall(r'"torch>=2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    (tried,) = re.findall(r"torch: \[(.*)\]", (ROOT / ".github" / "workflows" / "releases.yml").read_text())
    numbers = [int(release.removeprefix("2.")) for release in re.findall(r'"([\d.]+)"', tried)]
    assert numbers == [*range(int(oldest), numbers[-1] + 1)]
    assert f"torch==2.{oldest}.0 " in MAKEFILE


def test_ci_runs_the_commands_of_the_readme() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert "make test\n" in ci
    assert "PYTHON=${PYTHON:-python3}" in ci
