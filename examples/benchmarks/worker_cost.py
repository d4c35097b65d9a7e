"""CPU time that a sample costs a data worker: stock torchvision against torch_sink.

    python examples/benchmarks/worker_cost.py [--data DIR --photographs NAME] [--rows TEXT ...] [--add]

Measured is a worker process of a plain DataLoader, by the system's clock of its CPU time: files, transforms, collate,
shared memory, message. Stock and torch_sink take turns, with equal seeds, hence on the same files with the same draws;
files are in the page cache, and no file comes twice in a batch. torch_sink records for a device elsewhere
(device="meta"), or makes the pixels itself (device="cpu"). In large batches it also writes to the slabs of a
`SinkLoader`. Of some, the same is measured in one process, as with num_workers=0. Last, what it takes to start.

First a gate: of every pipeline, the batch that torch_sink recorded must become stock's, bit for bit. Prints tables
and writes JSON, after each row. `--rows` measures those whose name contains one of the texts, and "start"; with
`--add`, the others are kept as the JSON file has them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Subset

import torch_sink
from harness import describe, distinct, finish, make_parser, photographs, positive, save
from torch_sink.cli.pipelines import Pipeline, find_images, seed_everything
from torch_sink.cli.worker_cost import (
    SIDES,
    fallbacks_of,
    in_turns,
    milliseconds,
    percentiles,
    seconds_a_sample,
    spread,
    summary,
)
from torch_sink.sink.openers import DataLoaderOpener
from worker_rows import LARGE, MOST_FILES, ROWS, SMALL, Row

ROOT = Path(__file__).resolve().parents[2]
GATE_SAMPLES = 8
SLAB_WARM_UP = 8  # batches at first, for which slabs are made
START = "start"
# CPU seconds of a new process: imports, setting the backend, the first batch.
START_CODE = """
import sys, time
begun = time.process_time()
import torch, torchvision
from torchvision import datasets, transforms
imported = time.process_time()
if sys.argv[1] == "torch_sink":
    import torch_sink
    torch_sink.set_image_backend("device", device="meta")
