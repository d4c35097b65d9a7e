"""CPU milliseconds that one sample costs in a data worker: stock torchvision against recording for a device.

    python examples/benchmarks/worker_cost.py [--data DIR]

Process CPU time of dataset and `default_collate` in one single-threaded process, files in the page cache,
device="meta"; stock and torch_sink take turns. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from torch_sink.cli.bench import measure_worker_cost
from torch_sink.cli.bench_report import describe_run, format_worker_cost
from torch_sink.cli.photos import write_photos
from torch_sink.cli.pipelines import PIPELINES

RESULT = Path(__file__).resolve().parents[2] / "local" / "worker_cost.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="ImageFolder tree of photographs (default: generated ones)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of stock and torch_sink (default: 7)")
    parser.add_argument("--images", type=int, default=120, help="photographs used at most (default: 120)")
    parser.add_argument("--pipelines", nargs="+", default=list(PIPELINES), choices=list(PIPELINES), metavar="NAME")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"JSON file (default: {RESULT})")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.images < 1:
        parser.error("--rounds and --images have to be 1 or more")
    if arguments.data is not None and not arguments.data.is_dir():
        parser.error(f"--data {arguments.data} is not a folder")

    with tempfile.TemporaryDirectory(prefix="torch_sink_photos_") as scratch:
        folder = arguments.data or Path(scratch)
        if arguments.data is None:
            write_photos(folder, count=arguments.images, odd=False)
        command = "python examples/benchmarks/worker_cost.py" + (" --data DIR" if arguments.data else "")
        report = describe_run(command, folder)
        report["photographs"]["given"] = arguments.data is not None
        report["worker_cost"] = measure_worker_cost(
            folder, arguments.pipelines, rounds=arguments.rounds, images=arguments.images
        )
    print(format_worker_cost(report["worker_cost"]))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nWritten: {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
