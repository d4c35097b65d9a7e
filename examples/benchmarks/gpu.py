"""Everything that needs a GPU, in one command: the tests marked `cuda`, then the benchmarks.

    make gpu [PART=tests|kernels|decode|loader|loop|train] [RESULTS=folder]

Works with the interpreter that has PyTorch on the machine; nothing is installed or downloaded. Benchmarks use the
photographs in the folder that TORCH_SINK_PHOTOS names, else generated ones. Writes `gpu.json` into
the results folder: machine, commit, and for each part its command, exit status, seconds and figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "examples" / "benchmarks"

# Part -> the benchmark scripts that belong to it; each writes the JSON file named by --output.
PARTS = {
    "tests": (),
    "kernels": ("transforms.py", "worker_cost.py"),
    "decode": ("decode.py",),
    "loader": ("loader.py",),
    "loop": ("loop.py",),
    "train": ("train.py", "scale.py"),
}
USE_PHOTOGRAPHS = ("transforms.py", "worker_cost.py", "decode.py", "loader.py", "train.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", default="all", choices=("all", *PARTS))
    parser.add_argument("--results", type=Path, default=ROOT / "local" / "gpu", help="folder for gpu.json")
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
    report: dict[str, Any] = {"command": f"make gpu PART={arguments.part}", "machine": describe_machine(), "runs": []}
    for part in PARTS if arguments.part == "all" else (arguments.part,):
        report["runs"] += run_part(part, results, fail_without_cuda=not arguments.without_cuda)
        (results / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    print(format_table(report), f"\nWritten: {results / 'gpu.json'}")
    return int(any(run["status"] == "failed" for run in report["runs"]))


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


def run_part(part: str, results: Path, *, fail_without_cuda: bool) -> list[dict[str, Any]]:
    """Run the commands of one part and return what they did."""
    if part == "tests":
        return run_tests({"FAIL_WITHOUT_CUDA": "1"} if fail_without_cuda else {})
    runs = []
    for script in PARTS[part]:
        name = script.removesuffix(".py")
        if not (BENCHMARKS / script).is_file():
            runs.append({"name": name, "status": "not written yet", "seconds": 0.0})
            continue
        output = results / f"{name}.json"
        output.unlink(missing_ok=True)
        photographs = os.environ.get("TORCH_SINK_PHOTOS")
        data = ["--data", photographs] if photographs and script in USE_PHOTOGRAPHS else []
        run = run_command(name, [str(BENCHMARKS / script), "--output", str(output), *data], {})
        if output.is_file():
            run["result"] = json.loads(output.read_text())
        runs.append(run)
    return runs


def run_tests(environment: dict[str, str]) -> list[dict[str, Any]]:
    """The tests marked `cuda`, then some of the kernels' under compute-sanitizer where it is installed."""
    runs = [run_command("tests", ["-m", "pytest", "-m", "cuda and not slow", "tests"], environment)]
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return [*runs, {"name": "sanitizer", "status": "not installed", "seconds": 0.0}]
    kernels = ["-m", "pytest", "tests/kernels/interpreted/test_pipelines.py", "-k", "imagenet or jitter or erase"]
    # PyTorch keeps freed memory to itself: without its cache an access beyond a tensor is one beyond an allocation.
    exact = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return [*runs, run_command("sanitizer", kernels, exact, (sanitizer, "--error-exitcode", "9"))]


def run_command(
    name: str, command: list[str], environment: dict[str, str], under: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Run Python with a command line, under another program if one is given."""
    print(f"\n=== {name}: {' '.join((*under, *command))}", flush=True)
    started = time.perf_counter()
    finished = subprocess.run([*under, sys.executable, *command], cwd=ROOT, env={**os.environ, **environment})
    status = "passed" if finished.returncode == 0 else "failed"
    seconds = time.perf_counter() - started
    return {"name": name, "command": command, "status": status, "exit": finished.returncode, "seconds": seconds}


def format_table(report: dict[str, Any]) -> str:
    """Return a line for each run."""
    machine = report["machine"]
    lines = ["", f"{machine['gpu'] or 'no GPU'}, torch {machine['releases']['torch']}, commit {machine['commit']}"]
    lines += [f"{run['name']:16}{run['status']:18}{run['seconds']:8.1f} s" for run in report["runs"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
