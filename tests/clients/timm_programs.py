"""In the manner of timm's train script, and of scripts that take transforms, models and losses from timm."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets

from .client import BATCH, CLASSES, SIZE, Run, client, network


@client("timm train script: `create_dataset`, `create_loader`", "timm", note="`use_prefetcher=False`")
def timm_train(run: Run) -> list[float]:
    return _timm(run, use_prefetcher=False)


@client("timm train script, with its prefetcher", "timm")
def timm_prefetcher(run: Run) -> list[float]:
    return _timm(run, use_prefetcher=True)


def _timm(run: Run, *, use_prefetcher: bool) -> list[float]:
    data, loss = importlib.import_module("timm.data"), importlib.import_module("timm.loss")
    optim, scheduler = importlib.import_module("timm.optim"), importlib.import_module("timm.scheduler")
    photos = data.create_dataset("", root=str(run.photos), split="train", is_training=True)
    validation = data.create_dataset("", root=str(run.photos), split="val", is_training=False)
    common: dict[str, Any] = {
        "input_size": (3, SIZE, SIZE), "batch_size": BATCH, "num_workers": 1, "use_prefetcher": use_prefetcher,
        "device": run.device, "persistent_workers": False,
    }  # fmt: skip
    loader = data.create_loader(
        photos, is_training=True, scale=(0.3, 1.0), color_jitter=0.4, re_prob=0.25, re_mode="pixel",
        auto_augment="rand-m5-mstd0.5-inc1", interpolation="random", **common,
    )  # fmt: skip
    evaluation = data.create_loader(validation, is_training=False, interpolation="bicubic", crop_pct=0.9, **common)
    if not use_prefetcher:
        loader, evaluation = run.sink(loader), run.sink(evaluation)
    model, smooth = network().to(run.device), loss.LabelSmoothingCrossEntropy(0.1)
    optimizer = optim.create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.05)
    rates, _ = scheduler.create_scheduler_v2(optimizer, sched="cosine", num_epochs=2, warmup_epochs=0)
    losses = []
    for epoch in range(2):
        model.train()
        for images, target in loader:
            images, target = images.to(run.device), target.to(run.device)
            value = smooth(model(images), target)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
        rates.step(epoch + 1)
        model.eval()
        with torch.no_grad():
            for images, target in evaluation:
                output = model(images.to(run.device))
                losses.append(nn.functional.cross_entropy(output, target.to(run.device)).item())
    return losses


@client("ConvNeXt fine-tuning (timm)", "timm")
def convnext(run: Run) -> list[float]:
    timm, data = importlib.import_module("timm"), importlib.import_module("timm.data")
    loss, utils = importlib.import_module("timm.loss"), importlib.import_module("timm.utils")
    augment = data.create_transform(
        input_size=SIZE, is_training=True, color_jitter=0.4, auto_augment="rand-m5-mstd0.5-inc1",
        interpolation="bicubic", re_prob=0.25, re_mode="pixel", re_count=1,
    )  # fmt: skip
    photos = datasets.ImageFolder(str(run.photos / "train"), augment)
    loader = run.sink(DataLoader(photos, batch_size=BATCH, shuffle=True, num_workers=1, drop_last=True))
    mixup = data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    model = timm.create_model("convnext_atto", num_classes=CLASSES, depths=(1, 1, 1, 1), dims=(8, 16, 32, 64))
    model = model.to(run.device)
    average = utils.ModelEmaV3(model, decay=0.9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion, losses = loss.SoftTargetCrossEntropy(), []
    for _ in range(2):
        for samples, targets in loader:
            samples, targets = samples.to(run.device, non_blocking=True), targets.to(run.device, non_blocking=True)
            samples, targets = mixup(samples, targets)
            value = criterion(model(samples), targets)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            average.update(model)
            losses.append(value.item())
    return losses
