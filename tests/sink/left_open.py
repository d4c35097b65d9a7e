"""A program that leaves SinkLoaders open, each in the state that an argument names, and prints their workers.

When it ends no thread and no process can be started any more, as from Python 3.12 on, whichever Python runs it.
"""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import psutil
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision import transforms

import torch_sink
from torch_sink import SinkLoader, StepLoop


class Images:
    """Eight images, recorded where the backend is on."""

    transform = transforms.Compose([transforms.Resize(8), transforms.ToTensor()])

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.transform(Image.new("RGB", (12, 10), (index, 0, 0))), index % 2


class Slow:
    """Numbers; all but the first keep the thread that pickles them inside of torch for a while."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Slow:
        return Slow(index)

    def __reduce__(self) -> Any:
        end = time.monotonic() + (0.3 if self.number else 0)
        while time.monotonic() < end:
            torch.ones(500, 500) @ torch.ones(500, 500)
        return Slow, (self.number,)


def numbers(workers: int = 2, samples: int = 400, **options: Any) -> DataLoader:
    return DataLoader(range(samples), batch_size=4, num_workers=workers, **options)


def begun(loader: Any, **options: Any) -> list[Any]:
    sink = SinkLoader(loader, **options)
    batches = iter(sink)
    return [sink, batches, next(batches)]


def used_up(loader: Any) -> list[Any]:
    sink = SinkLoader(loader)
    return [sink, list(sink)]


def wrapped() -> Iterator[Any]:
    yield from numbers()


def on_images(**options: Any) -> list[Any]:
    torch_sink.set_image_backend("device", device="cpu")
    return begun(DataLoader(Images(), batch_size=2, **options), device="cpu")


def in_a_timeline() -> list[Any]:
    with torch_sink.timeline(f"{tempfile.mkdtemp()}/run.html"):
        return begun(numbers())


def of_a_loop() -> list[Any]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(216, 2))
    loader = SinkLoader(DataLoader(Images(), batch_size=2, num_workers=1))
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), steps_per_sync=2)
    loop.run(loader, max_steps=2)
    return [loop, loader]


class Collects:
    """Collects garbage where it is unpickled, in the producer's thread, when the interpreter has begun to end."""

    is_ending, has_collected = threading.Event(), threading.Event()

    def __init__(self, samples: list[int]) -> None:
        self.first = samples[0]

    def __setstate__(self, state: dict[str, int]) -> None:
        vars(self).update(state)
        if self.first == 8:
            self.is_ending.wait()
            gc.collect()
            self.has_collected.set()

    @classmethod
    def now(cls) -> None:
        cls.is_ending.set()
        assert cls.has_collected.wait(20)


def collected_in_its_thread() -> list[Any]:
    gc.disable()
    cycle: list[Any] = begun(numbers(collate_fn=Collects))
    cycle.append(cycle)
    threading._register_atexit(Collects.now)  # type: ignore[attr-defined]
    return []


STATES: dict[str, Callable[[], list[Any]]] = {
    "not begun": lambda: [SinkLoader(numbers())],
    "begun": lambda: begun(numbers()),
    "persistent": lambda: begun(numbers(persistent_workers=True)),
    "used up": lambda: used_up(numbers(samples=8)),
    "used up, persistent": lambda: used_up(numbers(samples=8, persistent_workers=True)),
    "without workers": lambda: begun(numbers(0)),
    "more workers than batches": lambda: begun(numbers(2, 4, persistent_workers=True)),
    "a function": lambda: begun(wrapped),
    "a generator": lambda: begun(wrapped()),
    "collected in its thread": collected_in_its_thread,
    "images": lambda: on_images(),
    "images of workers": lambda: on_images(num_workers=2),
    "timeline": in_a_timeline,
    "loop": of_a_loop,
    "spawn": lambda: begun(DataLoader(Slow(), None, num_workers=1, multiprocessing_context="spawn")),
    "forkserver": lambda: begun(numbers(1, multiprocessing_context="forkserver")),
}


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("can't create new thread at interpreter shutdown")


if __name__ == "__main__":
    kept = [STATES[name]() for name in sys.argv[1:]]
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    threading.Thread.start = multiprocessing.process.BaseProcess.start = refuse  # type: ignore[method-assign]
    subprocess.Popen.__init__ = refuse  # type: ignore[method-assign]
