"""Libraries that own the transforms."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from .client import BATCH, MEAN, SIZE, STD, Run, client, fit, network


@client("Albumentations after torchvision", "albumentations")
def albumentations_after_torchvision(run: Run) -> list[float]:
    A = importlib.import_module("albumentations")
    to_tensor = importlib.import_module("albumentations.pytorch").ToTensorV2()
    augment = A.Compose([A.HorizontalFlip(), A.RandomBrightnessContrast(p=1.0), A.Normalize(), to_tensor], seed=5)
    crop = transforms.RandomResizedCrop(SIZE)

    def transform(image: Any) -> Any:
        return augment(image=np.asarray(crop(image)))["image"]

    photos = datasets.ImageFolder(str(run.photos / "train"), transform)
    loader = run.sink(DataLoader(photos, batch_size=BATCH, shuffle=True, num_workers=1))
    return fit(network().to(run.device), loader, run.device)


@client("Kornia on the batch", "kornia")
def kornia_on_the_batch(run: Run) -> list[float]:
    K = importlib.import_module("kornia.augmentation")
    crop = transforms.Compose([transforms.RandomResizedCrop(SIZE), transforms.ToTensor()])
    photos = datasets.ImageFolder(str(run.photos / "train"), crop)
    loader = run.sink(DataLoader(photos, batch_size=BATCH, shuffle=True, num_workers=1))
    augment = K.AugmentationSequential(
        K.RandomHorizontalFlip(), K.ColorJiggle(0.2, 0.2, 0.2, 0.1), K.RandomAffine(10.0),
        K.Normalize(torch.tensor(MEAN), torch.tensor(STD)), data_keys=["input"],
    )  # fmt: skip
    return fit(network().to(run.device), loader, run.device, on_batch=augment)


@client("Lightly: SimCLR", "lightly")
def lightly_simclr(run: Run) -> list[float]:
    data, loss = importlib.import_module("lightly.data"), importlib.import_module("lightly.loss")
    heads = importlib.import_module("lightly.models.modules")
    SimCLRTransform = importlib.import_module("lightly.transforms").SimCLRTransform
    photos = data.LightlyDataset(str(run.photos / "train"), transform=SimCLRTransform(input_size=SIZE))
    loader = run.sink(DataLoader(photos, batch_size=BATCH, shuffle=True, num_workers=1, drop_last=True))
    model = torch.nn.Sequential(network(16), heads.SimCLRProjectionHead(16, 16, 8)).to(run.device)
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.05), loss.NTXentLoss()
    losses = []
    for _ in range(2):
        for (first, second), _target, _names in loader:
            value = criterion(model(first.to(run.device)), model(second.to(run.device)))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
    return losses
