"""The pipelines that the commands examine: named ones of torchvision for ImageNet, and the user's."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torchvision import transforms as v1
from torchvision.datasets.folder import IMG_EXTENSIONS, default_loader
from torchvision.transforms import v2

from torch_sink.cli.image_files import MOST_LOOKED_AT, ImageFiles, look_at
from torch_sink.cli.named import ELSEWHERE_TOO, named, said_by
from torch_sink.cli.progress import step
from torch_sink.damage.report import Policy
from torch_sink.errors import SinkError
from torch_sink.sink.loader import SinkLoader

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP, RESIZE = 224, 256
JITTER = (0.4, 0.4, 0.4, 0.1)
_GOT_AN_IMAGE = "it got an image; a function that makes a dataset takes no parameters"
_WHAT_IS_ALLOWED = (
    "a transform, a function of an image, a Dataset, a DataLoader or a SinkLoader, or a function that returns one"
)


def _train(module: Any, *augmentations: Callable[[Any], Any]) -> Any:
    head = [module.RandomResizedCrop(CROP), module.RandomHorizontalFlip()]
    values = [v1.ToTensor()] if module is v1 else [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    return module.Compose([*head, *augmentations, *values, module.Normalize(MEAN, STD)])


PIPELINES: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "v1 train": lambda: _train(v1),
    "v1 train + ColorJitter": lambda: _train(v1, v1.ColorJitter(*JITTER)),
    "v1 train + RandAugment": lambda: _train(v1, v1.RandAugment()),
    "v1 eval": lambda: v1.Compose([v1.Resize(RESIZE), v1.CenterCrop(CROP), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
    "v2 train": lambda: _train(v2),
    "v2 train + ColorJitter": lambda: _train(v2, v2.ColorJitter(*JITTER)),
    "v2 train + RandAugment": lambda: _train(v2, v2.RandAugment()),
    "v2 train, ToImage first": lambda: v2.Compose([v2.ToImage(), *_train(v2).transforms]),
}


def build_pipeline(name: str) -> Callable[[Any], Any]:
    """Build one of `PIPELINES`; raises ValueError for another name."""
    if name not in PIPELINES:
        if name.endswith(".py"):
            raise ValueError(f"{name} is a file: say which of its names is the pipeline, as {name}:transform")
        known = ", ".join(map(repr, PIPELINES))
        raise ValueError(
            f"unknown pipeline {name!r}; choose one of {known}, or your own as file.py:name or module:name"
        )
    return PIPELINES[name]()


def seed_everything(seed: int) -> None:
    """Seeds the generators that transforms draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class FolderImages(Dataset[Any]):
    """The images of a folder, each loaded as `ImageFolder` loads it and given to a transform."""

    def __init__(self, files: Sequence[Path], transform: Callable[[Any], Any]) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return self.transform(default_loader(str(self.files[index])))


class Counted:
    """A collate function that returns the number of samples and the CPU seconds of its process with each batch."""

    def __init__(self, collate: Callable[[Any], Any], is_batch: bool) -> None:
        self.collate, self.is_batch = collate, is_batch

    def __call__(self, samples: Any) -> tuple[int, float, Any]:
        batch = self.collate(samples)
        count = len(samples) if self.is_batch else max(map(len, tree_leaves(batch)))
        return count, time.process_time(), batch


class Pipeline(NamedTuple):
    """A dataset, and the arguments of loaders that make batches of it."""

    name: str  # as the user gave it
    dataset: Dataset[Any]
    batching: dict[str, Any]  # arguments of `DataLoader`, with a `Counted` collate function
    workers: int | None = None  # number of workers of the user's loader
    files: ImageFiles | None = None  # of the folder, where the dataset is made of one
    policy: Policy | None = None  # of the SinkLoader that reads the loader; None for that of the image backend

    def loader(self, workers: int, **options: Any) -> DataLoader[Any]:
        """A new loader; `options` are those of `DataLoader`."""
        return DataLoader(self.dataset, num_workers=workers, **self.batching, **options)

    def batches(self, workers: int = 0) -> Generator[tuple[int, float, Any], None, None]:
        """Yields (samples, CPU seconds so far of the process that made the batch, batch), forever.

        Args:
            workers: number of data workers; 0 to make batches in this process.

        Raises:
            ValueError: the pipeline raised, or has no samples.
        """
        try:
            loader, has_samples = self.loader(workers, persistent_workers=workers > 0), True
            while has_samples:
                has_samples = False
                for batch in loader:
                    has_samples = True
                    yield batch
        except SinkError:
            raise
        except Exception as error:  # raised by the user's code
            advice = _GOT_AN_IMAGE if isinstance(self.dataset, FolderImages) else ELSEWHERE_TOO
            raise ValueError(said_by(self.name, error, advice)) from error
        sampler = self.batching.get("batch_sampler")
        needed = getattr(sampler, "batch_size", None) if getattr(sampler, "drop_last", False) else None
        whole = f"; with drop_last=True a batch needs {needed} of them" if needed else ""
        raise ValueError(f"{self.name} gives no batch: give a dataset that has samples{whole}")