ready = time.process_time()
pipeline = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
photos = datasets.ImageFolder(sys.argv[2], transforms.Compose(pipeline))
torch.set_num_threads(1)
next(iter(torch.utils.data.DataLoader(photos, int(sys.argv[3]))))
print(imported - begun, ready - imported, time.process_time() - ready)
"""


def check_equal(name: str, pipeline: Pipeline) -> None:
    """Compare a batch, made on the CPU, with stock torchvision's.

    Raises:
        SystemExit: a bit differs.
    """
    few = Subset(pipeline.dataset, range(GATE_SAMPLES))
    values = []
    for backend in (torch_sink.image_backend("PIL"), torch_sink.image_backend("device", device="cpu")):
        seed_everything(0)
        with backend:
            *_, batch = next(iter(DataLoader(few, GATE_SAMPLES, collate_fn=pipeline.batching["collate_fn"])))
            values.append([leaf.cpu() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)])
    if len(values[0]) != len(values[1]) or not all(map(torch.equal, *values)):
        sys.exit(f"{name}: the batch differs from stock torchvision's; nothing was measured")


def measure(name: str, row: Row, files: list[Path], rounds: int) -> dict[str, Any]:
    """The cost of one row."""
    pipeline = row.pipeline(name, files)
    check_equal(name, pipeline)
    fallbacks = fallbacks_of(pipeline, row.batch_size)
    in_worker = {side: partial(milliseconds, pipeline, SIDES[side], row.images) for side in SIDES}
    if row.batch_size == LARGE:
        del in_worker["on_cpu"]
        in_worker["slabs"] = partial(milliseconds_with_slabs, pipeline, row.images)
    here = {f"{side}_here": setting._replace(workers=0) for side, setting in SIDES.items() if row.one_process}
    in_process = {side: partial(milliseconds, pipeline, setting, row.images) for side, setting in here.items()}
    times = in_turns({**in_worker, **in_process}, rounds)
    result: dict[str, Any] = {"batch_size": row.batch_size, "fallbacks": fallbacks}
    result |= summary({side: times[side] for side in in_worker})
    if here:
        result["one_process"] = summary({side: times[f"{side}_here"] for side in SIDES})
    return result


def milliseconds_with_slabs(pipeline: Pipeline, images: int, seed: int) -> float:
    """CPU milliseconds that a sample costs a worker that records and writes to the slabs of a `SinkLoader`."""
    seed_everything(seed)
    opener = DataLoaderOpener(pipeline.loader(1, persistent_workers=True), None)
    pool = opener.make_pool()
    with torch_sink.image_backend("device", device="meta"):
        batches = chain.from_iterable(opener.open() for _ in repeat(None))
        made = 1000 * seconds_a_sample(islice(batches, SLAB_WARM_UP, None), images)
        opener.close()
    if pool is None or pool.batches_received * pipeline.batching["batch_size"] < images:
        sys.exit("batches did not come in slabs; nothing was measured")
    return made


def measure_start(folder: Path, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """CPU seconds of new processes that import, set the image backend, and make a batch of the v1 training pipeline."""
    steps = ("import torch and torchvision", "import torch_sink, set_image_backend", f"first batch of {SMALL}")
    seconds: dict[str, list[list[float]]] = {"stock": [], "torch_sink": []}
    for _ in range(rounds):
        for side, turns in seconds.items():
            command = [sys.executable, "-c", START_CODE, side, str(folder), str(SMALL)]
            printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
            turns.append([float(each) for each in printed.split()])
    return {
        side: {step: percentiles(values) for step, values in zip(steps, zip(*turns, strict=True), strict=True)}
        for side, turns in seconds.items()
    }


def as_text(report: Mapping[str, Any]) -> str:
    """What was measured, a line a row."""
    lines = ["CPU milliseconds a sample; stock divided by torch_sink: median (least to most)"]
    for name, result in report["worker_cost"].items():
        sides = [("stock", "stock_ms", ""), ("recorded", "torch_sink_ms", "ratio")]
        sides += [("slabs", "slabs_ms", "slabs_ratio"), ("on the CPU", "on_cpu_ms", "on_cpu_ratio")]
        for where, values in (("worker", result), ("one process", result.get("one_process", {}))):
            shown = [
                f"{side} {values[ms]['p50']:.3f}" + (f": {spread(values[ratio], 2)}" if ratio else "")
                for side, ms, ratio in sides
                if ms in values
            ]
            lines += [f"{name:40} {where:11} {', '.join(shown)}"] if shown else []
        lines += [f"    stock code: {what} ({count})" for what, count in result["fallbacks"].items()]
    for side, steps in report.get(START, {}).items():
        lines.append(f"{side}: " + ", ".join(f"{step} {seconds['p50']:.2f} s" for step, seconds in steps.items()))
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__, "worker_cost", images=120)
    parser.add_argument("--rounds", type=positive, default=7, help="turns of stock and torch_sink (default: 7)")
    parser.add_argument("--rows", nargs="+", default=[""], metavar="TEXT", help="those that contain one of these")
    parser.add_argument("--add", action="store_true", help="keep the other rows of the JSON file")
    arguments = parser.parse_args()
    chosen = {name: row for name, row in ROWS.items() if any(text in name for text in arguments.rows)}
    with photographs(arguments) as given, distinct(given, MOST_FILES) as folder:
        report = describe(arguments, "worker_cost.py", given)
        before = json.loads(arguments.output.read_text()) if arguments.add else {}
        report |= {"worker_cost": before.get("worker_cost", {}), START: before.get(START, {})}
        files = find_images(folder)
        for name, row in chosen.items():
            report["worker_cost"][name] = measure(name, row, files, arguments.rounds)
            save(report, arguments.output)
        if any(text in START for text in arguments.rows):
            report[START] = measure_start(folder, arguments.rounds)
    report["worker_cost"] = {name: report["worker_cost"][name] for name in ROWS if name in report["worker_cost"]}
    finish(report, arguments.output, as_text(report))


if __name__ == "__main__":
    main()
