"""Libraries that own the training loop, or parts of it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from .client import BATCH, CLASSES, MEAN, SIZE, STD, Run, client, fit, network


def photographs(run: Run) -> datasets.ImageFolder:
    """A common pipeline: these rows are about the loop."""
    steps = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    return datasets.ImageFolder(
        str(run.photos / "train"), transforms.Compose([*steps, transforms.Normalize(MEAN, STD)])
    )


def loader_of(run: Run) -> DataLoader[Any]:
    return DataLoader(photographs(run), batch_size=BATCH, shuffle=True, num_workers=1)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@client("Lightning `Trainer`", "lightning")
def lightning_trainer(run: Run) -> list[float]:
    import lightning

    lightning.seed_everything(3, workers=True, verbose=False)
    for variable in ("PL_SEED_WORKERS", "PL_GLOBAL_SEED"):
        run.cleanup.callback(os.environ.pop, variable)
    losses: list[float] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, _: int) -> Tensor:
            images, target = batch
            loss = functional.cross_entropy(self.network(images), target)
            losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            images, target = batch
            losses.append(functional.cross_entropy(self.network(images), target).item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), run.sink(loader_of(run)), run.sink(loader_of(run)))
    return losses


@client("Lightning Fabric", "lightning")
def lightning_fabric(run: Run) -> list[float]:
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = network()
    model, optimizer = fabric.setup(model, optimizer_of(model))
    return _steps(model, optimizer, run.sink(fabric.setup_dataloaders(loader_of(run))), fabric.backward)


@client("Hugging Face Accelerate", "accelerate")
def accelerate_loop(run: Run) -> list[float]:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model = network()
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader_of(run))
    return _steps(model, optimizer, run.sink(loader), accelerator.backward)


def _steps(model: Any, optimizer: Any, loader: Any, backward: Any) -> list[float]:
    losses = []
    for _ in range(2):
        for images, target in loader:
            loss = functional.cross_entropy(model(images), target)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return losses


class ImageClassifier(nn.Module):
    """A model as transformers' `Trainer` wants it: named arguments, loss first."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.network(pixel_values)
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@client("Hugging Face `Trainer`", "transformers")
def transformers_trainer(run: Run) -> list[float]:
    import transformers
    from datasets import load_dataset

    steps = transforms.Compose(
        [transforms.RandomResizedCrop(SIZE), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    )

    def preprocess(rows: dict[str, Any]) -> dict[str, Any]:
        return {"pixel_values": [steps(image.convert("RGB")) for image in rows["image"]], "labels": rows["label"]}

    images = load_dataset("imagefolder", data_dir=str(run.photos / "train"), split="train", cache_dir=str(run.folder))

    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        pixels = torch.stack([sample["pixel_values"] for sample in samples])
        return {"pixel_values": pixels, "labels": torch.tensor([sample["labels"] for sample in samples])}

    arguments = transformers.TrainingArguments(
        output_dir=str(run.folder), per_device_train_batch_size=BATCH, num_train_epochs=2, logging_steps=1,
        save_strategy="no", report_to="none", remove_unused_columns=False, dataloader_num_workers=1, use_cpu=True,
        disable_tqdm=True, learning_rate=0.01, seed=3,
    )  # fmt: skip

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return run.sink(super().get_train_dataloader())

    trainer = Trainer(
        model=ImageClassifier(), args=arguments, data_collator=collate, train_dataset=images.with_transform(preprocess),
        eval_dataset=images.with_transform(preprocess),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return [*losses, trainer.evaluate()["eval_loss"]]


@client("pytorch-accelerated `Trainer`", "pytorch-accelerated")
def pytorch_accelerated(run: Run) -> list[float]:
    library = importlib.import_module("pytorch_accelerated")
    history = importlib.import_module("pytorch_accelerated.tracking").InMemoryRunHistory()
    losses: list[float] = []

    class Trainer(library.Trainer):  # type: ignore[misc, name-defined]
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            made = super().calculate_train_batch_loss(batch)
            losses.append(made["loss"].item())
            return made

    # Its workers take their seeds from the clock: with them, no run is equal to another.
    model = network()
    trainer = Trainer(
        model=model, loss_func=nn.CrossEntropyLoss(), optimizer=optimizer_of(model), callbacks=(), run_history=history
    )
    trainer.train(
        train_dataset=photographs(run), eval_dataset=photographs(run), num_epochs=2, per_device_batch_size=BATCH,
        train_dataloader_kwargs={"num_workers": 0}, eval_dataloader_kwargs={"num_workers": 0},
    )  # fmt: skip
    return [*losses, *history.get_metric_values("eval_loss_epoch")]


@client("torchmetrics in a plain loop", "torchmetrics")
def torchmetrics_loop(run: Run) -> list[float]:
    torchmetrics = importlib.import_module("torchmetrics")
    metrics = torchmetrics.MetricCollection(
        {
            "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES),
            "f1": torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average="macro"),
        }
    ).to(run.device)
    level = torchmetrics.MeanMetric().to(run.device)  # of the pixels: a metric that reads the batch itself
    loader, model = run.sink(loader_of(run)), network().to(run.device)
    losses = fit(model, loader, run.device)
    model.eval()
    for images, target in loader:
        images, target = images.to(run.device), target.to(run.device)
        with torch.no_grad():
            metrics.update(model(images), target)
        level.update(images)
    return [*losses, *(value.item() for value in metrics.compute().values()), level.compute().item()]


@client("fastai `ImageDataLoaders`, `Learner`", "fastai", is_alone=True)
def fastai_learner(run: Run) -> list[float]:
    from fastai.data.transforms import get_image_files
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat
    from fastai.torch_core import set_seed
    from fastai.vision import augment
    from fastai.vision.core import PILImage
    from fastai.vision.data import ImageDataLoaders

    files = sorted(get_image_files(run.photos / "train"))
    assert type(PILImage.create(Image.open(files[0]))) is PILImage
    losses = []
    for name, transform in {
        "Resize": augment.Resize(SIZE),
        "Resize, padded": augment.Resize(SIZE, method="pad"),
        "RandomCrop": [augment.Resize(2 * SIZE), augment.RandomCrop(SIZE)],
        "CropPad": augment.CropPad(SIZE),
        "RandomResizedCrop": augment.RandomResizedCrop(SIZE),
    }.items():
        set_seed(3, reproducible=True)
        loaders = ImageDataLoaders.from_path_func(
            ".", files, lambda file: files.index(Path(file)) % CLASSES, valid_pct=0.25, seed=1, bs=BATCH,
            item_tfms=transform, batch_tfms=augment.aug_transforms(size=SIZE // 2), device=run.device,
            num_workers=int(name == "Resize"),
        )  # fmt: skip
        learner = Learner(loaders, network(), loss_func=CrossEntropyLossFlat())
        with learner.no_logging():
            learner.fit(1)
        losses += [float(loss) for loss in learner.recorder.losses] + [float(learner.recorder.values[-1][1])]
    return losses
