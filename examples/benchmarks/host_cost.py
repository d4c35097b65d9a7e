"""Host microseconds that one image costs the process that trains, from the pickled batch to the last launch.

    python examples/benchmarks/host_cost.py [--data DIR] [--batch 256]

Of DINO's multi-crop, an image is one of the ten views of a file; some of its batches hold 64 files, as those of DINO's
own script do.

Batches come from a data worker through its queue. They are made on a device that is none: tensors on "meta", pinned
memory that is copied to as a real one's is, and a driver of Triton that launches nothing; what Triton and PyTorch do
on the host for each launch and each allocation is the real thing, what CUDA's driver does then is left out. Measured
are CPU seconds of the main thread, by part, and the bytes that it copies: with the block of the files in slabs, as a
`SinkLoader` registers them with CUDA, and in ordinary shared memory, which is copied once, without the GIL. Prints a
table and writes JSON.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton.compiler
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import torch_sink
from harness import describe, distinct, finish, make_parser, photographs, positive, save
from torch_sink.cli.pipelines import build_pipeline
from torch_sink.cli.worker_cost import percentiles
from torch_sink.common import transfer
from torch_sink.image.decode import providers
from torch_sink.image.program.program import Wanted
from torch_sink.image.run import ahead
from torch_sink.image.run import device as on_device
from torch_sink.image.run.device import Launches
from torch_sink.sink.openers import DataLoaderOpener
from torch_sink.triton_kernels.launching import Launcher, is_interpreted
from worker_rows import multi_crop

MULTI_CROP, FEWER_FILES = "DINO, 2 + 8 crops", 64
OF_FEWER_FILES = f"{MULTI_CROP}, {FEWER_FILES} files"
PIPELINES = ("v1 train", "v1 train + ColorJitter", "v1 train + RandAugment", MULTI_CROP, OF_FEWER_FILES)
DRIVER = ahead._Target(GPUTarget("cuda", 90, 32))
META = torch.device("meta")
BLOCKS = {"pinned": "files in pinned slabs", "shared": "files in shared memory"}
POLL_SECONDS = 0.01
MOST_BATCHES = 1000
READINGS = 2000
WARM_UP = 8  # batches: they fill caches, and make slabs

RECEIVING, DECODING, PLACING, LAUNCHING = "receive the batch", "decode", "add addresses", "launch"
COPYING, REST, IN_ALL = "copy the files", "the rest", "in all"


class Clock:
    """CPU seconds of this thread, every one in the part that is under way, and what is copied meanwhile.

    Attributes:
        files: address of the block that the files lie in.
        sees_parts: without, nothing is looked at between the beginning and the end.
    """

    def __init__(self, *, sees_parts: bool = True) -> None:
        self.files, self.sees_parts = 0, sees_parts
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self._part, self._since = REST, 0.0

    def begin(self) -> None:
        """From here on it runs."""
        self._since = time.thread_time()

    def enter(self, part: str) -> str:
        """Goes over to a part; returns the one before."""
        if not self.sees_parts:
            return REST
        now, before = time.thread_time(), self._part
        self.seconds[before] += now - self._since
        self.counts[before] += 1
        self._part, self._since = part, now
        return before

    def without_itself(self, seconds_a_reading: float) -> dict[str, float]:
        """`seconds`, but for those that its readings took."""
        return {part: seconds - self.counts[part] * seconds_a_reading for part, seconds in self.seconds.items()}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts as that of a part."""
        if not self.sees_parts:
            return function

        def call(*arguments: Any, **options: Any) -> Any:
            before = self.enter(part)
            try:
                return function(*arguments, **options)
            finally:
                self.enter(before)

        return call


def seconds_a_reading() -> float:
    """What a look at the clock costs."""
    clock = Clock()
    started = time.thread_time()
    for _ in range(READINGS):
        clock.enter(REST)
    return (time.thread_time() - started) / READINGS


def address(tensor: torch.Tensor) -> int:
    """Of the memory that it lies in."""
    return tensor.untyped_storage().data_ptr()


