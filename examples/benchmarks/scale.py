"""How cost grows: with the batch, the size of the photographs, the steps of a sink, the length of the dataset.

    python examples/benchmarks/scale.py

Each of the four is varied alone; what stays fixed is written into the report. Prints tables and writes JSON.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.datasets import ImageFolder

import torch_sink
from harness import (
    Repeated,
    check_steps,
    describe,
    device_here,
    finish,
    in_turns,
    make_parser,
    photographs,
    positive,
    save,
    seconds_of,
)
from torch_sink.cli.photos import make_photo
from torch_sink.cli.pipelines import build_pipeline
from torch_sink.cli.worker_cost import percentiles

PIPELINE = "v1 train"


def batch_work(folder: Path, batch: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """Loads, collates and executes one batch of a folder's images."""
    dataset = ImageFolder(str(folder), build_pipeline(PIPELINE))

    def work() -> torch.Tensor:
        with torch_sink.image_backend("device"):
            images, _ = default_collate([dataset[index % len(dataset)] for index in range(batch)])
            return images.to(device)

    return work


def by_batch(folder: Path, batches: list[int], rounds: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Milliseconds an image from file to device tensor, by batch size."""
    seconds = in_turns({str(batch): batch_work(folder, batch, device) for batch in batches}, rounds)
    return {name: percentiles([1e3 * value / int(name) for value in values]) for name, values in seconds.items()}


def by_photograph(sides: list[int], batch: int, rounds: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Milliseconds an image, by the longer side of the photographs in pixels; the result stays 224 x 224."""
    with tempfile.TemporaryDirectory(prefix="torch_sink_scale_") as scratch:
        work = {}
        for side in sides:
            folder = Path(scratch) / str(side)
            (folder / "photos").mkdir(parents=True)
            for number in range(4):
                make_photo(side, side * 3 // 4, number).save(folder / "photos" / f"{number}.jpg", quality=94)
            work[str(side)] = batch_work(folder, batch, device)
        seconds = in_turns(work, rounds)
    return {name: percentiles([1e3 * value / batch for value in values]) for name, values in seconds.items()}


def run_checked(loop: torch_sink.StepLoop, batches: torch_sink.SinkLoader) -> None:
    """An epoch, whose steps have to be captured on a GPU."""
    check_steps(loop.run(batches), "captured" if loop.device.type == "cuda" else "eager")


def by_steps_per_sync(sizes: list[int], rounds: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds a step of a tiny model on one batch that is already there, by steps a sink."""
    batch = (torch.randn(8, 16, device=device), torch.zeros(8, dtype=torch.int64, device=device))
    work = {}
    with ExitStack() as stack:
        for size in sizes:
            torch.manual_seed(0)
            model = nn.Linear(16, 4).to(device)
            loop = torch_sink.StepLoop(
                model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.01), steps_per_sync=size
            )
            # One for all rounds: another one would have other slots, for which the step would be captured again.
            batches = torch_sink.SinkLoader(Repeated([batch]), batches_per_epoch=max(sizes), device=device)
            stack.enter_context(batches)
            loop.run(batches)  # compiles and captures
            work[str(size)] = partial(run_checked, loop, batches)
        seconds = in_turns(work, rounds)
    return {name: percentiles([1e6 * value / max(sizes) for value in values]) for name, values in seconds.items()}


class Numbers(Dataset[torch.Tensor]):
    """A dataset of any length whose samples cost nothing."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def by_dataset(lengths: list[int], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds to the first batch and microseconds for each batch after it, by samples in the dataset."""
    results = {}
    for length in lengths:
        first, later = [], []
        for _ in range(rounds):
            loader = DataLoader(Numbers(length), 4, shuffle=True, generator=torch.Generator().manual_seed(0))
            with torch_sink.SinkLoader(loader) as sink_loader:
                batches = iter(sink_loader)
                first.append(1e3 * seconds_of(lambda batches=batches: next(batches)))
                started = time.perf_counter()
                for _ in range(200):
                    next(batches)
                later.append(1e6 * (time.perf_counter() - started) / 200)
        results[str(length)] = {"first_batch_ms": percentiles(first), "batch_us": percentiles(later)}
    return results


def measure(folder: Path, arguments: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One entry of the report after the other."""
    rounds, batch = arguments.rounds, arguments.batch
    yield {"batch": {"unit": "ms an image", "values": by_batch(folder, arguments.batches, rounds, device)}}
    of_photographs = by_photograph(arguments.sides, batch, rounds, device)
    yield {"photograph": {"unit": "ms an image", "fixed": {"batch": batch}, "values": of_photographs}}
    yield {"steps_per_sync": {"unit": "us a step", "values": by_steps_per_sync(arguments.sinks, rounds, device)}}
    yield {"dataset": {"values": by_dataset([1_000, 10_000, 100_000, 1_000_000], rounds)}}


def format_table(report: dict[str, Any]) -> str:
    lines = []
    for name in ("batch", "photograph", "steps_per_sync"):
        lines.append(f"\n{name} ({report[name]['unit']}, median)")
        lines += [f"{size:>12}{value['p50']:>12.3f}" for size, value in report[name]["values"].items()]
    lines.append(f"\n{'dataset':>12}{'first batch, ms':>18}{'each later, us':>18}")
    for size, value in report["dataset"]["values"].items():
        lines.append(f"{size:>12}{value['first_batch_ms']['p50']:>18.2f}{value['batch_us']['p50']:>18.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__, "scale", images=32)
    gpu = torch.cuda.is_available()
    batches = [32, 64, 128, 256, 512, 1024] if gpu else [8, 16, 32]
    sides, sinks = [250, 500, 1000, 2000], [1, 10, 100, 1000]
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each size")
    parser.add_argument("--batches", type=positive, nargs="+", default=batches, help="images a batch")
    parser.add_argument("--sides", type=positive, nargs="+", default=sides, help="pixels of photographs' longer side")
    parser.add_argument("--batch", type=positive, default=64 if gpu else 8, help="images a batch of these")
    parser.add_argument("--sinks", type=positive, nargs="+", default=sinks, help="steps a sink")
    arguments = parser.parse_args()
    with photographs(arguments) as folder:
        report = describe(arguments, "scale.py", folder)
        for entry in measure(folder, arguments, device_here()):
            report |= entry
            save(report, arguments.output)
    finish(report, arguments.output, format_table(report))


if __name__ == "__main__":
    main()
