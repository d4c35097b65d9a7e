"""Train any of torchvision's classification models on a folder of images.

    python examples/train_image_folder.py --data DIR --model resnet18

DIR holds one folder per class, or `train/` and `val/` that each do; without `val/` a tenth of the images is held out.
"""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import models, transforms
from torchvision.datasets import ImageFolder

import torch_sink

HELD_OUT = 0.1
AUXILIARY_WEIGHT = 0.3


def main(options: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(arguments.seed)
    try:
        transform_pair = make_transforms(arguments.model, arguments.image_size)
        train_data, val_data, classes = open_folder(arguments.data, transform_pair, arguments.seed)
    except FileNotFoundError as error:
        print(f"cannot train on {arguments.data}: {error}", file=sys.stderr)
        return 2
    torch_sink.set_image_backend(arguments.backend)
    train_loader = make_loader(train_data, arguments, shuffle=True)
    val_loader = make_loader(val_data, arguments, shuffle=False)

    model = make_model(arguments.model, len(classes), arguments.image_size)
    model = model.to(device, memory_format=torch.channels_last)
    learning_rate = arguments.lr * arguments.batch_size / 256
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9, weight_decay=1e-4)
    steps = arguments.epochs * len(train_loader)
    # A function is not saved: a run that is resumed with more epochs follows the longer schedule from there.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step / steps))
    print(f"{len(train_data)} training and {len(val_data)} validation images, {len(classes)} classes, {device}")

    loop = torch_sink.StepLoop(
        model,
        classification_loss,
        optimizer,
        scheduler=scheduler,
        schedule="step",
        amp=arguments.amp,
        steps_per_sync=arguments.steps_per_sync,
    )
    callbacks = [torch_sink.ProgressBar(), torch_sink.LossMonitor(), Validation(model, val_loader, device)]
    callbacks.append(torch_sink.ModelCheckpoint(prefix=arguments.model, directory=arguments.output))
    with torch_sink.SinkLoader(train_loader, memory_format=torch.channels_last) as loader:
        if arguments.resume:
            print(f"resumed at step {loop.resume(arguments.output, loader)} from {arguments.output}")
        history = loop.run(loader, epochs=arguments.epochs, callbacks=callbacks)
        print(f"{history.steps} steps in {history.seconds:.1f} s: {history.samples_per_second:.0f} images/s")
        print(f"queue: {loader.stats()}")
    if torch_sink.fallback_report():
        print(f"ran in stock code:\n{torch_sink.fallback_report()}")
    return 0


def parse_arguments(options: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of images, one folder per class")
    parser.add_argument("--model", default="resnet18", help="name out of torchvision.models (default: resnet18)")
    parser.add_argument("--backend", choices=("PIL", "device"), default="device", help="who makes the pixels")
    parser.add_argument("--amp", choices=("O0", "O1", "O2", "O3", "auto"), default="O0", help="mixed precision level")
    parser.add_argument(
        "--steps-per-sync", type=int, default=100, help="steps for each return to the host (default: 100)"
    )
    parser.add_argument("--workers", type=int, default=2, help="data workers (default: 2)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate for batches of 256 (default: 0.1)")
    parser.add_argument("--image-size", type=int, help="default: what the model's published weights were made for")
    parser.add_argument("--output", type=Path, default=Path("checkpoints"), help="folder of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --output")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(options)
    known = models.list_models(module=models)
    if arguments.model not in known:
        close = difflib.get_close_matches(arguments.model, known, n=5) or known[:5]
        parser.error(f"--model {arguments.model} is no classification model of torchvision; close: {', '.join(close)}")
    if arguments.image_size is None:
        arguments.image_size = preset_of(arguments.model).crop_size[0]
    for name in ("epochs", "batch_size", "image_size"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)}: at least 1 is needed")
    if arguments.workers < 0:
        parser.error(f"--workers {arguments.workers}: 0 or more are needed")
    if arguments.steps_per_sync == 0 or arguments.steps_per_sync < -1:
        parser.error(f"--steps-per-sync {arguments.steps_per_sync}: at least 1 is needed, or -1 for a whole epoch")
    return arguments