def open_pipeline(name: str, folder: str | Path | None, batch_size: int = 64) -> Pipeline:
    """Opens the pipeline with a name.

    Args:
        name: one of `PIPELINES`, or "file.py:attribute" or "module:attribute": a transform or function for the images
            of the folder, a Dataset, a DataLoader, a SinkLoader, or a class or function without parameters that returns
            one of these. Modules of the current folder can be imported. "module:attribute[key]" is a member of a dict
            or a list of these.
        folder: contains images, at any depth; None if the pipeline has a dataset.
        batch_size: ignored for a DataLoader.

    Raises:
        FileNotFoundError: there is no such folder, or no image in it.
        ValueError: the name is unknown, or what it names is no pipeline, or its file would train when it is imported,
            or every image of the folder is broken. Some broken ones are left out.
    """
    if batch_size < 1:
        raise ValueError(f"a batch of {batch_size} images cannot be made; give --batch-size 1 or more")
    found: Any = named(name) if ":" in name else build_pipeline(name)
    policy = None
    if isinstance(found, SinkLoader):
        found, policy = found.loader, found._opener.policy
    if isinstance(found, DataLoader):
        return pipeline_of(name, found, policy)
    batching: dict[str, Any] = {"batch_size": batch_size, "collate_fn": Counted(default_collate, is_batch=True)}
    if isinstance(found, Dataset) or (hasattr(found, "__getitem__") and not callable(found)):
        return Pipeline(name, found, {**batching, "shuffle": not isinstance(found, IterableDataset) and len(found) > 0})
    if isinstance(found, type) or not callable(found):
        what = "a class that needs arguments" if isinstance(found, type) else f"of type {type(found).__name__}"
        raise ValueError(f"{name} is {what}; name {_WHAT_IS_ALLOWED}")
    if folder is None:
        raise ValueError(f"{name} is a transform, which needs images: give the folder that holds them")
    paths = find_images(folder)
    with step(f"Looking at {min(len(paths), MOST_LOOKED_AT):,} files"):
        files = look_at(paths)
    if not files.sound:
        raise ValueError(f"every image in {folder} is broken, such as {files.broken[0].path}: {files.broken[0].reason}")
    batching |= {"batch_size": min(batch_size, len(files.sound)), "shuffle": True}
    return Pipeline(name, FolderImages(files.sound, found), batching, files=files)


def pipeline_of(name: str, loader: DataLoader[Any], policy: Policy | None = None) -> Pipeline:
    """The pipeline of a loader, which is not read itself; `policy` is that of the SinkLoader around it."""
    is_batch = loader.batch_size is not None or loader.batch_sampler is not None
    batching: dict[str, Any] = {"collate_fn": Counted(loader.collate_fn, is_batch)}
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        batching |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    else:
        batching["batch_sampler"] = loader.batch_sampler
    return Pipeline(name, loader.dataset, batching, loader.num_workers, policy=policy)


def find_images(folder: str | Path) -> list[Path]:
    """The image files under a folder, sorted; raises FileNotFoundError for no such folder, or no image in it."""
    root = Path(folder)
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise FileNotFoundError(f"{root} {what}; give a folder that holds images, at any depth")
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS and path.is_file())
    if not files:
        raise FileNotFoundError(f"no image in {root} or below it; looked for {', '.join(IMG_EXTENSIONS)}")
    return files
