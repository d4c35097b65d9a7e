"""The ways to train that `train.py` compares: same data, precision, optimizer and settings of cuDNN for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchvision import models
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

import torch_sink
from harness import Repeated, check_steps
from loader import SideStream
from torch_sink.cli.pipelines import CROP, MEAN, STD, build_pipeline

READ_LOSS_EVERY = 50
STEPS_PER_SYNC = 50


class Contender:
    """One way to train; made once a model, run with loaders of any number of workers."""

    def __init__(self, model_name: str, classes: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = models.get_model(model_name, num_classes=classes).to(device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, fused=device.type == "cuda")

    def train(self, batches: Any, steps: int) -> None:
        """Train on the next batches of what `wrap` returned."""
        raise NotImplementedError

    def check_latest(self) -> None:
        """Raise ValueError if the steps of the latest call of `train` were not what is to be measured."""

    def discard(self, batches: Any, count: int) -> None:
        """Throw the next batches away. What is as fast as can be leaves nothing ready: then the workers' pace shows."""
        for _ in range(count):
            next(batches)

    def wrap(self, loader: DataLoader[Any]) -> Any:
        """The loader's batches, which never end, as `train` takes them."""
        raise NotImplementedError

    def backend(self) -> str:
        return "PIL"

    def dataset(self, folder: Path) -> Dataset[Any]:
        """What the data workers read."""
        return ImageFolder(str(folder), self.pipeline())

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
        floats = images.to(dtype=torch.float32, memory_format=torch.channels_last)
        return [floats.sub_(self.mean).div_(self.std), labels]


class PrefetcherAndCompile(Stock):
    read_loss_every = READ_LOSS_EVERY

    def __init__(self, model_name: str, classes: int, device: torch.device) -> None:
        super().__init__(model_name, classes, device)
        # Compiling for a CPU takes a minute and shows nothing.
        self.compiled = torch.compile(self.model) if device.type == "cuda" else self.model

    def forward(self) -> nn.Module:
        return self.compiled

    def wrap(self, loader: DataLoader[Any]) -> Iterator[Any]:
        return iter(Normalizing(loader, self.device))

    def pipeline(self) -> Callable[[Any], Any]:
        return v1.Compose([v1.RandomResizedCrop(CROP), v1.RandomHorizontalFlip(), v1.PILToTensor()])


class TorchSink(Contender):
    def __init__(self, model_name: str, classes: int, device: torch.device) -> None:
        super().__init__(model_name, classes, device)
        self.loop = torch_sink.StepLoop(
            self.model, cross_entropy, self.optimizer, amp="O1", steps_per_sync=STEPS_PER_SYNC
        )

    def backend(self) -> str:
        return "device"

    def wrap(self, loader: DataLoader[Any]) -> torch_sink.SinkLoader:
        # The size is that of the next call of `train`; with one, the next epoch goes on in the same pass.
        return torch_sink.SinkLoader(loader, batches_per_epoch=1, memory_format=torch.channels_last)

    def train(self, batches: torch_sink.SinkLoader, steps: int) -> None:
        batches.batches_per_epoch = steps
        self.loop.run(batches)

    def check_latest(self) -> None:
        if self.device.type == "cuda":
            check_steps(self.loop.history, "captured")

    def discard(self, batches: torch_sink.SinkLoader, count: int) -> None:
        batches.batches_per_epoch = count
        for _ in batches:
            pass


class Synthetic(TorchSink):
    """The same model and loop once more, over one batch that stays on the device: nothing is compiled again."""

    def __init__(self, trained: TorchSink) -> None:
        self.device, self.model, self.optimizer, self.loop = (
            trained.device,
            trained.model,
            trained.optimizer,
            trained.loop,
        )

    def wrap(self, loader: DataLoader[Any]) -> torch_sink.SinkLoader:
        images, labels = next(iter(loader))
        images = images.to(self.device).contiguous(memory_format=torch.channels_last)
        batch = (images, labels.to(self.device))
        return torch_sink.SinkLoader(
            Repeated([batch]), batches_per_epoch=1, device=self.device, memory_format=torch.channels_last
        )


# In the order in which they are measured, and after them the ceiling: where time ends, the others are there.
CONTENDERS: dict[str, type[Contender]] = {
    "stock": Stock,
    "torch_sink": TorchSink,
    "prefetcher + compile": PrefetcherAndCompile,
}
SYNTHETIC = "synthetic"
