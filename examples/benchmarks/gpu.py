"""Everything that needs a GPU, in one command and nine minutes: compile, test, measure, and say what came of it.

    make gpu [PART=compile|tests|train|decode|transforms|loop|loader|sanitizer] [RESULTS=folder] [DATA=photographs]
             [TRIAL=1]

First all kernels are compiled on all cores, so that nobody after that waits for one. The rest comes in the order of its
worth: whether pixels are right, the tests of the kernels; whether training ResNet-50 is right and faster; the loader's
images a second; the other tests; the other benchmarks. Tests are those marked `cuda`, each file in its own process.
Each step has a limit; time that one leaves is there for those after it, and the benchmarks measure less than they do
alone. A step that comes to its limit has not failed, and what it has measured is kept. A part named by PART has no
limit and measures everything; compute-sanitizer, under which all is slow, runs only as such a part. TRIAL=1 runs
everything at sizes that are over soon and say nothing about speed; it needs no GPU. Nor does PART=compile: where there
is none, kernels are compiled for one that is elsewhere, an H100.

Works with the interpreter that has PyTorch on the machine; nothing is installed or downloaded, and beside PyTorch,
torchvision and Triton the tests need pytest and psutil alone. Benchmarks use the photographs of DATA, by default those
in the folder that TORCH_SINK_PHOTOS names, else generated ones. Compiled kernels lie where Triton keeps them, or in the
results folder where nothing can be written there.

What is known is written at once, so that a run that is cut short loses nothing: `gpu.json` in the results folder holds
machine, commit, and for each run its command, status, seconds and first error; beside it lie what each benchmark wrote
and, in `logs`, what each run said. The last lines are a table of all that, and fourteen figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu_commands import ROOT, run_command
from gpu_summary import has_failed, verdict
from gpu_tests import files_with_cuda_tests, run_tests
from torch_sink.cli.doctor import unwritable_cache
from torch_sink.cli.machine import describe_machine

BENCHMARKS = ROOT / "examples" / "benchmarks"
PIXELS = ROOT / "tests" / "kernels"  # the tests of the kernels
LEAST_SECONDS = 5.0  # with less nothing is begun
PHOTOGRAPHS = 120  # generated where none are given


class Step(NamedTuple):
    """One thing to run.

    Attributes:
        name: of a benchmark's script, or of something else.
        part: that PART names.
        seconds: that it may take when all parts run; it may use what those before it have left.
        options: of a benchmark, so that it ends in that time.
        trial: of a benchmark that is tried, so that it is over soon.
        takes_data: it has an option --data.
        is_apart: it runs only where PART names it.
    """

    name: str
    part: str
    seconds: int
    options: tuple[str, ...] = ()
    trial: tuple[str, ...] = ()
    takes_data: bool = True
    is_apart: bool = False


# In the order in which they run, by their worth. Together less than nine minutes.
STEPS = (
    Step("compile", "compile", 80),
    Step("doctor", "compile", 25),
    Step("pixels", "tests", 55),
    Step(
        "train",
        "train",
        160,
        ("--models", "resnet50", "--workers", "8", "2", "--batch-size", "128", "--rounds", "3", "--seconds", "8"),
        ("--models", "shufflenet_v2_x0_5", "--workers", "1", "--steps", "2", "--batch-size", "2"),
    ),
    Step(
        "loader",
        "loader",
        18,
        ("--rounds", "2", "--epochs", "2"),
        ("--workers", "1", "--rounds", "1", "--epochs", "1", "--batch-size", "2"),
    ),
    Step("tests", "tests", 50),
    Step("decode", "decode", 24, ("--batches", "64", "256", "--rounds", "3"), ("--batches", "2", "--rounds", "1")),
    Step("jpeg", "decode", 20, ("--batches", "128", "512", "--rounds", "3"), ("--batches", "2", "--rounds", "1")),
    Step(
        "loop",
        "loop",
        42,
        ("--models", "mlp", "resnet50", "--loops", "graph, sink 100", "overhead", "--rounds", "5", "--seconds", "6"),
        ("--models", "mlp", "--loops", "graph", "--rounds", "1", "--seconds", "1"),
        takes_data=False,
    ),
    Step(
        "transforms",
        "transforms",
        32,
        ("--batches", "64", "512", "--rounds", "3"),
        ("--batches", "2", "--rounds", "1", "--pipelines", "v1 train", "v1 eval"),
    ),
    Step(
        "host_cost",
        "transforms",
        10,
        ("--rounds", "5", "--pipelines", "v1 train"),
        ("--images", "2", "--batch", "2", "--rounds", "1", "--pipelines", "v1 train"),
    ),
    Step(
        "worker_cost",
        "transforms",
        10,
        ("--rounds", "2", "--images", "40", "--rows", "v1 train, batch"),
        ("--images", "8", "--rounds", "1", "--rows", "v1 train, batch 256"),
    ),
    Step(
        "scale",
        "train",
        12,
        ("--rounds", "2"),
        ("--rounds", "1", "--batches", "2", "4", "--batch", "2", "--sides", "64", "96", "--sinks", "1", "10"),
    ),
    Step("sanitizer", "sanitizer", 60, is_apart=True),
)
COMPILE = ("-m", "torch_sink", "warm")
ELSEWHERE = "cuda:90"  # what kernels are compiled for where there is no GPU


class Run:
    """One run of `make gpu`: what it runs, within which time, and where it writes.

    Attributes:
        report: what gpu.json holds.
    """

    def __init__(
        self, results: Path, *, whole: bool, cuda: bool, trial: bool, data: Path | None, machine: dict[str, Any]
    ) -> None:
        self.results, self.whole, self.cuda, self.trial, self.data = results, whole, cuda, trial, data
        self.has_limits = whole and not trial  # whoever tries it may have a slow machine
        self.report: dict[str, Any] = {"machine": machine, "runs": []}
        self._logs = results / "logs"
        self._deadline = time.perf_counter()

    def run(self, step: Step) -> None:
        """Run a step within its time and what is left of that before."""
        self._deadline += step.seconds
        limit = self._deadline - time.perf_counter() if self.has_limits else None
        if limit is not None and limit < LEAST_SECONDS:
            self._add({"name": step.name, "status": "not started", "seconds": 0.0, "error": "no time was left"}, step)
            return
        print(f"{step.name} ...", flush=True)
        for run in self._runs(step, limit):
            self._add(run, step)

    def _add(self, run: dict[str, Any], step: Step) -> None:
        self.report["runs"].append({"part": step.part, **run})
        print(f"  {run['name']}: {run['status']}, {run['seconds']:.0f} s", flush=True)
        beside = self.results / "gpu.json.partial"
        beside.write_text(json.dumps(self.report, indent=1) + "\n")
        beside.replace(self.results / "gpu.json")

    def _runs(self, step: Step, limit: float | None) -> Iterator[dict[str, Any]]:
        environment = {"FAIL_WITHOUT_CUDA": "1"} if self.cuda else {}
        log = self._logs / f"{step.name}.log"
        if step.name in ("pixels", "tests"):
            wanted = step.name == "pixels"
            files = [path for path in files_with_cuda_tests() if (PIXELS in path.parents) == wanted]
            yield from run_tests(files, self._logs, seconds=limit, environment=environment)
        elif step.name == "compile":
            command = COMPILE if self.cuda else (*COMPILE, "--target", ELSEWHERE)
            yield run_command(step.name, command, log, seconds=limit)
        elif step.name == "doctor":
            yield run_command(step.name, ("-m", "torch_sink", "doctor"), log, seconds=limit)
        elif step.name == "sanitizer":
            yield self._sanitize(log, limit, environment)
        else:
            yield self._benchmark(step, log, limit)

    def _benchmark(self, step: Step, log: Path, limit: float | None) -> dict[str, Any]:
        output = self.results / f"{step.name}.json"
        output.unlink(missing_ok=True)
        data = ("--data", str(self.data)) if self.data is not None and step.takes_data else ()
        options = step.trial if self.trial else step.options if self.whole else ()
        command = (str(BENCHMARKS / f"{step.name}.py"), "--output", str(output), *data, *options)
        run = run_command(step.name, command, log, seconds=limit)
        return {**run, "result": json.loads(output.read_text())} if output.is_file() else run

    def _sanitize(self, log: Path, limit: float | None, environment: dict[str, str]) -> dict[str, Any]:
        """Some tests of the kernels under compute-sanitizer, where it is installed."""
        sanitizer = shutil.which("compute-sanitizer")
        if sanitizer is None or not self.cuda:
            return {"name": "sanitizer", "status": "not installed", "seconds": 0.0}
        tests = ("tests/kernels/interpreted/test_pipelines.py", "-k", "imagenet or jitter or erase")
        # PyTorch keeps freed memory to itself: without its cache an access beyond a tensor is one beyond an allocation.
        exact = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        # CUDA's own calls ask for what a machine may lack, and go on without: those are no errors of kernels.
        under = (sanitizer, "--error-exitcode", "9", "--report-api-errors", "no")
        return run_command("sanitizer", ("-m", "pytest", *tests), log, seconds=limit, environment=exact, under=under)


def main(given: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    arguments = parse(given, [step.part for step in steps])
    cuda = torch.cuda.is_available()
    if not cuda and arguments.part == "compile":
        print(f"torch sees no CUDA device here: kernels are compiled for one that is elsewhere, {ELSEWHERE}.")
    elif not cuda and not arguments.trial:
        print(
            f"make gpu needs a CUDA device, and torch {torch.__version__} of {sys.executable} sees none.\n"
            "Check nvidia-smi, or name the interpreter that has a CUDA build of PyTorch: make gpu GPU_PYTHON=...\n"
            "Without a device PART=compile works, and TRIAL=1.",
            file=sys.stderr,
        )
        return 1
    # Who ends this process gets the table, and leaves no command behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    results = arguments.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    if unwritable_cache():
        os.environ["TRITON_CACHE_DIR"] = str(results / "kernels")
    whole = arguments.part == "all"
    with ExitStack() as stack:
        data = photographs(arguments.data, stack)
        run = Run(results, whole=whole, cuda=cuda, trial=arguments.trial, data=data, machine=describe_machine())
        stack.callback(lambda: print(verdict(run.report), f"\nWritten: {results / 'gpu.json'}", flush=True))
        for step in steps:
            if step.part == arguments.part or (whole and not step.is_apart):
                run.run(step)
    return int(any(map(has_failed, run.report["runs"])))


def parse(given: Sequence[str] | None, parts: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", default="all", choices=("all", *dict.fromkeys(parts)))
    parser.add_argument("--results", type=Path, default=ROOT / "local" / "gpu", help="folder for gpu.json")
    named = os.environ.get("TORCH_SINK_PHOTOS") or None
    parser.add_argument("--data", type=Path, default=named, help="ImageFolder tree (default: TORCH_SINK_PHOTOS)")
    parser.add_argument("--trial", action="store_true", help="only try the commands; their figures mean nothing")
    return parser.parse_args(given)


def photographs(given: Path | None, stack: ExitStack) -> Path:
    """The folder that is given, else one of generated photographs, once for all benchmarks; tests are told of it."""
    if given is None:
        from harness import write_generated

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torch_sink_photos_")))
        write_generated(folder, PHOTOGRAPHS)
        return folder
    os.environ["TORCH_SINK_PHOTOS"] = str(given.resolve())
    return given.resolve()


if __name__ == "__main__":
    sys.exit(main())
