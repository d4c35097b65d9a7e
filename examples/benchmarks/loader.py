"""Loaders compared on a real ImageFolder pipeline: plain DataLoader, a side-stream prefetcher, SinkLoader.

    python examples/benchmarks/loader.py [--data DIR] [--workers N] [--step-ms MS]

All three wrap the same kind of DataLoader and deliver to the accelerator, or to the CPU where there is none. First a
gate: with equal seeds all three must give the same batches, bit for bit; without that nothing is measured. Then they
take turns, each round in another order, and every turn is compared with the plain DataLoader's of the same round. Last,
the host time that each adds to a batch of tensors that lie in memory. Prints tables and writes JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from harness import (
    describe,
    device_here,
    finish,
    make_parser,
    photographs,
    positive,
    process_cpu_seconds,
    save,
    synchronize,
)
from torch_sink.cli.worker_cost import percentiles
from torch_sink.sink import SinkLoader

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
    """One batch ahead, copied on a side stream, as timm's PrefetchLoader and apex's data_prefetcher do it."""

    def __init__(self, loader: DataLoader, device: torch.device) -> None:
        super().__init__(loader, device)
        self.side = torch.cuda.Stream() if device.type == "cuda" else None

    def __iter__(self) -> Iterator[Batch]:
        ready: Batch | None = None
        for batch in self.loader:
            coming = self._send(batch)
            if ready is not None:
                yield ready
            if self.side is not None:
                torch.cuda.current_stream().wait_stream(self.side)
            ready = coming
        if ready is not None:
            yield ready

    def arrived(self, batch: Batch) -> Batch:
        """What is done with a batch on the side stream, once it is on the device."""
        return batch

    def _send(self, batch: Batch) -> Batch:
        if self.side is None:
            return self.arrived([tensor.to(self.device) for tensor in batch])
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            sent = self.arrived([tensor.to(self.device, non_blocking=True) for tensor in batch])
        for tensor in sent:
            tensor.record_stream(main)
        return sent


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


class Turn:
    """Some epochs of one contender: waits for a batch, images and CPU time."""

    def __init__(self, loader: Iterable[Batch], epochs: int, step_seconds: float) -> None:
        self.waits: list[float] = []
        self.images = 0
        cpu, started = process_cpu_seconds(), time.perf_counter()
        for _ in range(epochs):
            self._run_epoch(loader, step_seconds)
        synchronize()  # the copies belong to the turn
        self.seconds = time.perf_counter() - started
        self.cpu_seconds = process_cpu_seconds() - cpu
        self.resident_mib = resident_mib()

    def _run_epoch(self, loader: Iterable[Batch], step_seconds: float) -> None:
        asked = time.perf_counter()
        for batch in loader:
            self.waits.append(time.perf_counter() - asked)
            self.images += len(batch[0])
            if step_seconds:
                time.sleep(step_seconds)
            asked = time.perf_counter()

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.images / self.seconds


def resident_mib() -> float:
    """Memory of this process and its workers in MiB; what they share is counted once where the system tells."""
    pids = [os.getpid(), *(worker.pid for worker in multiprocessing.active_children())]
    return sum(memory_kib(Path(f"/proc/{pid}")) for pid in pids) / 2**10


def memory_kib(process: Path) -> int:
    """The proportional set size of a process; some sandboxes know the resident set size only."""
    rollup, field = process / "smaps_rollup", "Pss:"
    if not rollup.is_file():
        rollup, field = process / "status", "VmRSS:"
    return next(int(line.split()[1]) for line in rollup.read_text().splitlines() if line.startswith(field))


def measure(make: Callable[[str], Any], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Lets the contenders take turns, after an epoch each that starts the workers; the results after each round."""
    turns: dict[str, list[Turn]] = {name: [] for name in CONTENDERS}
    names = list(CONTENDERS)
    for number in range(arguments.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            loader = make(name)
            Turn(loader, 1, 0.0)
            turns[name].append(Turn(loader, arguments.epochs, arguments.step_ms / 1e3))
            loader.close()
            del loader
        yield {name: summarize(turns[name], turns["DataLoader"]) for name in CONTENDERS}


def summarize(turns: list[Turn], plain: list[Turn]) -> dict[str, Any]:
    """p20, p50 and p80 over the turns, and of the ratios to the plain DataLoader's turn of the same round."""
    waits = sorted(wait for turn in turns for wait in turn.waits)
    pairs = list(zip(turns, plain, strict=True))
    return {
        "images_per_second": percentiles([turn.rate for turn in turns]),
        "ratio": percentiles([ours.rate / theirs.rate for ours, theirs in pairs]),
        "cpu_ms_per_image": percentiles([1e3 * turn.cpu_seconds / turn.images for turn in turns]),
        "cpu_ratio": percentiles([ours.cpu_seconds / theirs.cpu_seconds for ours, theirs in pairs]),
        "wait_p50_ms": 1e3 * waits[len(waits) // 2],
        "wait_p99_ms": 1e3 * waits[int(0.99 * (len(waits) - 1))],
        "resident_mib": percentiles([turn.resident_mib for turn in turns]),
    }


def measure_host_cost(device: torch.device, rounds: int = 15, count: int = 1000) -> dict[str, Any]:
    """CPU time in µs that the calling thread spends on a batch of ready tensors, beyond the bare loop over them."""
    batches = [[torch.zeros(8), torch.zeros(8)] for _ in range(count)]

    def cost(loader: Iterable[Batch]) -> float:
        started = time.thread_time()
        for _ in loader:
            pass
        return 1e6 * (time.thread_time() - started) / count

    costs: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        bare = cost(batches)
        for name, wrap in CONTENDERS.items():
            loader = wrap(batches, device)
            costs[name].append(cost(loader) - bare)
            loader.close()
    return {name: percentiles(values) for name, values in costs.items()}


def format_table(report: dict[str, Any]) -> str:
    """A line for each contender."""
    heads = ("images/s", "(p20 - p80)", "ratio", "p50 wait", "p99 wait", "CPU/image", "memory", "host cost")
    widths = (10, 16, 8, 12, 12, 12, 12, 14)
    lines = [f"{'':26}" + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))]
    for name, result in report["loaders"].items():
        speed = result["images_per_second"]
        cells = (
            f"{speed['p50']:.0f}",
            f"({speed['p20']:.0f} - {speed['p80']:.0f})",
            f"{result['ratio']['p50']:.3f}",
            f"{result['wait_p50_ms']:.2f} ms",
            f"{result['wait_p99_ms']:.2f} ms",
            f"{result['cpu_ms_per_image']['p50']:.2f} ms",
            f"{result['resident_mib']['p50']:.0f} MiB",
            f"{result['host_us_per_batch']['p50']:.1f} µs",
        )
        lines.append(f"{name:26}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, "loader", images=160)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="data workers")
    parser.add_argument("--batch-size", type=positive, default=16)
    parser.add_argument("--image-size", type=positive, default=224, help="pixels of a side")
    parser.add_argument("--rounds", type=positive, default=9, help="turns of each contender")
    parser.add_argument("--epochs", type=positive, default=4, help="measured epochs in a turn")
    parser.add_argument("--step-ms", type=float, default=0.0, help="length of a training step on the host (sleep)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = device_here()
    with photographs(arguments) as folder:

        def make(name: str) -> Any:
            return CONTENDERS[name](make_source(folder, arguments, device), device)

        batches = check_equal(make)
        print(f"{batches} batches equal in all {len(CONTENDERS)} loaders")
        report = describe(arguments, "loader.py", folder)
        for results in measure(make, arguments):
            report["loaders"] = results
            save(report, arguments.output)
        for name, cost in measure_host_cost(device).items():
            report["loaders"][name]["host_us_per_batch"] = cost
    finish(report, arguments.output, format_table(report))


if __name__ == "__main__":
    main()
