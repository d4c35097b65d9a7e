"""Host microseconds that one image costs the process that trains, from the pickled batch to the last launch.

    python examples/benchmarks/host_cost.py [--data DIR] [--batch 256]

Batches come from a data worker through its queue. They are made on a device that is none: tensors on "meta", pinned
memory that is copied to as a real one's is, and a driver of Triton that launches nothing; what Triton and PyTorch do
on the host for each launch and each allocation is the real thing, what CUDA's driver does then is left out. Measured
are CPU seconds of the main thread, by part, and the bytes that it copies: with the block of the files in slabs, as a
`SinkLoader` registers them with CUDA, and in ordinary shared memory, which is copied once, without the GIL. Prints a
table and writes JSON.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.compiler
from torch.utils.data import DataLoader, default_collate
from torchvision.datasets import ImageFolder
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import torch_sink
from harness import describe, finish, make_parser, photographs, positive, save
from torch_sink.cli.bench import percentiles
from torch_sink.cli.explain import find_images
from torch_sink.cli.pipelines import build_pipeline
from torch_sink.common.slab_writer import SlabCollate
from torch_sink.common.slabs import Slabs
from torch_sink.image.core import transfer
from torch_sink.image.decode import providers
from torch_sink.image.execute import ahead, decoding, launch, on_device, run
from torch_sink.image.execute.recorded import Wanted

PIPELINES = ("v1 train", "v1 train + ColorJitter", "v1 train + RandAugment")
DRIVER = ahead._Target(GPUTarget("cuda", 90, 32))
META = torch.device("meta")
BLOCKS = {"pinned": "files in pinned slabs", "shared": "files in shared memory"}
POLL_SECONDS = 0.01
MOST_BATCHES = 1000
SLABS = 4  # of the worker
WARM_UP = 8  # batches: they fill caches, and show how large slabs have to be

RECEIVING, DECODING, PLACING, LAUNCHING = "receive the batch", "decode", "add addresses", "launch"
COPYING, REST = "copy the files", "the rest"


class Clock:
    """CPU seconds of this thread by part, each without the parts inside it, and what is copied meanwhile."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self._inside = [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.thread_time()
        self._inside.append(0.0)
        try:
            yield
        finally:
            took = time.thread_time() - started
            self.seconds[name] += took - self._inside.pop()
            self._inside[-1] += took

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            self.counts[name] += 1
            with self.part(name):
                return function(*arguments, **options)

        return call


class Device:
    """Stands for a device: tensors on "meta", and memory on the host that counts as pinned.

    Args:
        clock: what it is measured with.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.pinned: set[int] = set()
        self._empty, self._pin = torch.empty, torch.Tensor.pin_memory

    def empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = self._empty(*size, **options)
        if pin_memory:
            self.pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, where it is not pinned already."""
        if tensor.untyped_storage().data_ptr() in self.pinned:
            return tensor
        large = tensor.numel() > 2**20
        self.clock.counts["bytes copied, files" if large else "bytes copied, tables"] += tensor.nbytes
        with self.clock.part(COPYING if large else REST):
            return tensor.clone()


def compiled(*_: Any, **__: Any) -> Any:
    """Stands for a compiled kernel, which Triton keeps."""
    nothing = {"function": None, "packed_metadata": (), "metadata": None}
    return SimpleNamespace(launch_metadata=lambda *_: None, run=lambda *_: None, **nothing)


@contextmanager
def measured(clock: Clock) -> Iterator[Device]:
    """The package executes batches on a device that launches nothing, and the clock sees its parts."""
    device = Device(clock)
    replaced = [
        (torch, "empty", device.empty),
        (torch.Tensor, "pin_memory", lambda tensor: device.pin(tensor)),
        (transfer, "pins", lambda device: device.type != "cpu"),
        (triton.compiler, "compile", compiled),
        *[(providers.TritonProvider, name, lambda *_: True) for name in ("usable", "by_default", "is_right")],
        (decoding, "launch_packed", clock.timed(DECODING, decoding.launch_packed)),
        (decoding, "to_host_later", lambda status: lambda: torch.zeros(status.shape, dtype=status.dtype)),
        (run, "launch_plan", clock.timed(PLACING, launch.launch_plan)),
        (JITFunction, "run", clock.timed(LAUNCHING, JITFunction.run)),
    ]
    with ExitStack() as stack:
        for holder, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(holder, name, stand_in))
        stack.enter_context(mock.patch.object(driver, "_active", DRIVER))
        yield device


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


