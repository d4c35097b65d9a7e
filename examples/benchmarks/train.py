"""Training from JPEG files, end to end: images per second by number of data workers.

    python examples/benchmarks/train.py [--data DIR] [--models resnet50] [--workers 1 2 4]

Contenders, each with bfloat16 autocast, channels_last, fused SGD and `cudnn.benchmark`:
    stock: DataLoader over stock torchvision, plain loop that reads the loss at every step
    prefetcher + compile: a DataLoader whose workers stop at uint8, a prefetcher that sends on a side stream and
        normalizes on the device, compiled model, loss read every 50 steps
    torch_sink: image backend, SinkLoader, StepLoop
    synthetic: the same StepLoop over one batch that stays on the device: the ceiling
Each has to pass a gate: with equal seeds it must be fed stock's batch (to the last bits where it normalizes on the
device), and find its loss on it. On a GPU, all of torch_sink's measured steps have to be captured. Then each trains on
one pass that never ends. Not counted are the steps in which it compiles. As many batches as the workers may have made
meanwhile are thrown away; a round is four times as long as that.
On a GPU the peak of its memory is noted, and the share of time in which the GPU had nothing to do.
Prints a table and writes JSON, after each measurement. Without a GPU it runs small, to try the commands; such figures
say nothing about one.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.datasets import ImageFolder

import torch_sink
from contenders import CONTENDERS, SYNTHETIC, Contender, Stock, Synthetic
from harness import (
    describe,
    device_here,
    finish,
    gpu_idle_share,
    make_parser,
    photographs,
    positive,
    process_cpu_seconds,
    rates,
    save,
    seconds_of,
)
from peaks import Peaks
from torch_sink.cli.worker_cost import percentiles

SLOTS = 3  # of a SinkLoader
ROUND = 4  # a round takes so many times the batches that may be ready or under way when it begins
LEAST_STEPS = 20  # of a round: what begins and ends it takes its time, too
ENDLESS = 1 << 40  # samples in a pass
# On average, in the units of the normalized values, where a level of 255 is 0.017: who normalizes on the device rounds
# otherwise.
LARGEST_MEAN_DIFFERENCE = 1e-4
LARGEST_LOSS_DIFFERENCE = 0.02  # relative: bfloat16, and kernels that add in another order


def make_loader(dataset: Dataset[Any], batch_size: int, workers: int) -> DataLoader[Any]:
    """One pass without an end, drawn with replacement: the dataset may be small."""
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=RandomSampler(dataset, replacement=True, num_samples=ENDLESS, generator=generator),
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        generator=generator,
    )


def batches_ahead(loader: DataLoader[Any]) -> int:
    """How many batches may be ready or under way before anybody asks for one, with any contender."""
    return loader.num_workers * (loader.prefetch_factor or 0) + SLOTS


def first_batch(contender: Contender, folder: Path, batch_size: int) -> list[torch.Tensor]:
    """The batch that a contender is fed first, on the device; the same draws for each of them."""
    with torch_sink.image_backend(contender.backend()):
        torch.manual_seed(0)
        batches = contender.wrap(make_loader(contender.dataset(folder), batch_size, 0))
        images, labels = next(iter(batches))
        if isinstance(batches, torch_sink.SinkLoader):
            # A slot's tensors are valid until the next batch.
            images, labels = images.clone(), labels.clone()
            batches.close()
    return [images, labels]


class Gate:
    """What stock is fed first, and its loss there; all contenders begin with the same weights."""

    def __init__(self, stock: Contender, folder: Path, batch_size: int) -> None:
        self.folder, self.batch_size = folder, batch_size
        self.batch = first_batch(stock, folder, batch_size)
        self.loss = stock.loss(*self.batch).item()

    def check(self, contender: Contender) -> dict[str, float]:
        """Compare the first batch of a contender, and its loss on stock's batch, with those of stock.

        Raises:
            ValueError: they differ by more than bfloat16 explains.
        """
        images, labels = first_batch(contender, self.folder, self.batch_size)
        distance = (images.float() - self.batch[0].float()).abs().mean().item()
        loss = abs(contender.loss(*self.batch).item() / self.loss - 1)
        same = torch.equal(labels.cpu(), self.batch[1].cpu()) and images.shape == self.batch[0].shape
        if not (same and distance <= LARGEST_MEAN_DIFFERENCE and loss <= LARGEST_LOSS_DIFFERENCE):
            raise ValueError(f"mean difference {distance:.2g}, of the loss {loss:.2%}: it is not measured")
        return {"mean_difference": distance, "loss_difference": loss}


def measure(
    contender: Contender, folder: Path, workers: int, arguments: argparse.Namespace, peaks: Peaks | None = None
) -> dict[str, Any]:
    """Images per second of each round, CPU seconds, idle share and peaks of memory with one number of workers."""
    with torch_sink.image_backend(contender.backend()):
        loader = make_loader(contender.dataset(folder), arguments.batch_size, workers)
        batches = contender.wrap(loader)
        ahead = batches_ahead(loader)
        steps = arguments.steps or max(ROUND * ahead, LEAST_STEPS)
        try:
            contender.train(batches, arguments.warmup)
            contender.discard(batches, ahead)
            result = measure_rounds(contender, batches, steps, arguments)
            if peaks is not None:
                result["peak_bytes"] = peaks.result(batches)
            if contender.device.type == "cuda":
                # The profiler takes its time to begin, in which batches become ready: those steps do not count.
                watched = min(steps, ahead)
                left_out = ahead / (ahead + watched)
                idle = gpu_idle_share(lambda: contender.train(batches, ahead + watched), leave_out=left_out)
                result |= {} if idle is None else {"gpu_idle_share": percentiles([idle])}
        finally:
            if isinstance(batches, torch_sink.SinkLoader):
                batches.close()
    return {"discarded_batches": ahead, "steps_of_a_round": steps, **result}


def measure_rounds(contender: Contender, batches: Any, steps: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Rounds one right after the other: what is ready at the end of one is there at the beginning of the next."""
    seconds: list[float] = []
    cpu: list[float] = []
    began = time.perf_counter()
    while len(seconds) < arguments.rounds and (not seconds or time.perf_counter() - began < arguments.seconds):
        before = process_cpu_seconds()
        seconds.append(seconds_of(lambda: contender.train(batches, steps)))
        contender.check_latest()
        cpu.append(process_cpu_seconds() - before)
    images = steps * arguments.batch_size
    return {
        "images_per_second": rates(images, seconds),
        "cpu_seconds_per_1000_images": percentiles([1000 * value / images for value in cpu]),
    }


