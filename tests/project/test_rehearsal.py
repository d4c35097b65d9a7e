"""`make gpu` from beginning to end, as on a GPU machine, on the fake CUDA device: in a bare clone, no row fails.

`make rehearsal` runs it with the oldest releases and NumPy's newest, which lies in the folder NEWER_PACKAGES.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bare
import pytest
from simulators.fake_cuda import has_device
from simulators.fake_cuda.left_out import REASONS

sys.path.insert(0, str(bare.ROOT / "examples" / "benchmarks"))

import gpu
import gpu_summary
import gpu_tests

SECONDS = 3600  # on two busy cores


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """gpu.json."""
    if has_device():
        pytest.skip("a machine with CUDA runs make gpu itself")
    folder = tmp_path_factory.mktemp("rehearsal")
    clone, packages = bare.copy_clone(folder / "clone"), bare.link_packages(folder / "packages")
    newer = [Path(named)] if (named := os.environ.get("NEWER_PACKAGES")) else []
    photographs = bare.small_photographs(folder / "photographs")
    finished = subprocess.run(
        ["make", "gpu", "TRIAL=1", "GPU_PYTHON=tests/simulators/fake_cuda/python", f"DATA={photographs}"],
        cwd=clone,
        env={**bare.environment(*newer, packages), "FAKE_CUDA_BASE": str(bare.BASE_PYTHON)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout
    report: dict[str, Any] = json.loads((clone / "local" / "gpu" / "gpu.json").read_text())
    return report


@pytest.mark.once
@pytest.mark.parametrize("name", REASONS)
def test_what_is_left_out_is_there(name: str) -> None:
    file, _, test = name.partition("::")
    assert f"@pytest.mark.cuda\ndef {test}(" in (bare.ROOT / "tests" / file).read_text()


@pytest.mark.slow
def test_no_row_fails(report: dict[str, Any]) -> None:
    assert report["machine"]["gpu"] == "fake CUDA device"
    status = {run["name"]: run["status"] for run in report["runs"] if run["part"] != "tests"}
    assert status.keys() == {step.name for step in gpu.STEPS if step.part != "tests" and not step.is_apart}
    assert set(status.values()) == {"passed"}


@pytest.mark.slow
def test_every_file_of_tests_runs_on_the_device(report: dict[str, Any]) -> None:
    runs = {run["name"]: run for run in report["runs"] if run["part"] == "tests"}
    assert runs.keys() == {str(path.relative_to(gpu.ROOT)) for path in gpu_tests.files_with_cuda_tests()}
    assert all(run["status"] == "passed" and not run["failed"] for run in runs.values())
    # What replaces kernels does so on the fake device of an interpreting process.
    assert [name for name, run in runs.items() if not run["passed"]] == ["tests/kernels/interpreted/test_proof.py"]
    assert sum(run["skipped"] for run in runs.values() if run["passed"]) <= 2


@pytest.mark.slow
def test_no_figure_is_missing(report: dict[str, Any]) -> None:
    results = {run["name"]: run["result"] for run in report["runs"] if "result" in run}
    assert not any("unfinished" in result for result in results.values())
    assert [name for name, value in gpu_summary.figures(results) if value == "-"] == []
