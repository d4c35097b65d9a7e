"""How long a training waits between two epochs: for the first batch of an epoch, and for all of its batches.

    python examples/benchmarks/epoch_border.py [--data DIR] [--workers N] [--step-seconds S]

Stock torchvision code behind a plain DataLoader and a `SinkLoader`, whose workers are started anew for each epoch, kept
(`persistent_workers`), or begin the next epoch early (`prefetch_next_epoch`). A step is a pause, as of a training whose
GPU is busy and whose loader is fast enough. The contenders take turns. Prints a table and writes JSON.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import torch_sink
from harness import describe, distinct, make_parser, photographs, positive, save, write
from torch_sink.cli.worker_cost import percentiles

CONTENDERS: dict[
    str, tuple[bool, bool | None]
] = {  # keeps its workers; prefetches the next epoch, None for no SinkLoader
    "DataLoader": (False, None),
    "DataLoader, persistent_workers": (True, None),
    "SinkLoader": (False, False),
    "SinkLoader, persistent_workers": (True, False),
    "SinkLoader, prefetch_next_epoch": (False, True),
    "SinkLoader, persistent_workers and prefetch_next_epoch": (True, True),
}


def waits(loader: Any, epochs: int, step_seconds: float) -> tuple[list[float], list[float]]:
    """Seconds waited for the first batch of each epoch, and for all batches of it; the first epoch aside."""
    borders, totals = [], []
    for _ in range(epochs):
        waited, asked = [], time.perf_counter()
        for _ in loader:
            waited.append(time.perf_counter() - asked)
            time.sleep(step_seconds)
            asked = time.perf_counter()
        borders.append(waited[0])
        totals.append(sum(waited) + time.perf_counter() - asked)
    return borders[1:], totals[1:]


def main() -> int:
    parser = make_parser(__doc__, "epoch_border", images=64)
    parser.add_argument("--batch-size", type=positive, default=16, help="files in a batch (default: 16)")
    parser.add_argument("--batches", type=positive, default=12, help="batches in an epoch (default: 12)")
    parser.add_argument("--workers", type=positive, default=2, help="data workers (default: 2)")
    parser.add_argument("--epochs", type=positive, default=4, help="epochs in a round (default: 4)")
    parser.add_argument("--rounds", type=positive, default=3, help="turns (default: 3)")
    parser.add_argument("--step-seconds", type=float, default=0.25, help="length of a step (default: 0.25)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transform = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    rounds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in CONTENDERS}
    with photographs(arguments) as given, distinct(given, arguments.batch_size * arguments.batches) as folder:
        report = describe(arguments, "epoch_border.py", given)
        dataset = ImageFolder(str(folder), transform)
        for _ in range(arguments.rounds):
            for name, (is_kept, begins_early) in CONTENDERS.items():
                loader: Any = DataLoader(
                    dataset,
                    arguments.batch_size,
                    shuffle=True,
                    num_workers=arguments.workers,
                    persistent_workers=is_kept,
                    generator=torch.Generator().manual_seed(0),
                )
                used = loader
                if begins_early is not None:
                    used = torch_sink.SinkLoader(loader, prefetch_next_epoch=begins_early)
                seen = waits(used, arguments.epochs, arguments.step_seconds)
                for kept, one in zip(rounds[name], seen, strict=True):
                    kept.extend(one)
                if begins_early is not None:
                    used.close()
                del used, loader
            report["epoch_border"] = {
                name: {"first": percentiles(borders), "epoch": percentiles(totals)}
                for name, (borders, totals) in rounds.items()
            }
            save(report, arguments.output)
    for name, result in report["epoch_border"].items():
        print(f"{name:56} {result['first']['p50']:6.3f} s for the first batch, {result['epoch']['p50']:6.3f} s in all")
    write(report, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