def open_folder(
    folder: Path, transform_pair: tuple[transforms.Compose, transforms.Compose], seed: int
) -> tuple[Dataset[Any], Dataset[Any], list[str]]:
    """Open the training and the validation images of a folder, each with its transform.

    Returns:
        Training images with augmentation, validation images without, and the names of the classes.

    Raises:
        FileNotFoundError: the folder, its classes or their images are missing.
    """
    if not folder.is_dir():
        raise FileNotFoundError("there is no such folder")
    train_transform, val_transform = transform_pair
    if (folder / "train").is_dir():
        held = next((name for name in ("val", "valid", "test") if (folder / name).is_dir()), None)
        if held is None:
            raise FileNotFoundError("there is train/, but none of val/, valid/ and test/ beside it")
        train, val = ImageFolder(folder / "train", train_transform), ImageFolder(folder / held, val_transform)
        if train.classes != val.classes:
            raise FileNotFoundError(f"train/ holds the classes {train.classes}, but {held}/ holds {val.classes}")
        return train, val, train.classes
    train, val = ImageFolder(folder, train_transform), ImageFolder(folder, val_transform)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = max(1, int(HELD_OUT * len(order)))
    if len(order) <= held_out:
        raise FileNotFoundError(f"{len(order)} image is too few to train on and to hold one out for validation")
    return Subset(train, order[held_out:]), Subset(val, order[:held_out]), train.classes


def preset_of(name: str) -> Any:
    """The preprocessing that torchvision publishes with the model's weights: sizes, filter, mean and deviation."""
    return models.get_model_weights(name).DEFAULT.transforms()


def make_model(name: str, classes: int, image_size: int) -> nn.Module:
    """Build a model; vision transformers and MaxViT are built for one image size."""
    options: dict[str, Any] = {}
    if name.startswith("vit_"):
        options["image_size"] = image_size
    elif name.startswith("maxvit_"):
        options["input_size"] = (image_size, image_size)
    return models.get_model(name, num_classes=classes, **options)


def make_transforms(name: str, image_size: int) -> tuple[transforms.Compose, transforms.Compose]:
    """The model's own preprocessing, scaled to `image_size`, and its random form for training."""
    preset = preset_of(name)
    resized = max(image_size, round(image_size * preset.resize_size[0] / preset.crop_size[0]))
    tail = [transforms.ToTensor(), transforms.Normalize(preset.mean, preset.std)]
    crop = transforms.RandomResizedCrop(image_size, interpolation=preset.interpolation)
    train = [crop, transforms.RandomHorizontalFlip(), *tail]
    val = [transforms.Resize(resized, preset.interpolation), transforms.CenterCrop(image_size), *tail]
    return transforms.Compose(train), transforms.Compose(val)


def cosine(share: float) -> float:
    """Factor of the learning rate after a share of all steps: 1 at the beginning, 0 at the end."""
    return (1 + math.cos(math.pi * min(share, 1))) / 2


def make_loader(data: Dataset[Any], arguments: argparse.Namespace, *, shuffle: bool) -> DataLoader[Any]:
    return DataLoader(
        data,
        batch_size=arguments.batch_size,
        shuffle=shuffle,
        # A short last batch of one image would break BatchNorm; in validation every image counts.
        drop_last=shuffle and len(data) > arguments.batch_size,
        num_workers=arguments.workers,
        persistent_workers=arguments.workers > 0,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(arguments.seed),
    )


def classification_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy; GoogLeNet and Inception return auxiliary outputs beside the main one while they train."""
    if isinstance(output, torch.Tensor):
        return nn.functional.cross_entropy(output, labels)
    main_output, *auxiliary = [part for part in output if part is not None]
    # GoogLeNet and Inception both put the main output first.
    loss = nn.functional.cross_entropy(main_output, labels)
    return loss + AUXILIARY_WEIGHT * sum(nn.functional.cross_entropy(part, labels) for part in auxiliary)


class Validation(torch_sink.Callback):
    """Prints the accuracy on held-out images after every epoch."""

    def __init__(self, model: nn.Module, loader: DataLoader[Any], device: torch.device) -> None:
        self.model, self.loader, self.device = model, loader, device

    @torch.no_grad()
    def on_train_epoch_end(self, run_context: Any) -> None:
        training = self.model.training
        self.model.eval()
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        for images, labels in self.loader:
            guesses = self.model(images.to(self.device, non_blocking=True)).argmax(1)
            right += (guesses == labels.to(self.device, non_blocking=True)).sum()
        self.model.train(training)
        print(f"validation accuracy {right.item() / len(self.loader.dataset):.2%}")  # host sync


if __name__ == "__main__":
    sys.exit(main())
