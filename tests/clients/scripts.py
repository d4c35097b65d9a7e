"""In the manner of public scripts that train on single images."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms
from torchvision.transforms import InterpolationMode

from .client import BATCH, CLASSES, MEAN, SIZE, STD, Run, client, network


class AverageMeter:
    """A value and its mean so far."""

    def __init__(self) -> None:
        self.value = self.total = self.count = 0.0

    def update(self, value: float, count: int = 1) -> None:
        self.value = value
        self.total += value * count
        self.count += count

    @property
    def average(self) -> float:
        return self.total / self.count


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...]) -> list[Tensor]:
    """Percentage of images with the right class among the k likeliest."""
    _, predicted = output.topk(max(topk), 1, True, True)
    correct = predicted.t().eq(target.view(1, -1).expand_as(predicted.t()))
    return [correct[:k].reshape(-1).float().sum(0) * 100.0 / len(target) for k in topk]


@client("ImageNet script (`pytorch/examples`)", "torchvision")
def imagenet(run: Run) -> list[float]:
    normalize = transforms.Normalize(mean=MEAN, std=STD)
    train = datasets.ImageFolder(
        str(run.photos / "train"),
        transforms.Compose(
            [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize]
        ),
    )
    validation = datasets.ImageFolder(
        str(run.photos / "val"),
        transforms.Compose(
            [transforms.Resize(SIZE + 4), transforms.CenterCrop(SIZE), transforms.ToTensor(), normalize]
        ),
    )
    train_loader = run.sink(DataLoader(train, batch_size=BATCH, shuffle=True, num_workers=2, pin_memory=True))
    val_loader = run.sink(DataLoader(validation, batch_size=BATCH, shuffle=False, num_workers=1, pin_memory=True))
    model = models.resnet18(num_classes=CLASSES).to(run.device)
    criterion = nn.CrossEntropyLoss().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    history = []
    for _ in range(2):
        losses, top1 = AverageMeter(), AverageMeter()
        model.train()
        for images, target in train_loader:
            images = images.to(run.device, non_blocking=True)
            target = target.to(run.device, non_blocking=True)
            output = model(images)
            loss = criterion(output, target)
            (acc1,) = accuracy(output, target, topk=(1,))
            losses.update(loss.item(), images.size(0))
            top1.update(acc1.item(), images.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(losses.value)
        model.eval()
        with torch.no_grad():
            for images, target in val_loader:
                images, target = images.to(run.device), target.to(run.device)
                losses.update(criterion(model(images), target).item(), len(images))
        history += [losses.average, top1.average]
        scheduler.step()
    return history


@client("Transfer learning tutorial (PyTorch)", "torchvision")
def transfer_learning(run: Run) -> list[float]:
    chosen = {
        "train": transforms.Compose(
            [
                transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        ),
        "val": transforms.Compose(
            [
                transforms.Resize(SIZE + 8), transforms.CenterCrop(SIZE), transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        ),
    }  # fmt: skip
    images_of = {part: datasets.ImageFolder(str(run.photos / part), chosen[part]) for part in chosen}
    loaders = {part: DataLoader(images_of[part], batch_size=BATCH, shuffle=True, num_workers=1) for part in chosen}
    loaders = {part: run.sink(loader) for part, loader in loaders.items()}
    model = network(10)
    for parameter in model.parameters():
        parameter.requires_grad = False
    model[-1] = nn.Linear(model[-1].in_features, CLASSES)
    model, criterion = model.to(run.device), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.01, momentum=0.9)
    history, best, best_weights = [], 0.0, copy.deepcopy(model.state_dict())
    for _ in range(2):
        for part in ("train", "val"):
            model.train(part == "train")
            running_loss, running_corrects = 0.0, 0
            for inputs, labels in loaders[part]:
                inputs, labels = inputs.to(run.device), labels.to(run.device)
                optimizer.zero_grad()
                with torch.set_grad_enabled(part == "train"):
                    outputs = model(inputs)
                    _, predicted = torch.max(outputs, 1)
                    loss = criterion(outputs, labels)
                    if part == "train":
                        loss.backward()
                        optimizer.step()
                running_loss += loss.item() * inputs.size(0)
                running_corrects += torch.sum(predicted == labels.data).item()
            history += [running_loss / len(images_of[part]), running_corrects / len(images_of[part])]
            if part == "val" and history[-1] > best:
                best, best_weights = history[-1], copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    images, labels = next(iter(loaders["val"]))
    with torch.no_grad():
        history.append(criterion(model(images.to(run.device)), labels.to(run.device)).item())
    return history


class MaskedAutoencoder(nn.Module):
    """Predicts the patches that it does not see."""

    def __init__(self, patch: int = 8, width: int = 32) -> None:
        super().__init__()
        self.patch, count = patch, (SIZE // patch) ** 2
        self.embed = nn.Linear(3 * patch * patch, width)
        self.positions = nn.Parameter(torch.randn(1, count, width) * 0.02)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.decoder = nn.Linear(width, 3 * patch * patch)

    def forward(self, images: Tensor, mask_ratio: float = 0.75) -> Tensor:
        patches = functional.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        tokens = self.embed(patches) + self.positions
        count, kept = tokens.shape[1], int(tokens.shape[1] * (1 - mask_ratio))
        order = torch.rand(len(tokens), count, device=tokens.device).argsort(dim=1)
        restore = order.argsort(dim=1)
        visible = tokens.gather(1, order[:, :kept, None].expand(-1, -1, tokens.shape[2]))
        encoded = self.encoder(visible)
        hidden = self.mask_token.expand(len(tokens), count - kept, -1)
        decoded = torch.cat([encoded, hidden], 1).gather(1, restore[..., None].expand(-1, -1, tokens.shape[2]))
        predicted = self.decoder(decoded + self.positions)
        target = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
        is_hidden = (restore >= kept).float()
        return (((predicted - target) ** 2).mean(-1) * is_hidden).sum() / is_hidden.sum()


@client("MAE pre-training", "torchvision")
def mae(run: Run) -> list[float]:
    augment = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE, scale=(0.2, 1.0), interpolation=InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    images = datasets.ImageFolder(str(run.photos / "train"), augment)
    sampler = torch.utils.data.RandomSampler(images)
    loader = run.sink(DataLoader(images, sampler=sampler, batch_size=BATCH, num_workers=1, drop_last=True))
    model = MaskedAutoencoder().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    losses = []
    for _ in range(2):
        for samples, _target in loader:
            loss = model(samples.to(run.device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
