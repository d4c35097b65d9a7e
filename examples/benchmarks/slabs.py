"""CPU time that the files of a batch cost on their way from a data worker to the training process.

    python examples/benchmarks/slabs.py [--data DIR]

A worker writes the files of a batch to shared memory, as the image backend's collate does, and sends it. "Fresh" is
torch's shared memory, mapped anew for every batch, and a copy to staging memory, from which a device can copy. "Slabs"
are memory that is mapped once. Those of a plain DataLoader, to which its workers write recorded batches, are copied to
the staging memory as well; so are those of a SinkLoader that cannot be page-locked. CPU time of both processes with all
their threads, in microseconds an image; first a gate: every batch must arrive as it was sent. Prints a table and writes
JSON.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

import torch_sink
from harness import describe, make_parser, photographs, positive, read_files, save, write
from torch_sink.cli.worker_cost import percentiles
from torch_sink.common import pool_writer
from torch_sink.image.program.block import Packed
from torch_sink.sink.openers import DataLoaderOpener

WARM_UP = 8


class Pack:
    """A collate function: the files, one after the other, and the worker's CPU seconds so far."""

    def __init__(self, files: list[bytes], *, is_recorded: bool) -> None:
        self.files, self.size, self.is_recorded = files, sum(map(len, files)), is_recorded

    def __call__(self, samples: list[int]) -> tuple[Packed | torch.Tensor, float]:
        if self.is_recorded:
            blob = pool_writer.allocate(self.size)
            assert blob is not None, "there is no slab; nothing was measured"
        else:
            blob = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(self.size))
        view, begin = memoryview(blob.numpy().data), 0
        for data in self.files:
            view[begin : begin + len(data)] = data
            begin += len(data)
        return Packed(blob, None, (0, 0)) if self.is_recorded else blob, time.process_time()


def run(files: list[bytes], batches: int, use: Callable[[torch.Tensor], Any], way: str) -> dict[str, float]:
    """Microseconds an image of the worker and of the training process."""
    collate = Pack(files, is_recorded=way == "recorded")
    loader = DataLoader(range(WARM_UP + batches), 1, num_workers=1, collate_fn=collate, multiprocessing_context="fork")
    opener = DataLoaderOpener(loader, None)
    pool = opener.make_pool() if way == "slabs" else None
    with torch_sink.image_backend("device", device="meta") if way == "recorded" else nullcontext():
        received = iter(loader) if pool is None else opener.open()
    expected = torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)
    begun = worker_begun = worker_ended = 0.0
    for number, (made, worker_ended) in enumerate(received):
        blob = made.blob if isinstance(made, Packed) else made
        if number < WARM_UP and not torch.equal(blob, expected):
            sys.exit("a batch did not arrive as it was sent; nothing was measured")
        use(blob)
        del blob, made
        if number == WARM_UP - 1:
            begun, worker_begun = time.process_time(), worker_ended
    if pool is not None and pool.batches_received < batches:
        sys.exit("batches did not come in slabs; nothing was measured")
    scale = 1e6 / batches / len(files)
    return {"worker": (worker_ended - worker_begun) * scale, "training": (time.process_time() - begun) * scale}


def main() -> int:
    parser = make_parser(__doc__, "slabs", images=64)
    parser.add_argument("--batch-size", type=positive, default=256, help="files in a batch (default: 256)")
    parser.add_argument("--batches", type=positive, default=30, help="batches in a round (default: 30)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns (default: 5)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with photographs(arguments) as folder:
        report = describe(arguments, "slabs.py", folder)
        files = read_files(folder, arguments.batch_size)
    staging = torch.ones(sum(map(len, files)), dtype=torch.uint8)
    contenders: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
        "fresh shared memory for every batch": (staging.copy_, "fresh"),
        "slabs of a plain DataLoader": (staging.copy_, "recorded"),
        "slabs that are not page-locked": (staging.copy_, "slabs"),
        "slabs": (lambda blob: None, "slabs"),
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, (use, way) in contenders.items():
            rounds[name].append(run(files, arguments.batches, use, way))
        report["slabs"] = {
            name: {side: percentiles([one[side] for one in seen]) for side in seen[0]}
            for name, seen in rounds.items()
        }  # fmt: skip
        save(report, arguments.output)
    for name, result in report["slabs"].items():
        print(
            f"{name:36} worker {result['worker']['p50']:6.1f} us, training process {result['training']['p50']:6.1f} us"
        )
    write(report, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
