"""`make gpu`, rehearsed without a GPU: what fails or runs out of time is said, and hides and loses nothing."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bare
import psutil
import pytest
import torch
from simulators.fake_cuda import fake_cuda  # noqa: F401 a fixture

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu  # noqa: E402
import gpu_summary  # noqa: E402
import gpu_tests  # noqa: E402
import train  # noqa: E402

WORKS = "import json, sys; open(sys.argv[2], 'w').write(json.dumps({'options': sys.argv[3:]}))"
HANGS = """
import json, sys, time
open(sys.argv[2], 'w').write(json.dumps({'worker_cost': {'v1 train, batch 256': {'stock_ms': {'p50': 4.5}, 'torch_sink_ms': {'p50': 0.2}}}, 'unfinished': True}))
time.sleep(600)
"""
TESTS = {
    "test_good.py": "def test_one(): pass\n@pytest.mark.slow\ndef test_slow(): assert False",
    "test_bad.py": "def test_one(): pass\ndef test_two():\n    assert 1 == 2, 'one is not two'\n@pytest.mark.skip\ndef test_three(): pass",
    "test_crash.py": "def test_one():\n    os.abort()",
    "test_broken.py": "import no_such_module",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of benchmarks and tests that take no time."""
    scripts = {"loop.py": "raise SystemExit('nothing was measured')", "scale.py": WORKS, "worker_cost.py": HANGS}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    cuda\n    slow\n")
    for name, text in TESTS.items():
        (tmp_path / name).write_text(f"import os\nimport pytest\npytestmark = pytest.mark.cuda\n{text}\n")
    monkeypatch.setattr(gpu, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(gpu, "files_with_cuda_tests", lambda: [tmp_path / name for name in TESTS])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("TORCH_SINK_PHOTOS", "")
    return tmp_path


def step(name: str, seconds: int = 60, **options: Any) -> gpu.Step:
    return next(step for step in gpu.STEPS if step.name == name)._replace(seconds=seconds, **options)


def rehearse(place: Path, *steps: gpu.Step) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status, and the runs in gpu.json by their names."""
    results = place / "results"
    status = gpu.main(["--trial", "--results", str(results), "--data", str(place)], steps)
    return status, {run["name"]: run for run in json.loads((results / "gpu.json").read_text())["runs"]}


@pytest.mark.slow
def test_what_fails_hides_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, runs = rehearse(place, step("tests"), step("loop"), step("scale", trial=("--rounds", "7")))
    assert status == 1
    assert {name: run["status"] for name, run in runs.items()} == {
        "test_good.py": "passed", "test_bad.py": "failed", "test_crash.py": "failed", "test_broken.py": "failed",
        "loop": "failed", "scale": "passed",
    }  # fmt: skip
    counts = {name: tuple(runs[name][key] for key in ("passed", "failed", "skipped")) for name in TESTS}
    assert counts == {
        "test_good.py": (1, 0, 0), "test_bad.py": (1, 1, 1), "test_crash.py": (0, 0, 0), "test_broken.py": (0, 1, 0),
    }  # fmt: skip
    assert runs["scale"]["result"]["options"] == ["--data", str(place), "--rounds", "7"]
    assert "Fatal Python error: Aborted" in Path(runs["test_crash.py"]["log"]).read_text()
    printed = capsys.readouterr().out
    assert "tests: 1 of 4 files passed; 2 passed, 2 failed, 1 skipped" in printed
    for line in (
        r"  test_bad\.py: failed: test_two: AssertionError: one is not two",
        r"  test_crash\.py: failed: Fatal Python error: Aborted",
        r"  test_broken\.py: failed: .*No module named 'no_such_module'",
        r"loop +failed +\d+\.\d s  nothing was measured",
        r"scale +passed +\d+\.\d s",
    ):
        assert re.search(f"^{line}", printed, flags=re.MULTILINE), line


def test_a_benchmark_that_is_cut_short_keeps_its_figures(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = gpu.Run.__init__

    def with_limits(self: gpu.Run, *arguments: Any, **options: Any) -> None:
        stock(self, *arguments, **options)
        self.has_limits = True

    monkeypatch.setattr(gpu.Run, "__init__", with_limits)
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 1.0)
    status, runs = rehearse(place, step("worker_cost", seconds=3), step("scale", seconds=0))
    assert status == 0, "out of time is no failure"
    assert runs["worker_cost"]["status"] == "out of time"
    assert runs["worker_cost"]["result"]["unfinished"]
    assert runs["scale"]["status"] == "not started"
    assert "4.50 -> 0.20, unfinished" in capsys.readouterr().out


def test_time_that_a_step_leaves_is_there_for_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = [100.0]
    limits: dict[str, float | None] = {}

    def runs(self: gpu.Run, step: gpu.Step, limit: float | None) -> list[dict[str, Any]]:
        limits[step.name] = limit
        clock[0] += {"compile": 30.0, "doctor": 100.0}.get(step.name, 0.0)
        return [{"name": step.name, "status": "passed", "seconds": 1.0}]

    monkeypatch.setattr(gpu.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(gpu.Run, "_runs", runs)
    for whole, expected in ((True, [100.0, 90.0, 20.0, 80.0]), (False, [None, None, None, None])):
        run = gpu.Run(tmp_path, whole=whole, cuda=True, trial=False, data=None, machine={})
        for name, seconds in (("compile", 100), ("doctor", 20), ("train", 30), ("loop", 60)):
            run.run(step(name, seconds))
        assert list(limits.values()) == expected


def test_everything_takes_less_than_nine_minutes() -> None:
    assert sum(step.seconds for step in gpu.STEPS if not step.is_apart) < 9 * 60
    scripts = {step.name for step in gpu.STEPS if (BENCHMARKS / f"{step.name}.py").is_file()}
    assert {step.name for step in gpu.STEPS} - scripts == {"compile", "doctor", "pixels", "tests", "sanitizer"}
    assert all(step.options and step.trial for step in gpu.STEPS if step.name in scripts)


# Assumed seconds on a machine where all is cold: until a process has imported torch and has a context, until ResNet-50 is
# compiled, and to measure one contender.
BEGIN, COMPILE, CONTENDER = 6.0 + 3.0, 45.0, 20.0
SLOW = {
    "compile": 120.0, "doctor": 20.0, "pixels": 90.0, "train": BEGIN + COMPILE + 2 * CONTENDER,
    "loader": BEGIN + CONTENDER, "tests": 150.0, "decode": BEGIN + 3 * CONTENDER, "jpeg": 40.0,
    "loop": BEGIN + COMPILE + 4 * CONTENDER, "transforms": 60.0, "host_cost": 30.0, "worker_cost": 30.0, "scale": 60.0,
}  # fmt: skip


def test_training_is_compared_with_stock_before_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its script goes through the contenders: each compiles once, but for stock, which does not."""
    clock, known, options = [BEGIN], set[str](), step("train").options
    workers = [text for text in options[options.index("--workers") + 1 :] if text.isdigit()][:2]

    class Measured(train.ModelResults):
        def __init__(self, *_: Any) -> None:
            self.found = {"gate": {}, "failed": {}, "contenders": {key: {} for key in train.CONTENDERS}}

        def _measured(self, key: str, workers: int) -> dict[str, Any]:
            compiles = key not in known and key not in ("stock", train.SYNTHETIC)  # which takes the code that is there
            known.add(key)
            clock[0] += CONTENDER + COMPILE * compiles
            return {"at": clock[0]}

    monkeypatch.setattr(train, "ModelResults", Measured)
    arguments = argparse.Namespace(workers=[*map(int, workers)])
    *_, found = train.measure_model("resnet50", Path(), arguments, torch.device("cpu"))
    at = {key: min(result["at"] for result in counts.values()) for key, counts in found["contenders"].items()}
    limit = next(one.seconds for one in gpu.STEPS if one.name == "train")
    assert workers == ["8", "2"]
    assert [key for key in at if at[key] <= limit] == ["stock", "torch_sink", "prefetcher + compile"]
    assert SLOW["train"] == at["torch_sink"]


def test_what_matters_most_is_measured_where_everything_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]

    def runs(self: gpu.Run, step: gpu.Step, limit: float | None) -> list[dict[str, Any]]:
        assert limit is not None
        seconds = min(SLOW[step.name], limit)
        clock[0] += seconds
        status = "passed" if seconds == SLOW[step.name] else "out of time"
        return [{"name": step.name, "status": status, "seconds": seconds, "error": ""}]

    monkeypatch.setattr(gpu.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(gpu.Run, "_runs", runs)
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "describe_machine", lambda: {"gpu": "", "releases": {"torch": ""}, "commit": ""})
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    status = gpu.main(["--results", str(tmp_path), "--data", str(tmp_path)])
    assert (status, clock[0] < 9 * 60) == (0, True)
    found = {run["name"]: run for run in json.loads((tmp_path / "gpu.json").read_text())["runs"]}
    assert list(found) == [step.name for step in gpu.STEPS if not step.is_apart]
    assert all(found[name]["status"] == "passed" for name in ("doctor", "train", "loader"))
    assert found["pixels"]["seconds"] >= 30


