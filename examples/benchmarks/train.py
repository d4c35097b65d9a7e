"""Training from JPEG files, end to end: images per second by number of data workers.

    python examples/benchmarks/train.py [--data DIR] [--models resnet50] [--workers 1 2 4]

Contenders, each with bfloat16 autocast, channels_last and the same optimizer:
    stock: DataLoader over stock torchvision, plain loop that reads the loss at every step
    prefetcher + compile: a DataLoader whose workers stop at uint8, a prefetcher that sends on a side stream and
        normalizes on the device, compiled model, loss read every 50 steps
    torch_sink: image backend, SinkLoader, StepLoop
    synthetic: StepLoop over one batch that stays on the device: the ceiling
Each has to pass a gate: with equal seeds it must be fed stock's batch (to the last bits where it normalizes on the
device), and find its loss on it. Prints a table and writes JSON, after each measurement. Without a GPU it runs small,
to try the commands; such figures say nothing about one.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler
from torchvision import models
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

import torch_sink
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
from loader import SideStream
from torch_sink.cli.bench import percentiles
from torch_sink.cli.pipelines import CROP, MEAN, STD, build_pipeline

READ_LOSS_EVERY = 50
SINK_SIZE = 50
# On average, in the units of the normalized values, where a level of 255 is 0.017: who normalizes on the device rounds
# otherwise.
LARGEST_MEAN_DIFFERENCE = 1e-4
LARGEST_LOSS_DIFFERENCE = 0.02  # relative: bfloat16, and kernels that add in another order


class Contender:
    """One way to train; made once a model, run with loaders of any number of workers."""

    def __init__(self, model_name: str, classes: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = models.get_model(model_name, num_classes=classes).to(device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, fused=device.type == "cuda")

    def train(self, batches: Any, steps: int) -> None:
        raise NotImplementedError

    def wrap(self, loader: DataLoader[Any]) -> Any:
        """What `train` takes as its batches."""
        raise NotImplementedError

    def backend(self) -> str:
        return "PIL"

    def pipeline(self) -> Callable[[Any], Any]:
        """What the data workers run."""
        return build_pipeline("v1 train")

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return cross_entropy(self.forward()(images), labels)

    def forward(self) -> nn.Module:
        return self.model


class Stock(Contender):
    read_loss_every = 1

    def wrap(self, loader: DataLoader[Any]) -> Iterator[Any]:
        return iter(self.endless(loader))

    def endless(self, loader: Iterable[Any]) -> Iterator[Any]:
        while True:
            for images, labels in loader:
                yield (
                    images.to(self.device, memory_format=torch.channels_last, non_blocking=True),
                    labels.to(self.device, non_blocking=True),
                )

    def train(self, batches: Iterator[Any], steps: int) -> None:
        for step in range(steps):
            loss = self.loss(*next(batches))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step % self.read_loss_every == 0:
                loss.item()  # host sync


class Normalizing(SideStream):
    """Sends bytes, and normalizes them on the device and on the side stream, as timm's PrefetchLoader does."""

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        super().__init__(loader, device)
        self.mean, self.std = (
            torch.tensor([255 * value for value in values], device=device).view(1, 3, 1, 1) for values in (MEAN, STD)
        )

    def arrived(self, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        images, labels = batch
        return [images.float().sub_(self.mean).div_(self.std), labels]


class PrefetcherAndCompile(Stock):
    read_loss_every = READ_LOSS_EVERY

    def __init__(self, model_name: str, classes: int, device: torch.device) -> None:
        super().__init__(model_name, classes, device)
        # Compiling for a CPU takes a minute and shows nothing.
        self.compiled = torch.compile(self.model) if device.type == "cuda" else self.model

    def forward(self) -> nn.Module:
        return self.compiled

    def wrap(self, loader: DataLoader[Any]) -> Iterator[Any]:
        return iter(self.endless(Normalizing(loader, self.device)))

    def pipeline(self) -> Callable[[Any], Any]:
        return v1.Compose([v1.RandomResizedCrop(CROP), v1.RandomHorizontalFlip(), v1.PILToTensor()])


class TorchSink(Contender):
    def __init__(self, model_name: str, classes: int, device: torch.device) -> None:
        super().__init__(model_name, classes, device)
        self.loop = torch_sink.StepLoop(self.model, cross_entropy, self.optimizer, amp="O1", sink_size=SINK_SIZE)

    def backend(self) -> str:
        return "device"

    def wrap(self, loader: DataLoader[Any]) -> torch_sink.SinkLoader:
        return torch_sink.SinkLoader(loader, memory_format=torch.channels_last)

    def train(self, batches: Any, steps: int) -> None:
        self.loop.run(batches, epochs=sys.maxsize, max_steps=steps)


class Synthetic(TorchSink):
    def wrap(self, loader: DataLoader[Any]) -> Iterable[Any]:
        images, labels = next(iter(loader))
        images = images.to(self.device).contiguous(memory_format=torch.channels_last)
        batch = (images, labels.to(self.device))
        return torch_sink.SinkLoader(lambda: itertools.repeat(batch), device=self.device)


CONTENDERS: dict[str, type[Contender]] = {
    "stock": Stock,
    "torch_sink": TorchSink,
    "synthetic": Synthetic,
    "prefetcher + compile": PrefetcherAndCompile,  # last: compiling takes a minute
}


def make_loader(
    folder: Path, pipeline: Callable[[Any], Any], batch_size: int, workers: int, steps: int
) -> DataLoader[Any]:
    """`steps` batches an epoch, drawn with replacement: the folder may be small."""
    dataset = ImageFolder(str(folder), pipeline)
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=RandomSampler(dataset, replacement=True, num_samples=steps * batch_size, generator=generator),
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        generator=generator,
    )


