"""Everything that needs a GPU, in one command: the tests marked `cuda`, then the benchmarks.

    make gpu [PART=tests|kernels|decode|loader|loop|train] [RESULTS=folder] [DATA=photographs]

All parts together take less than nine minutes: each command has a limit, and the benchmarks measure less than they do
alone. A part named by PART has no limit and measures everything.

Works with the interpreter that has PyTorch on the machine; nothing is installed or downloaded, and beside PyTorch,
torchvision and Triton the tests need pytest and psutil alone. Benchmarks use the photographs of DATA, by default those
in the folder that TORCH_SINK_PHOTOS names, else generated ones. Writes `gpu.json` into the results folder: machine,
commit, and for each part its command, exit status, seconds and figures; beside it, what each benchmark wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "examples" / "benchmarks"

# Part -> the benchmark scripts that belong to it; each writes the JSON file named by --output.
PARTS = {
    "tests": (),
    "kernels": ("transforms.py", "worker_cost.py"),
    "decode": ("decode.py", "jpeg.py"),
    "loader": ("loader.py",),
    "loop": ("loop.py",),
    "train": ("train.py", "scale.py"),
}


class Share(NamedTuple):
    """What a command gets when all parts run.

    Attributes:
        seconds: after which it is stopped, None: never; all of them together are less than nine minutes.
        options: of the benchmark, so that it ends before.
    """

    seconds: int | None
    options: tuple[str, ...] = ()


SHARES = {
    "tests": Share(140),
    "sanitizer": Share(40),
    "transforms": Share(70, ("--batches", "64", "512", "--rounds", "3")),
    "worker_cost": Share(35, ("--rounds", "2", "--images", "40")),
    "decode": Share(30, ("--batches", "64", "256", "--rounds", "3")),
    "jpeg": Share(25, ("--batches", "128", "512", "--rounds", "3")),
    "loader": Share(30, ("--rounds", "3", "--epochs", "2")),
    "loop": Share(65, ("--rounds", "5", "--seconds", "18")),
    "train": Share(80, ("--models", "resnet50", "--workers", "2", "8", "--steps", "10", "--rounds", "2")),
    "scale": Share(20, ("--rounds", "2")),
}
WITHOUT_PHOTOGRAPHS = ("loop.py",)
# What the benchmarks are tried with where there is no GPU.
TRIAL_OPTIONS = {
    "transforms": ("--batches", "2", "--rounds", "1"),
    "worker_cost": ("--images", "8", "--rounds", "1"),
    "decode": ("--batches", "4", "--rounds", "1"),
    "jpeg": ("--batches", "4", "--rounds", "1"),
    "loader": ("--workers", "1", "--rounds", "1", "--epochs", "1"),
    "loop": ("--models", "mlp", "--rounds", "1", "--seconds", "5"),
    "train": ("--workers", "1", "--steps", "2", "--batch-size", "2"),
    "scale": ("--rounds", "1"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", default="all", choices=("all", *PARTS))
    parser.add_argument("--results", type=Path, default=ROOT / "local" / "gpu", help="folder for gpu.json")
    named = os.environ.get("TORCH_SINK_PHOTOS") or None
    parser.add_argument("--data", type=Path, default=named, help="ImageFolder tree (default: TORCH_SINK_PHOTOS)")
    parser.add_argument("--without-cuda", action="store_true", help="only try the commands; their figures mean nothing")
    arguments = parser.parse_args()
    make_importable()
    import torch

    from torch_sink.cli.machine import describe_machine

    if not torch.cuda.is_available() and not arguments.without_cuda:
        print(
            f"make gpu needs a CUDA device, and torch {torch.__version__} of {sys.executable} sees none.\n"
            "Check nvidia-smi, or name the interpreter that has a CUDA build of PyTorch: make gpu GPU_PYTHON=...",
            file=sys.stderr,
        )
        return 1
    results = arguments.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    if arguments.data is not None:
        # The tests read it there.
        os.environ["TORCH_SINK_PHOTOS"] = str(arguments.data.resolve())
    report: dict[str, Any] = {"command": f"make gpu PART={arguments.part}", "machine": describe_machine(), "runs": []}
    whole = arguments.part == "all"
    if arguments.without_cuda:
        shares = {name: Share(None, options) for name, options in TRIAL_OPTIONS.items()}
    else:
        shares = SHARES if whole else {}
    for part in PARTS if whole else (arguments.part,):
        report["runs"] += run_part(part, results, shares, fail_without_cuda=not arguments.without_cuda)
        (results / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    print(format_table(report), f"\nWritten: {results / 'gpu.json'}")
    return int(any(run["status"] in ("failed", "out of time") for run in report["runs"]))


def make_importable() -> None:
    """Let this process and its children import the checkout where it is not installed."""
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        import torch_sink.triton_kernels  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch_sink.triton_kernels":
            raise
        # An install maps the kernels' folder into the package; without one, a link does.
        (ROOT / "torch_sink" / "triton_kernels").symlink_to(ROOT / "triton_kernels")


def run_part(part: str, results: Path, shares: Mapping[str, Share], *, fail_without_cuda: bool) -> list[dict[str, Any]]:
    """Run the commands of one part, those named in `shares` within their share, and return what they did."""
    if part == "tests":
        return run_tests(shares, {"FAIL_WITHOUT_CUDA": "1"} if fail_without_cuda else {})
    runs = []
    for script in PARTS[part]:
        name = script.removesuffix(".py")
        share = shares.get(name)
        output = results / f"{name}.json"
        output.unlink(missing_ok=True)
        photographs = os.environ.get("TORCH_SINK_PHOTOS")
        data = ["--data", photographs] if photographs and script not in WITHOUT_PHOTOGRAPHS else []
        command = [str(BENCHMARKS / script), "--output", str(output), *data, *(share.options if share else ())]
        run = run_command(name, command, {}, share)
        if output.is_file():
            run["result"] = json.loads(output.read_text())
        runs.append(run)
    return runs


def run_tests(shares: Mapping[str, Share], environment: dict[str, str]) -> list[dict[str, Any]]:
    """The tests marked `cuda`, then some of the kernels' under compute-sanitizer where it is installed."""
    tests = ["-m", "pytest", "-m", "cuda and not slow", *parallel_options(), *files_with_cuda_tests()]
    runs = [run_command("tests", tests, environment, shares.get("tests"))]
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return [*runs, {"name": "sanitizer", "status": "not installed", "seconds": 0.0}]
    kernels = ["-m", "pytest", "tests/kernels/interpreted/test_pipelines.py", "-k", "imagenet or jitter or erase"]
    # PyTorch keeps freed memory to itself: without its cache an access beyond a tensor is one beyond an allocation.
    exact = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    under = (sanitizer, "--error-exitcode", "9")
    return [*runs, run_command("sanitizer", kernels, exact, shares.get("sanitizer"), under)]