def test_only_files_with_cuda_tests_are_imported_on_a_gpu() -> None:
    named = {str(path.relative_to(gpu.ROOT)) for path in gpu_tests.files_with_cuda_tests()}
    assert {
        "tests/loop/engines/test_cuda.py",
        "tests/sink/ring/test_cuda.py",
        "tests/kernels/interpreted/test_uint8.py",
    } <= named
    assert not {"tests/sink/ring/test_ring_protocol.py", "tests/project/test_rules.py"} & named


def p50(value: float) -> dict[str, float]:
    return {"p50": value}


def results_of_a_gpu() -> dict[str, Any]:
    """As the benchmarks write them."""
    speeds = {"stock": 1000.0, "torch_sink": 2500.0, "synthetic": 2600.0}
    peaks = {"allocated": 10 << 30, "reserved": 11 << 30, "page_locked": 1 << 28}
    return {
        "train": {"models": {"resnet50": {"contenders": {
            name: {"2": {"images_per_second": p50(1.0), "peak_bytes": peaks}, "16": {"images_per_second": p50(speed), "gpu_idle_share": p50(0.03)}}
            for name, speed in speeds.items()
        }}}},
        "decode": {"decoders": {"torch_sink, triton": {"images_per_second": {"64": p50(1.0), "256": p50(40000.0)}}}},
        "jpeg": {"batches": {"512": {"device": {"images_per_second_kernels": p50(90000.0)}}}},
        "transforms": {"pipelines": {"v1 train": {
            "torch_sink": {"images_per_second": {"512": p50(7000.0)}},
            "torch_sink, kernels alone": {"images_per_second": {"512": p50(300000.0)}},
        }}},
        "loop": {"models": {"mlp": {"loops": {"StepLoop graph, sink 100": {"host_microseconds": p50(15.5)}}}, "resnet50": {}}},
        "worker_cost": {"worker_cost": {"v1 train, batch 256": {"stock_ms": p50(4.66), "torch_sink_ms": p50(0.21)}}},
        "host_cost": {"host_cost": {"v1 train": {"pinned": {"us_an_image": {"in all": p50(4.96)}}}}},
    }  # fmt: skip


