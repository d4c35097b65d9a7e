"""Run by `test_fastai.py` in a process of its own: fastai adds methods to Pillow's and torch's classes on import.

Trains with fastai's `ImageDataLoaders` on stock code and on the "device" backend, and prints both lists of losses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from fastai.data.transforms import get_image_files
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
from fastai.vision.augment import CropPad, RandomCrop, RandomResizedCrop, Resize, aug_transforms
from fastai.vision.core import PILImage
from fastai.vision.data import ImageDataLoaders
from PIL import Image

import torch_sink

SIZE, CLASSES = 24, 2
ITEM_TRANSFORMS = {
    "Resize": Resize(SIZE),
    "Resize, padded": Resize(SIZE, method="pad"),
    "RandomCrop": [Resize(2 * SIZE), RandomCrop(SIZE)],
    "CropPad": CropPad(SIZE),
    "RandomResizedCrop": RandomResizedCrop(SIZE),
}


def losses_of(files: list[Path], transforms: Any, workers: int) -> list[float]:
    set_seed(3, reproducible=True)
    loaders = ImageDataLoaders.from_path_func(
        ".", files, lambda file: files.index(file) % CLASSES, valid_pct=0.25, seed=1, bs=4, item_tfms=transforms,
        batch_tfms=aug_transforms(size=SIZE // 2), num_workers=workers, device=torch.device("cpu"),
    )  # fmt: skip
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * (SIZE // 2) ** 2, CLASSES))
    learner = Learner(loaders, network, loss_func=CrossEntropyLossFlat())
    with learner.no_logging():
        learner.fit(1)
    return [float(loss) for loss in learner.recorder.losses] + [float(learner.recorder.values[-1][1])]


def main() -> None:
    files = sorted(get_image_files(Path(sys.argv[1])))[:16]
    results = {}
    for name, transforms in ITEM_TRANSFORMS.items():
        workers = 1 if name == "Resize" else 0
        stock = losses_of(files, transforms, workers)
        with torch_sink.image_backend("device", device="cpu"):
            ours = losses_of(files, transforms, workers)
            report = str(torch_sink.fallback_report())
        results[name] = {"stock": stock, "ours": ours, "report": report}
    with torch_sink.image_backend("device", device="cpu"):
        results["class"] = type(PILImage.create(Image.open(files[0]).convert("RGB"))).__name__
    print(json.dumps(results))


if __name__ == "__main__":
    main()