class ModelResults:
    """What is found with one model.

    Attributes:
        found: the results by contender and number of workers; what failed, and why.
    """

    def __init__(self, name: str, folder: Path, arguments: argparse.Namespace, device: torch.device) -> None:
        self._name, self._folder, self._arguments, self._device = name, folder, arguments, device
        self._classes = len(ImageFolder(str(folder)).classes)
        self._gate = Gate(Stock(name, self._classes, device), folder, arguments.batch_size)
        self._contenders: dict[str, Contender] = {}
        self.found: dict[str, Any] = {"gate": {}, "failed": {}, "contenders": {key: {} for key in CONTENDERS}}

    def add(self, key: str, workers: int) -> None:
        """Measure a contender. What goes wrong with it is noted, and costs the others nothing."""
        if key not in self.found["failed"]:
            try:
                self.found["contenders"].setdefault(key, {})[str(workers)] = self._measured(key, workers)
            except Exception as error:
                traceback.print_exc()
                self.found["failed"][key] = f"{type(error).__name__}: {error}"

    def _measured(self, key: str, workers: int) -> dict[str, Any]:
        peaks = None
        if key not in self._contenders:
            peaks = Peaks() if self._device.type == "cuda" and key in CONTENDERS else None
            self._contenders[key] = self._begun(key)
        if peaks is not None:
            peaks.begin()
        return measure(self._contenders[key], self._folder, workers, self._arguments, peaks)

    def _begun(self, key: str) -> Contender:
        if key == SYNTHETIC:
            return Synthetic(self._contenders["torch_sink"])
        contender = CONTENDERS[key](self._name, self._classes, self._device)
        self.found["gate"][key] = self._gate.check(contender)
        return contender


def measure_model(
    name: str, folder: Path, arguments: argparse.Namespace, device: torch.device
) -> Iterator[dict[str, Any]]:
    """The results after each contender with each number of workers, the first number for all of them first."""
    torch.backends.cudnn.benchmark = True
    results = ModelResults(name, folder, arguments, device)
    for workers in arguments.workers:
        for key in CONTENDERS:
            results.add(key, workers)
            yield results.found
        if results.found["contenders"]["torch_sink"] and SYNTHETIC not in results.found["contenders"]:
            results.add(SYNTHETIC, 0)
            yield results.found


def format_table(report: dict[str, Any]) -> str:
    lines = []
    for model, measured in report["models"].items():
        heads = ("workers", "images/s", "CPU s/1000", "GPU idle", "GiB allocated", "reserved", "page-locked")
        lines.append(f"\n{model:24}" + "".join(f"{head:>14}" for head in heads))
        for name, counts in measured["contenders"].items():
            for workers, result in counts.items():
                idle = f"{result['gpu_idle_share']['p50']:.0%}" if "gpu_idle_share" in result else "-"
                shown = "-" if name == SYNTHETIC else workers
                speed, cpu = (result[key]["p50"] for key in ("images_per_second", "cpu_seconds_per_1000_images"))
                peaks = [f"{value / 2**30:.2f}" for value in result.get("peak_bytes", {}).values()]
                values = (shown, f"{speed:.0f}", f"{cpu:.2f}", idle, *peaks)
                lines.append(f"{name:24}" + "".join(f"{value:>14}" for value in values))
    return "\n".join(lines)


def main() -> None:
    gpu = device_here().type == "cuda"
    parser = make_parser(__doc__, "train", images=120)
    default_models = ["resnet50", "shufflenet_v2_x1_0", "mobilenet_v3_large"] if gpu else ["shufflenet_v2_x0_5"]
    parser.add_argument("--models", nargs="+", default=default_models, metavar="NAME", help="of torchvision.models")
    parser.add_argument("--workers", type=positive, nargs="+", default=[1, 2, 4, 8, 16] if gpu else [1, 2])
    parser.add_argument("--batch-size", type=positive, default=256 if gpu else 8)
    parser.add_argument(
        "--steps", type=positive, default=None if gpu else 3, help="of a round (default on a GPU: see the script)"
    )
    parser.add_argument("--rounds", type=positive, default=3 if gpu else 1, help="measured rounds at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no further round is begun")
    parser.add_argument("--warmup", type=positive, default=8 if gpu else 1, help="steps in which a contender compiles")
    arguments = parser.parse_args()
    with photographs(arguments) as folder:
        report = describe(arguments, "train.py", folder)
        report["models"] = {}
        for name in arguments.models:
            for results in measure_model(name, folder, arguments, device_here()):
                report["models"][name] = results
                save(report, arguments.output)
    finish(report, arguments.output, format_table(report))
    sys.exit(int(any(results["failed"] for results in report["models"].values())))


if __name__ == "__main__":
    main()
