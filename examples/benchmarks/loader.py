"""Loaders compared on a real ImageFolder pipeline: plain DataLoader, a side-stream prefetcher, SinkLoader.

    python examples/benchmarks/loader.py [--data DIR] [--workers N] [--step-ms MS]

All three wrap the same kind of DataLoader and deliver to the accelerator, or to the CPU where there is none. First a
gate: with equal seeds all three must give the same batches, bit for bit; without that nothing is measured. Then they
take turns. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from torch_sink.cli.bench_report import describe_run
from torch_sink.cli.photos import write_photos
from torch_sink.sink import SinkLoader

RESULT = Path(__file__).resolve().parent / "results" / "loader.json"
Batch = list[torch.Tensor]


class Plain:
    """The usual loop: each batch is copied when it is needed."""

    def __init__(self, loader: DataLoader, device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            yield [tensor.to(self.device, non_blocking=True) for tensor in batch]

    def close(self) -> None:
        """The DataLoader closes itself."""


class SideStream(Plain):
    """One batch ahead on a side stream, as timm's PrefetchLoader and apex's data_prefetcher do it."""

    def __iter__(self) -> Iterator[Batch]:
        if self.device.type == "cpu":
            yield from self.loader
            return
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        ready: Batch | None = None
        for batch in self.loader:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                coming = [tensor.to(self.device, non_blocking=True) for tensor in batch]
            if ready is not None:
                yield ready
            main.wait_stream(side)
            for tensor in coming:
                tensor.record_stream(main)
            ready = coming
        if ready is not None:
            yield ready


CONTENDERS: dict[str, Callable[[DataLoader, torch.device], Any]] = {
    "DataLoader": Plain,
    "side-stream prefetcher": SideStream,
    "SinkLoader": lambda loader, device: SinkLoader(loader, device=device),
}


def make_source(folder: Path, arguments: argparse.Namespace, device: torch.device) -> DataLoader:
    """A seeded DataLoader over stock torchvision code."""
    pipeline = transforms.Compose(
        [
            transforms.RandomResizedCrop(arguments.image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    return DataLoader(
        ImageFolder(folder, pipeline),
        batch_size=arguments.batch_size,
        shuffle=True,
        num_workers=arguments.workers,
        persistent_workers=arguments.workers > 0,
        pin_memory=device.type != "cpu",
        generator=torch.Generator().manual_seed(0),
    )


def check_equal(make: Callable[[str], Iterable[Batch]]) -> int:
    """Compares two epochs of every contender with the plain loop; returns the number of batches.

    Raises:
        SystemExit: a batch differs.
    """
    batches: dict[str, list[Batch]] = {}
    for name in CONTENDERS:
        torch.manual_seed(0)
        loader = make(name)
        batches[name] = [[tensor.cpu() for tensor in batch] for _ in range(2) for batch in loader]
        loader.close()
    expected = batches["DataLoader"]
    for name, actual in batches.items():
        same = len(actual) == len(expected) and all(
            torch.equal(ours, theirs)
            for pair in zip(actual, expected, strict=True)
            for ours, theirs in zip(*pair, strict=True)
        )
        if not same:
            sys.exit(f"{name} does not give the batches of the plain DataLoader; nothing was measured")
    return len(expected)


def run_epoch(loader: Iterable[Batch], step_seconds: float, device: torch.device) -> tuple[list[float], int, float]:
    """One epoch: the waits for a batch in seconds, the images, and the seconds it took."""
    waits, images = [], 0
    started = asked = time.perf_counter()
    for batch in loader:
        waits.append(time.perf_counter() - asked)
        images += len(batch[0])
        if step_seconds:
            time.sleep(step_seconds)
        asked = time.perf_counter()
    if device.type != "cpu":
        torch.cuda.synchronize()  # host sync: the copies belong to the epoch
    return waits, images, time.perf_counter() - started


def resident_mib() -> float:
    """Resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(make: Callable[[str], Iterable[Batch]], arguments: argparse.Namespace, device: torch.device) -> dict:
    """Lets the contenders take turns, an epoch each after one that starts the workers."""
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    waits: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    memory: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(arguments.rounds):
        for name in CONTENDERS:
            loader = make(name)
            run_epoch(loader, 0.0, device)
            for _ in range(arguments.epochs):
                epoch_waits, images, seconds = run_epoch(loader, arguments.step_ms / 1e3, device)
                rates[name].append(images / seconds)
                waits[name] += epoch_waits
            memory[name].append(resident_mib())
            loader.close()
    return {name: summarise(rates[name], waits[name], memory[name]) for name in CONTENDERS}


def summarise(rates: list[float], waits: list[float], memory: list[float]) -> dict[str, float]:
    """Median and extremes of what was measured."""
    ordered = sorted(waits)
    return {
        "images_per_second": statistics.median(rates),
        "images_per_second_min": min(rates),
        "images_per_second_max": max(rates),
        "wait_p50_ms": 1e3 * statistics.median(ordered),
        "wait_p99_ms": 1e3 * ordered[int(0.99 * (len(ordered) - 1))],
        "resident_mib": statistics.median(memory),
    }


def format_table(results: dict[str, dict[str, float]]) -> str:
    """A line for each contender."""
    lines = [f"{'':26}{'images/s':>10}{'(min - max)':>18}{'p50 wait':>11}{'p99 wait':>11}{'resident':>11}"]
    for name, result in results.items():
        span = f"({result['images_per_second_min']:.0f} - {result['images_per_second_max']:.0f})"
        lines.append(
            f"{name:26}{result['images_per_second']:>10.0f}{span:>18}{result['wait_p50_ms']:>8.2f} ms"
            f"{result['wait_p99_ms']:>8.2f} ms{result['resident_mib']:>7.0f} MiB"
        )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="ImageFolder tree of photographs (default: generated ones)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="data workers")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=224, help="pixels of a side")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--epochs", type=int, default=2, help="measured epochs in a turn")
    parser.add_argument("--step-ms", type=float, default=0.0, help="length of a training step on the host (sleep)")
    parser.add_argument("--images", type=int, default=160, help="photographs to generate without --data")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"JSON file (default: {RESULT})")
    arguments = parser.parse_args()
    if min(arguments.batch_size, arguments.image_size, arguments.rounds, arguments.epochs, arguments.images) < 1:
        parser.error("--batch-size, --image-size, --rounds, --epochs and --images have to be 1 or more")
    if arguments.data is not None and not arguments.data.is_dir():
        parser.error(f"--data {arguments.data} is not a folder")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(prefix="torch_sink_photos_") as scratch:
        folder = arguments.data or Path(scratch)
        if arguments.data is None:
            write_photos(folder, count=arguments.images, odd=False)

        def make(name: str) -> Any:
            return CONTENDERS[name](make_source(folder, arguments, device), device)

        batches = check_equal(make)
        print(f"{batches} batches equal in all {len(CONTENDERS)} loaders")
        report = describe_run("python examples/benchmarks/loader.py", folder)
        options = {key: value for key, value in vars(arguments).items() if key not in ("data", "output")}
        report["options"] = {**options, "device": str(device), "data_given": arguments.data is not None}
        report["loaders"] = measure(make, arguments, device)
    print(format_table(report["loaders"]))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nWritten: {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
