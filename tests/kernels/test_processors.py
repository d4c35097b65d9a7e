"""The promises of the parity table hold whatever processor torch's own kernels are chosen for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("processors_run.py")


def measured(*arguments: str, seconds: int) -> list[dict[str, Any]]:
    tests = str(SCRIPT.parents[1])
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines()]


def check(processors: list[dict[str, Any]], capabilities: list[str], rows: int) -> None:
    assert [each["capability"] for each in processors] == capabilities
    assert all(each["rows"] >= rows for each in processors)
    assert not [broken for each in processors for broken in each["broken"]]
    # torch's bits do differ between them: the test is not blind.
    assert len({tuple(each["bits"]) for each in processors}) > 1


@pytest.mark.once_on_oldest
def test_pipelines_record_on_processors_without_avx2() -> None:
    """Where torchvision resizes bytes through float32, as kernels do then."""
    files = [
        str(SCRIPT.parents[1] / "image" / "operations" / name)
        for name in ("test_float_pipelines.py", "test_uncommon.py")
    ]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    finished = subprocess.run(
        command, cwd=SCRIPT.parents[2], env=environment, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stdout


@pytest.mark.once
def test_promises_hold_on_other_processors() -> None:
    check(measured(seconds=300), ["DEFAULT", "AVX2"], rows=50)


@pytest.mark.slow
@pytest.mark.once
def test_the_whole_table_on_other_processors() -> None:
    check(measured("whole", seconds=3600), ["DEFAULT", "AVX2", "DEFAULT", "AVX2"], rows=295)
