"""Train a small network on a folder of images: what `demo.py` compares."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from digits import make_model, write_results


def main(folder: str, epochs: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    crop = transforms.RandomResizedCrop(32, scale=(0.8, 1.0), ratio=(0.9, 1.1))
    normalize = transforms.Normalize((0.28, 0.28, 0.28), (0.32, 0.32, 0.32))
    data = ImageFolder(f"{folder}/train", transforms.Compose([crop, transforms.ToTensor(), normalize]))
    seeded = torch.Generator().manual_seed(0)
    loader = DataLoader(data, 64, shuffle=True, num_workers=2, persistent_workers=True, generator=seeded)

    model = make_model().to(device)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    losses, syncs, started = [], 0, time.perf_counter()
    for _ in range(epochs):
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = loss_fn(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            syncs += 1  # the host waited for the loss
    write_results(model, folder, losses=losses, syncs=syncs, seconds=time.perf_counter() - started)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
