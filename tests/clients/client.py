"""A program, and what comparing two runs of it tells: as it is, and with torch_sink's lines added."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

import torch_sink
from torch_sink.cli.photos import make_photo

CLASSES, SIZE, BATCH = 2, 32, 4
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# One kind of file each: what a folder of photographs from many cameras holds.
FILES: list[tuple[str, str, dict[str, Any]]] = [
    ("RGB", "jpg", {"quality": 90}),
    ("RGB", "jpg", {"quality": 90, "subsampling": "4:4:4"}),
    ("L", "jpg", {"quality": 90}),
    ("RGB", "jpg", {"quality": 90, "progressive": True}),
    ("CMYK", "jpg", {"quality": 90}),
    ("RGB", "png", {}),
]


@dataclass
class Run:
    """One run of a program.

    Args:
        photos: folder with `train`, `val` (ImageFolder trees) and `masks` (a PNG file for each image of `train`).
        folder: for files of the program.
        device: of the model.
        is_ours: with torch_sink's lines; the image backend is set by then.
    """

    photos: Path
    folder: Path
    device: torch.device
    is_ours: bool
    wraps: int = 0
    cleanup: ExitStack = field(default_factory=ExitStack)

    def sink(self, loader: Any) -> Any:
        """The second line: `SinkLoader(loader)`."""
        if not self.is_ours:
            return loader
        self.wraps += 1
        return self.cleanup.enter_context(torch_sink.SinkLoader(loader, device=self.device))


Program = Callable[[Run], list[float]]


@dataclass(frozen=True)
class Client:
    """A program that trains, and returns its losses.

    Args:
        name: of its row.
        program: the program.
        package: the distribution that it is a test of.
        module: what has to be importable.
        note: what else was changed, and is the same in both runs.
        is_alone: it changes classes of torch or Pillow on import, so it runs in a process of its own.
    """

    name: str
    program: Program
    package: str
    module: str
    note: str = ""
    is_alone: bool = False

    @property
    def is_installed(self) -> bool:
        return find_spec(self.module) is not None


CLIENTS: dict[str, Client] = {}


def client(name: str, package: str, module: str = "", **options: Any) -> Callable[[Program], Program]:
    """Enters a program into the table, under the name of its function."""

    def enter(program: Program) -> Program:
        assert program.__name__ not in CLIENTS, f"two programs are called {program.__name__}"
        CLIENTS[program.__name__] = Client(name, program, package, module or package.replace("-", "_"), **options)
        return program

    return enter


@dataclass(frozen=True)
class Outcome:
    """What two runs of a program gave.

    Args:
        stock: losses of the program as it is.
        ours: losses of the program with torch_sink's lines.
        has_recorded: something was recorded, so the backend took part.
        wraps: a loader was wrapped in a SinkLoader.
        fell_back: operation and reason of each row of the fallback report.
    """

    stock: list[float]
    ours: list[float]
    has_recorded: bool
    wraps: bool
    fell_back: list[tuple[str, str]]

    @property
    def is_equal(self) -> bool:
        return self.stock == self.ours


def compare(client: Client, photos: Path, folder: Path) -> Outcome:
    """Runs a program twice from the same seeds."""
    stock, _ = _train(client, Run(photos, _made(folder / "stock"), torch.device("cpu"), is_ours=False))
    with torch_sink.image_backend("device", device="cpu"):
        run = Run(photos, _made(folder / "ours"), torch.device("cpu"), is_ours=True)
        ours, wraps = _train(client, run)
        report = torch_sink.fallback_report()
    return Outcome(stock, ours, report.has_recorded, wraps, sorted(report.counts))


def _train(client: Client, run: Run) -> tuple[list[float], bool]:
    importlib.import_module(client.module)  # before the seeds: what is imported may draw
    seed_all(1)
    with run.cleanup:
        return client.program(run), run.wraps > 0


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def write_photos(folder: Path) -> Path:
    """Writes small photographs of two classes, and their masks.

    Returns:
        The folder.
    """
    for part, count in (("train", 12), ("val", 6)):
        for index in range(count):
            mode, suffix, options = FILES[index % len(FILES)]
            photo = make_photo(90 + 7 * (index % 5), 70 + 9 * (index % 4), seed=index + 100 * len(part))
            place = _existing(folder / part / f"class_{index % CLASSES}")
            photo.convert(mode).save(place / f"{part}_{index:02d}.{suffix}", **options)
            mask = Image.fromarray((np.asarray(photo.convert("L")) > 128).astype(np.uint8))
            mask.save(_existing(folder / "masks") / f"{part}_{index:02d}.png")
    return folder


def _existing(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def network(outputs: int = CLASSES) -> nn.Sequential:
    """A small convolutional network for images of any size."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(8 * 16, outputs),
    )  # fmt: skip


def fit(
    model: nn.Module,
    loader: Any,
    device: torch.device,
    *,
    epochs: int = 2,
    loss_of: Callable[..., Tensor] = functional.cross_entropy,
    on_batch: Callable[[Tensor], Tensor] = lambda images: images,
) -> list[float]:
    """The loop that most programs have: returns the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(epochs):
        for images, target in loader:
            images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
            loss = loss_of(model(on_batch(images)), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