def parallel_options() -> list[str]:
    """Several files at a time where pytest-xdist is there: compiling the kernels takes longer than running them."""
    processes = min(len(os.sched_getaffinity(0)) // 2, 8)
    if processes < 2 or importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"]


def files_with_cuda_tests() -> list[str]:
    """They alone are imported, for others need libraries that a GPU machine may lack."""
    folder = ROOT / "tests"
    files = [path for path in sorted(folder.rglob("test_*.py")) if "mark.cuda" in path.read_text()]
    files = [path for path in files if path.parent.name != "interpreted"]
    return [str(path.relative_to(ROOT)) for path in (*files, folder / "kernels" / "interpreted")]


def run_command(
    name: str, command: list[str], environment: dict[str, str], share: Share | None, under: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Run Python with a command line, under another program if one is given; at most for the seconds of its share."""
    print(f"\n=== {name}: {' '.join((*under, *command))}", flush=True)
    started = time.perf_counter()
    # A session of its own: workers end with the command that started them.
    process = subprocess.Popen(
        [*under, sys.executable, *command], cwd=ROOT, env={**os.environ, **environment}, start_new_session=True
    )
    try:
        status = "passed" if process.wait(share.seconds if share else None) == 0 else "failed"
    except subprocess.TimeoutExpired:
        status = "out of time"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    exit_status = process.wait()
    seconds = time.perf_counter() - started
    return {"name": name, "command": command, "status": status, "exit": exit_status, "seconds": seconds}


def format_table(report: dict[str, Any]) -> str:
    """Return a line for each run."""
    machine = report["machine"]
    lines = ["", f"{machine['gpu'] or 'no GPU'}, torch {machine['releases']['torch']}, commit {machine['commit']}"]
    lines += [f"{run['name']:16}{run['status']:18}{run['seconds']:8.1f} s" for run in report["runs"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