def batches(folder: Path, pipeline: str, size: int, block: str) -> Iterator[Callable[[], Any]]:
    """What receives one batch after the other; each lies in the queue already."""
    dataset = ImageFolder(str(folder), build_pipeline(pipeline))
    slabs = Slabs(1, SLABS)
    collate = SlabCollate(default_collate, slabs) if block == "pinned" else default_collate
    indices = [list(range(size))] * MOST_BATCHES
    loader = DataLoader(
        dataset, batch_sampler=indices, num_workers=1, collate_fn=collate, multiprocessing_context="fork"
    )
    slabs.begin_generation([])
    iterator: Any = iter(loader)
    while True:
        while iterator._data_queue.empty():
            time.sleep(POLL_SECONDS)
        yield lambda: next(iterator)[0]
        slabs.adapt()


def measure(folder: Path, pipeline: str, size: int, rounds: int, block: str) -> dict[str, Any]:
    """The cost of one pipeline, with the files of its batches in pinned or in shared memory."""
    seconds: dict[str, list[float]] = defaultdict(list)
    counts: Counter[str] = Counter()
    with torch_sink.image_backend("device", device="meta"):
        source = batches(folder, pipeline, size, block)
        for number in range(rounds + WARM_UP):
            receive, clock = next(source), Clock()
            with measured(clock) as device:
                with clock.part(RECEIVING):
                    batch = receive()
                if block == "pinned":
                    device.pinned.add(batch.recorded.packed.blob.untyped_storage().data_ptr())
                with clock.part(REST):
                    on_device.make_on_device(batch.recorded, Wanted(META))
            del batch
            if number >= WARM_UP:
                clock.seconds["in all"] = sum(clock.seconds.values())
                for name, value in clock.seconds.items():
                    seconds[name].append(1e6 * value / size)
                counts = clock.counts
    return {
        "us_an_image": {name: percentiles(values) for name, values in seconds.items()},
        "launches": counts[LAUNCHING],
        "bytes_copied_an_image": {name: counts[f"bytes copied, {name}"] / size for name in ("files", "tables")},
    }


def format_table(report: dict[str, Any]) -> str:
    lines = []
    for name, blocks in report["host_cost"].items():
        for block, result in blocks.items():
            parts = ", ".join(f"{part} {value['p50']:.2f}" for part, value in result["us_an_image"].items())
            copied = ", ".join(f"{part} {value:.0f}" for part, value in result["bytes_copied_an_image"].items())
            lines.append(f"{name}, {BLOCKS[block]}: us an image: {parts}; {result['launches']} launches")
            lines.append(f"    bytes copied an image: {copied}")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__, "host_cost", images=120)
    parser.add_argument("--batch", type=positive, default=256, help="images a batch (default: 256)")
    parser.add_argument("--rounds", type=positive, default=9, help="batches of each pipeline (default: 9)")
    parser.add_argument("--pipelines", nargs="+", default=list(PIPELINES), metavar="NAME")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with photographs(arguments) as given, distinct(given, arguments.batch) as folder:
        report = describe(arguments, "host_cost.py", given)
        report["host_cost"] = {}
        for name in arguments.pipelines:
            report["host_cost"][name] = {
                block: measure(folder, name, arguments.batch, arguments.rounds, block) for block in BLOCKS
            }
            save(report, arguments.output)
    finish(report, arguments.output, format_table(report))


if __name__ == "__main__":
    main()