def first_batch(contender: Contender, folder: Path, batch_size: int) -> list[torch.Tensor]:
    """The batch that a contender is fed first, on the device; the same draws for each of them."""
    with torch_sink.image_backend(contender.backend()):
        torch.manual_seed(0)
        batches = contender.wrap(make_loader(folder, contender.pipeline(), batch_size, 0, 1))
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

    def check(self, name: str, contender: Contender) -> dict[str, float]:
        """Compare the first batch of a contender, and its loss on stock's batch, with those of stock.

        Raises:
            SystemExit: they differ by more than bfloat16 explains.
        """
        images, labels = first_batch(contender, self.folder, self.batch_size)
        distance = (images.float() - self.batch[0].float()).abs().mean().item()
        loss = abs(contender.loss(*self.batch).item() / self.loss - 1)
        same = torch.equal(labels.cpu(), self.batch[1].cpu()) and images.shape == self.batch[0].shape
        if not (same and distance <= LARGEST_MEAN_DIFFERENCE and loss <= LARGEST_LOSS_DIFFERENCE):
            sys.exit(f"{name}: mean difference {distance:.2g}, of the loss {loss:.2%}; it was not measured")
        return {"mean_difference": distance, "loss_difference": loss}


def measure(contender: Contender, folder: Path, workers: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Images per second of each round, CPU seconds and idle share with one number of workers."""
    batch_size, steps = arguments.batch_size, arguments.steps
    with torch_sink.image_backend(contender.backend()):
        loader = make_loader(folder, contender.pipeline(), batch_size, workers, steps)
        batches = contender.wrap(loader)
        contender.train(batches, arguments.warmup)
        seconds, cpu = [], []
        for _ in range(arguments.rounds):
            before = process_cpu_seconds()
            seconds.append(seconds_of(lambda: contender.train(batches, steps)))
            cpu.append(process_cpu_seconds() - before)
        idle = []
        if contender.device.type == "cuda":
            shares = [gpu_idle_share(lambda: contender.train(batches, steps)) for _ in range(arguments.rounds)]
            idle = [share for share in shares if share is not None]
        if isinstance(batches, torch_sink.SinkLoader):
            batches.close()
    images = steps * batch_size
    result: dict[str, Any] = {
        "images_per_second": rates(images, seconds),
        "cpu_seconds_per_1000_images": percentiles([1000 * value / images for value in cpu]),
    }
    return {**result, "gpu_idle_share": percentiles(idle)} if idle else result


def measure_model(
    name: str, folder: Path, arguments: argparse.Namespace, device: torch.device
) -> Iterator[dict[str, Any]]:
    """The results after each contender with each number of workers, the first number for all of them first."""
    classes = len(ImageFolder(str(folder)).classes)
    gate = Gate(Stock(name, classes, device), folder, arguments.batch_size)
    contenders: dict[str, Contender] = {}
    found: dict[str, Any] = {"gate": {}, "contenders": {}}
    for workers in arguments.workers:
        for key, make in CONTENDERS.items():
            if key not in contenders:
                contenders[key] = make(name, classes, device)
                if key != "synthetic":
                    found["gate"][key] = gate.check(key, contenders[key])
            elif key == "synthetic":
                continue  # which has no workers
            count = workers if key != "synthetic" else 0
            measured = measure(contenders[key], folder, count, arguments)
            found["contenders"].setdefault(key, {})[str(count)] = measured
            yield found


def format_table(report: dict[str, Any]) -> str:
    lines = []
    for model, measured in report["models"].items():
        lines.append(f"\n{model:24}{'workers':>8}{'images/s':>10}{'CPU s/1000':>12}{'GPU idle':>10}")
        for name, counts in measured["contenders"].items():
            for workers, result in counts.items():
                idle = f"{result['gpu_idle_share']['p50']:.0%}" if "gpu_idle_share" in result else "-"
                shown = "-" if name == "synthetic" else workers
                speed, cpu = (result[key]["p50"] for key in ("images_per_second", "cpu_seconds_per_1000_images"))
                lines.append(f"{name:24}{shown:>8}{speed:>10.0f}{cpu:>12.2f}{idle:>10}")
    return "\n".join(lines)


def main() -> None:
    gpu = device_here().type == "cuda"
    parser = make_parser(__doc__, "train", images=120)
    default_models = ["resnet50", "shufflenet_v2_x1_0", "mobilenet_v3_large"] if gpu else ["shufflenet_v2_x0_5"]
    parser.add_argument("--models", nargs="+", default=default_models, metavar="NAME", help="of torchvision.models")
    parser.add_argument("--workers", type=positive, nargs="+", default=[1, 2, 4, 8, 16] if gpu else [1, 2])
    parser.add_argument("--batch-size", type=positive, default=256 if gpu else 8)
    parser.add_argument("--steps", type=positive, default=20 if gpu else 3, help="steps of a round")
    parser.add_argument("--rounds", type=positive, default=5 if gpu else 1, help="measured rounds")
    parser.add_argument("--warmup", type=positive, default=8 if gpu else 1, help="steps before")
    arguments = parser.parse_args()
    with photographs(arguments) as folder:
        report = describe(arguments, "train.py", folder)
        report["models"] = {}
        for name in arguments.models:
            for results in measure_model(name, folder, arguments, device_here()):
                report["models"][name] = results
                save(report, arguments.output)
    finish(report, arguments.output, format_table(report))


if __name__ == "__main__":
    main()