def test_the_figures_that_matter() -> None:
    found = [value for _, value in gpu_summary.figures(results_of_a_gpu())]
    assert found == [
        "2,500",
        "2.50",
        "96%",
        "3.0%",
        "10.00 -> 10.00",
        "11.00 -> 11.00",
        "0.25 -> 0.25",
        "40,000",
        "90,000",
        "7,000",
        "300,000",
        "15.5",
        "5.0",
        "4.66 -> 0.21",
    ]
    assert {value for _, value in gpu_summary.figures({})} == {"-"}


RUNS = """
import sys
sys.path.insert(0, sys.argv[1])
import gpu
gpu.BENCHMARKS = gpu.Path(sys.argv[2])
steps = [step for step in gpu.STEPS if step.name in ("scale", "worker_cost")][::-1]
gpu.main(["--trial", "--results", sys.argv[2], "--data", sys.argv[2]], steps)
"""


@pytest.mark.slow
def test_who_ends_it_gets_the_table(place: Path) -> None:
    os.mkfifo(place / "pid")
    says_so = f"import os\nopen({str(place / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    (place / "worker_cost.py").write_text(says_so + HANGS)
    command = [sys.executable, "-c", RUNS, str(BENCHMARKS), str(place)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid = int((place / "pid").read_text())
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=60)[0]
    assert re.search(r"^scale +passed", printed, flags=re.MULTILINE)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
    assert [run["name"] for run in json.loads((place / "gpu.json").read_text())["runs"]] == ["scale"]


