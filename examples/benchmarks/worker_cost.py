"""CPU milliseconds that one sample costs in a data worker: stock torchvision against recording for a device.

    python examples/benchmarks/worker_cost.py [--data DIR]

Process CPU time of dataset and `default_collate` in one single-threaded process, files in the page cache,
device="meta"; stock and torch_sink take turns. A batch holds --images photographs. First a gate: of every pipeline, the
batch that torch_sink recorded must become stock's, bit for bit. Prints a table and writes JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.utils.data import default_collate
from torchvision.datasets import ImageFolder

import torch_sink
from harness import describe, finish, make_parser, photographs, positive, save
from torch_sink.cli.bench import measure_worker_cost, worker_cost_table
from torch_sink.cli.pipelines import PIPELINES, build_pipeline, open_pipeline

GATE_BATCH = 8


def check_equal(folder: Path, pipelines: Iterable[str]) -> None:
    """Compare one batch of every pipeline, made on the CPU, with stock torchvision's.

    Raises:
        SystemExit: a bit differs.
    """
    for name in pipelines:
        batches = []
        for backend in (torch_sink.image_backend("PIL"), torch_sink.image_backend("device", device="cpu")):
            torch.manual_seed(0)
            with backend:
                dataset = ImageFolder(str(folder), build_pipeline(name))
                samples = [dataset[index] for index in range(min(GATE_BATCH, len(dataset)))]
                images, labels = default_collate(samples)
                batches.append((images.to("cpu"), labels))
        if not all(torch.equal(ours, stock) for stock, ours in zip(*batches, strict=True)):
            sys.exit(f"{name}: the batch differs from stock torchvision's; nothing was measured")


def main() -> None:
    parser = make_parser(__doc__, "worker_cost", images=120)
    parser.add_argument("--rounds", type=positive, default=7, help="turns of stock and torch_sink (default: 7)")
    parser.add_argument("--pipelines", nargs="+", default=list(PIPELINES), choices=list(PIPELINES), metavar="NAME")
    arguments = parser.parse_args()
    with photographs(arguments) as folder:
        check_equal(folder, arguments.pipelines)
        report = describe(arguments, "worker_cost.py", folder)
        report["worker_cost"] = {}
        for name in arguments.pipelines:
            pipeline = open_pipeline(name, folder, arguments.images)
            cost = measure_worker_cost(pipeline, rounds=arguments.rounds, images=arguments.images)
            report["worker_cost"][name] = cost
            save(report, arguments.output)
    table = worker_cost_table(report["worker_cost"])
    finish(report, arguments.output, f"{table.title}\n{table.as_text()}\n{table.note}")


if __name__ == "__main__":
    main()