class PinnedMemory:
    """Memory that counts as pinned. As PyTorch keeps it: blocks of 2^n bytes, used again when a batch is done."""

    def __init__(self) -> None:
        self._registered = range(0)
        self.bytes_taken = 0
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._used: list[torch.Tensor] = []

    def register(self, block: torch.Tensor) -> None:
        """Lets a block count as pinned, in the place of the one before."""
        self._registered = range(block.data_ptr(), block.data_ptr() + block.nbytes)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self._registered

    def buffer(self, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """`transfer.host_buffer`."""
        shape = torch.Size((shape,) if isinstance(shape, int) else shape)
        count = shape.numel() * dtype.itemsize
        room = 1 << max(count - 1, 0).bit_length()
        block = self._free[room].pop() if self._free[room] else torch.empty(room, dtype=torch.uint8)
        self._used.append(block)
        self.bytes_taken += count
        return block[:count].view(dtype).view(shape)

    def reuse(self) -> None:
        """The batch is done."""
        for block in self._used:
            self._free[block.numel()].append(block)
        self._used.clear()


def pinned(memory: PinnedMemory, clock: Clock, tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory; the tensor itself where it lies there already."""
    if memory.holds(tensor):
        return tensor
    is_files = address(tensor) == clock.files
    before = clock.enter(COPYING if is_files else REST)
    copy = memory.buffer(tensor.shape, tensor.dtype, META).copy_(tensor)
    clock.enter(before)
    return copy


class Compiled(triton.compiler.CompiledKernel):
    """Stands for a compiled kernel, which Triton keeps.

    Attributes:
        launches: of all of them, so far.
    """

    launches = 0
    function = module = None
    packed_metadata = ()

    def __init__(self, *_: Any, **__: Any) -> None:
        """There is nothing to load."""

    def _init_handles(self) -> None:
        """Nor here."""

    def launch_metadata(self, *_: Any) -> None:
        """Nobody asks for it."""

    @staticmethod
    def run(*_: Any) -> None:
        Compiled.launches += 1


def timed_launches(clock: Clock) -> Callable[..., Any]:
    """`Launcher.prepared`, what it returns timed."""
    prepared = Launcher.prepared
    if not clock.sees_parts:
        return prepared
    return lambda *arguments, **constants: clock.timed(LAUNCHING, prepared(*arguments, **constants))


@contextmanager
def measured(clock: Clock, memory: PinnedMemory) -> Iterator[None]:
    """The package executes batches on a device that launches nothing, and the clock sees its parts."""
    replaced = [
        (transfer, "host_buffer", memory.buffer),
        (torch.Tensor, "pin_memory", lambda tensor: pinned(memory, clock, tensor)),
        (transfer, "pins", lambda device: device.type != "cpu"),
        (triton.compiler, "compile", Compiled),
        *[(providers.TritonProvider, name, lambda *_: True) for name in ("usable", "by_default", "is_right")],
        (on_device.DecodedImages, "__init__", clock.timed(DECODING, on_device.DecodedImages.__init__)),
        (on_device, "to_host_later", lambda status: lambda: torch.zeros(status.shape, dtype=status.dtype)),
        *[(Launches, name, clock.timed(PLACING, getattr(Launches, name))) for name in ("__init__", "run")],
        (Launcher, "__call__", clock.timed(LAUNCHING, Launcher.__call__)),
        (Launcher, "prepared", clock.timed(LAUNCHING, timed_launches(clock))),
    ]
    with ExitStack() as stack:
        for holder, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(holder, name, stand_in))
        stack.enter_context(mock.patch.dict(vars(driver)))
        driver.set_active(DRIVER)
        yield
    memory.reuse()


def batches(folder: Path, pipeline: str, size: int, block: str) -> Iterator[Callable[[], list[Any]]]:
    """What receives one batch after the other, of each view of its files; each lies in the queue already."""
    dataset = ImageFolder(str(folder), multi_crop() if pipeline.startswith(MULTI_CROP) else build_pipeline(pipeline))
    indices = [list(range(size))] * MOST_BATCHES
    loader = DataLoader(dataset, batch_sampler=indices, num_workers=1, multiprocessing_context="fork")
    opener = DataLoaderOpener(loader, None)
    if block == "pinned":
        opener.make_pool()
    iterator: Any = opener.open() if block == "pinned" else iter(loader)
    while True:
        while iterator._data_queue.empty():
            time.sleep(POLL_SECONDS)
        yield lambda: received if isinstance(received := next(iterator)[0], list) else [received]


def measure(folder: Path, pipeline: str, size: int, rounds: int, block: str) -> dict[str, Any]:
    """The cost of one pipeline, with the files of its batches in pinned or in shared memory.

    Batches take turns: of one the parts are measured, of the next only all of it, since looks at the clock take time.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    sums: list[float] = []
    memory, a_reading = PinnedMemory(), seconds_a_reading()
    with torch_sink.image_backend("device", device="meta"):
        source = batches(folder, pipeline, size, block)
        for number in range(2 * rounds + WARM_UP):
            receive, clock, launched = next(source), Clock(sees_parts=number % 2 == 0), Compiled.launches
            memory.bytes_taken = 0
            with measured(clock, memory):
                started = time.thread_time()
                clock.begin()
                clock.enter(RECEIVING)
                views = receive()
                clock.enter(REST)
                program = views[0].program
                blob = program.packed.blob
                clock.files = address(blob)
                if block == "pinned":
                    memory.register(blob)
                on_device.ProgramOnDevice(program, META).make([(view.images.batch, Wanted(META)) for view in views])
                clock.enter(REST)
                taken = time.thread_time() - started
            files, images = 0 if block == "pinned" else program.jpegs.size, size * len(views)
            copied = {"files": files / images, "tables": (memory.bytes_taken - files) / images}
            del views, program, blob
            if number >= WARM_UP:
                parts = clock.without_itself(a_reading) if clock.sees_parts else {IN_ALL: taken}
                if clock.sees_parts:
                    sums.append(1e6 * (taken - sum(clock.counts.values()) * a_reading) / images)
                for name, value in parts.items():
                    seconds[name].append(1e6 * value / images)
                launches = Compiled.launches - launched
    return {
        "images": images,
        "us_an_image": {name: percentiles(values) for name, values in seconds.items()},
        "sum_of_parts": percentiles(sums),
        "launches": launches,
        "bytes_copied_an_image": copied,
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
    if is_interpreted():
        parser.error("Triton's interpreter launches nothing that could be measured: unset TRITON_INTERPRET")
    torch.set_num_threads(1)
    with photographs(arguments) as given, distinct(given, arguments.batch) as folder:
        report = describe(arguments, "host_cost.py", given)
        report["host_cost"] = {}
        for name in arguments.pipelines:
            size = min(arguments.batch, FEWER_FILES) if name == OF_FEWER_FILES else arguments.batch
            report["host_cost"][name] = {
                block: measure(folder, name, size, arguments.rounds, block) for block in BLOCKS
            }
            save(report, arguments.output)
    finish(report, arguments.output, format_table(report))


if __name__ == "__main__":
    main()