Rehearsal = Callable[..., tuple[int, dict[str, dict[str, Any]]]]


@pytest.fixture
def on_the_fake(fake_cuda: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearsal:  # noqa: F811
    """Runs steps as on a GPU machine: exit status, and the runs in gpu.json by their names."""
    results, photos = tmp_path / "results", bare.small_photographs(tmp_path / "photos")
    monkeypatch.setenv("FAKE_CUDA_BASE", sys.executable)
    monkeypatch.setattr(sys, "executable", str(gpu.ROOT / "tests" / "simulators" / "fake_cuda" / "python"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def rehearse(*steps: gpu.Step) -> tuple[int, dict[str, dict[str, Any]]]:
        status = gpu.main(["--results", str(results), "--data", str(photos)], steps)
        return status, {run["name"]: run for run in json.loads((results / "gpu.json").read_text())["runs"]}

    return rehearse


def trial(name: str) -> gpu.Step:
    return step(name, 900, options=step(name).trial)


@pytest.mark.slow
def test_limits_on_the_fake_device(on_the_fake: Rehearsal, capsys: pytest.CaptureFixture[str]) -> None:
    """One that comes to its limit, one that fails, and one that passes."""
    steps = [step("transforms", 25, options=("--batches", "9999")), step("scale", 900, options=("--no-such-option",))]
    status, runs = on_the_fake(*steps, step("doctor", 900))
    assert status == 1
    found = {name: run["status"] for name, run in runs.items()}
    assert found == {"transforms": "out of time", "scale": "failed", "doctor": "passed"}, capsys.readouterr().out
    assert "unrecognized arguments" in runs["scale"]["error"]


@pytest.mark.slow
def test_a_profiler_that_may_not_look_costs_its_own_figures(
    on_the_fake: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_PROFILER", "blind")
    status, runs = on_the_fake(*map(trial, ("jpeg", "loop", "train")))
    assert status == 0, [run["error"] for run in runs.values()]
    figures = dict(gpu_summary.figures({name: run["result"] for name, run in runs.items()}))
    assert figures["  GPU idle"] == figures["  the kernels alone"] == "-"
    assert "-" not in (figures["training with torch_sink, images/s"], figures["StepLoop, graph mode, host us a step"])


@pytest.mark.slow
def test_the_whole_of_it_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--trial", "--results", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-2000:]
    runs = {run["name"]: run for run in json.loads((tmp_path / "gpu.json").read_text())["runs"]}
    expected = {step.name for step in gpu.STEPS if step.name not in ("pixels", "tests") and not step.is_apart}
    assert expected < runs.keys()
    assert len(runs) - len(expected) == len(gpu_tests.files_with_cuda_tests())
    measured = {step.name for step in gpu.STEPS if (BENCHMARKS / f"{step.name}.py").is_file()}
    assert all(runs[name]["result"] and "unfinished" not in runs[name]["result"] for name in measured)
    figures = dict(gpu_summary.figures({name: runs[name]["result"] for name in measured}))
    without = {name for name, value in figures.items() if value == "-"}
    assert without <= {
        "  GPU idle",
        "JPEG decoding in kernels, images/s",
        "  the kernels alone",
        "StepLoop, graph mode, host us a step",
        *(f"  peak GiB {kind}, stock -> torch_sink" for kind in ("allocated", "reserved", "page-locked")),
    }
