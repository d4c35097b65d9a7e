"""CPU milliseconds that one sample costs in a data worker: stock torchvision against recording for a device.

    python examples/benchmarks/worker_cost.py [--data DIR]

Process CPU time of dataset and `default_collate` in one single-threaded process, files in the page cache,
device="meta"; stock and torch_sink take turns, on at most --images photographs. Prints a table and writes JSON.
"""

from __future__ import annotations

import sys

from harness import describe, make_parser, photographs, positive, write
from torch_sink.cli.bench import measure_worker_cost
from torch_sink.cli.bench_report import format_worker_cost
from torch_sink.cli.pipelines import PIPELINES


def main() -> int:
    parser = make_parser(__doc__, "worker_cost", images=120)
    parser.add_argument("--rounds", type=positive, default=7, help="turns of stock and torch_sink (default: 7)")
    parser.add_argument("--pipelines", nargs="+", default=list(PIPELINES), choices=list(PIPELINES), metavar="NAME")
    arguments = parser.parse_args()
    with photographs(arguments) as folder:
        report = describe(arguments, "worker_cost.py", folder)
        report["worker_cost"] = measure_worker_cost(
            folder, arguments.pipelines, rounds=arguments.rounds, images=arguments.images
        )
    print(format_worker_cost(report["worker_cost"]))
    write(report, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
