"""What the benchmarks share: options, photographs, timing in turns, and the report."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torch_sink.cli.bench import describe_run
from torch_sink.cli.machine import describe_machine
from torch_sink.cli.photos import write_photos
from torch_sink.cli.pipelines import find_images
from torch_sink.cli.worker_cost import percentiles

GENERATED = ".generated"
LOCAL = Path(__file__).resolve().parents[2] / "local"


def make_parser(description: str, name: str, *, images: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that the benchmarks share.

    Args:
        description: the script's docstring.
        name: of the benchmark; its JSON file is called after it.
        images: photographs to generate where none are given; None for a benchmark that needs none.
    """
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    if images is not None:
        parser.add_argument("--data", type=Path, help="ImageFolder tree of photographs (default: generated ones)")
        parser.add_argument("--name", default="", help="the published name of the photographs in --data")
        parser.add_argument("--images", type=positive, default=images, help="photographs to generate without --data")
    parser.add_argument("--output", type=Path, default=LOCAL / f"{name}.json", help="JSON file (default: %(default)s)")
    return parser


def positive(text: str) -> int:
    """An argument that has to be 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: 1 or more is needed")
    return value


@contextmanager
def photographs(arguments: argparse.Namespace) -> Iterator[Path]:
    """The folder given by --data, else one of generated photographs that is removed afterwards."""
    if arguments.data is not None:
        if not arguments.data.is_dir():
            raise SystemExit(f"--data {arguments.data} is not a folder")
        yield arguments.data
        return
    with tempfile.TemporaryDirectory(prefix="torch_sink_photos_") as scratch:
        write_generated(Path(scratch), arguments.images)
        yield Path(scratch)


@contextmanager
def distinct(folder: Path, count: int) -> Iterator[Path]:
    """A folder of `count` links to photographs: a batch holds a file that comes twice only once."""
    paths = find_images(folder)
    with tempfile.TemporaryDirectory(prefix="torch_sink_links_") as scratch:
        (Path(scratch) / "all").mkdir()
        for number in range(count):
            path = paths[number % len(paths)]
            (Path(scratch) / "all" / f"{number}{path.suffix}").symlink_to(path.resolve())
        yield Path(scratch)


def write_generated(folder: Path, count: int) -> None:
    """Fill a folder with generated photographs, and a mark that says so."""
    write_photos(folder, count=count)
    (folder / GENERATED).touch()


def read_files(folder: Path, count: int) -> list[bytes]:
    """The contents of `count` images of a folder, from the first again after the last."""
    paths = find_images(folder)
    contents = [path.read_bytes() for path in paths[:count]]
    return [contents[index % len(contents)] for index in range(count)]


def device_here() -> torch.device:
    """The CUDA device, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # host sync


def seconds_of(function: Callable[[], Any]) -> float:
    """Wall seconds of one call, the device's work included."""
    synchronize()
    started = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - started


def in_turns(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call; the contenders take turns, after one call each that is not counted.

    Args:
        contenders: name -> one measured piece of work.
        rounds: how often each is measured.
    """
    for work in contenders.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, work in contenders.items():
            seconds[name].append(seconds_of(work))
    return seconds


def rates(amount: float, seconds: list[float]) -> dict[str, float]:
    """p20, p50 and p80 of `amount` divided by each duration."""
    return percentiles([amount / value for value in seconds])


def process_cpu_seconds() -> float:
    """CPU seconds so far of this process and of its children that still run (Linux)."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = time.process_time()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything, blanks too.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def describe(arguments: argparse.Namespace, script: str, folder: Path | None = None) -> dict[str, Any]:
    """The head of a report: command, machine, photographs if there are any, and options."""
    command = f"python examples/benchmarks/{script}"
    if folder is None:
        report: dict[str, Any] = {"command": command, "machine": describe_machine()}
    else:
        report = describe_run(command + (" --data DIR" if arguments.data else ""), folder)
        given, count = not (folder / GENERATED).exists(), report["photographs"]["count"]
        name = arguments.name if given else f"torch_sink.cli.photos.write_photos, seeds 0 to {count - 1}"
        report["photographs"] |= {"given": given, "name": name}
    report["machine"]["load_average"] = round(os.getloadavg()[0], 1)  # of other work, which slows all that is measured
    options = {name: value for name, value in vars(arguments).items() if name not in ("data", "name", "output")}
    report["options"] = {**options, "device": str(device_here())}
    return report


def save(report: dict[str, Any], path: Path) -> None:
    """Write what has been measured so far as JSON, marked as unfinished: a run that is stopped leaves it."""
    _replace({**report, "unfinished": True}, path)


def write(report: dict[str, Any], path: Path) -> None:
    """Write a report as JSON and say where."""
    _replace(report, path)
    print(f"\nWritten: {path}")


def finish(report: dict[str, Any], path: Path, table: str) -> None:
    """Print the table of a report, write the report, and say where."""
    print(table)
    write(report, path)


def _replace(report: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(report, indent=1) + "\n")
    beside.replace(path)


def device_spans(work: Callable[[], Any]) -> list[tuple[str, int, int]]:
    """Name, begin and end in nanoseconds of every kernel and copy that the GPU runs for `work`, in order.

    Empty where the profiler may not read the GPU's counters, as in some containers.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        seconds_of(work)
    events = [event for event in profiler.profiler.kineto_results.events() if event.device_type() == DeviceType.CUDA]
    if not events:
        _say_once("the profiler saw no kernel: times of kernels alone and of an idle GPU are not measured")
    spans = [(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()) for event in events]
    return sorted(spans, key=lambda span: span[1])


@functools.cache
def _say_once(line: str) -> None:
    print(line)


def gpu_idle_share(work: Callable[[], Any], *, leave_out: float = 0.0) -> float | None:
    """Share of the time between its first and its last kernel in which the GPU had nothing to do, in [0, 1].

    None where the profiler sees nothing. `leave_out` is the share of the kernels, from the first on, that do not count.
    """
    spans = [(begin, end) for _, begin, end in device_spans(work)]
    spans = spans[int(leave_out * len(spans)) :]
    if not spans:
        return None
    return 1 - covered(spans) / (max(end for _, end in spans) - spans[0][0])


class Repeated:
    """Batches that are there, again and again without an end.

    An object to iterate over, which a SinkLoader reads in the thread that trains. A function would be read in a thread
    of its own, and each batch would cost a change of threads: more than a step of a small model.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self._batches)


def check_steps(history: Any, kind: str) -> None:
    """Refuse a measurement unless all steps of its run were of a kind: "captured", "compiled" or "eager".

    Raises:
        ValueError: some were not.
    """
    counts = {name: getattr(history, f"{name}_steps") for name in ("captured", "compiled", "eager")}
    if counts[kind] != history.steps:
        found = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ValueError(f"{history.steps} {kind} steps were to be measured, and there were {found}")


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Length of the union of intervals, given in the order of their beginnings."""
    length = reached = 0
    for begin, end in spans:
        length += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return length
