"""In the manner of public scripts that take several crops of an image."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from torchvision.transforms import InterpolationMode

from .client import BATCH, MEAN, SIZE, STD, Run, client, network

FEATURES = 16
to_normalized = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


class PillowBlur:
    """Blurs with Pillow, as the scripts do that are older than torchvision's own."""

    def __init__(self, p: float = 0.5, sigma: tuple[float, float] = (0.1, 2.0)) -> None:
        self.p, self.sigma = p, sigma

    def __call__(self, image: Image.Image) -> Image.Image:
        if random.random() > self.p:
            return image
        return image.filter(ImageFilter.GaussianBlur(radius=random.uniform(*self.sigma)))


class PillowSolarize:
    """Solarizes with Pillow."""

    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, image: Image.Image) -> Image.Image:
        return ImageOps.solarize(image) if random.random() < self.p else image


def jittered(size: int, scale: tuple[float, float], *after: Any, strength: float = 0.4) -> transforms.Compose:
    """A random crop with the color jitter that all of these scripts have."""
    jitter = transforms.ColorJitter(strength, strength, strength / 2, strength / 4)
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale=scale, interpolation=InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(p=0.5),
            transforms.RandomApply([jitter], p=0.8),
            transforms.RandomGrayscale(p=0.2),
            *after,
            to_normalized,
        ]
    )


class MultiCrop:
    """DINO's: two large crops, some small ones."""

    def __init__(self, small: int) -> None:
        self.first = jittered(SIZE, (0.4, 1.0), PillowBlur(1.0))
        self.second = jittered(SIZE, (0.4, 1.0), PillowBlur(0.1), PillowSolarize(0.2))
        self.local, self.small = jittered(SIZE // 2, (0.05, 0.4), PillowBlur(0.5)), small

    def __call__(self, image: Image.Image) -> list[Tensor]:
        return [self.first(image), self.second(image), *(self.local(image) for _ in range(self.small))]


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, momentum: float) -> None:
    """Moves a teacher's, or key encoder's, weights towards a model's."""
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.mul_(momentum).add_(fast.detach(), alpha=1 - momentum)


def dino_loss(targets: Sequence[Tensor], guesses: Sequence[Tensor]) -> Tensor:
    """DINO's cross-entropy of each pair of different crops; the first guesses are of the targets' crops."""
    terms = [-(t * g).sum(-1).mean() for i, t in enumerate(targets) for j, g in enumerate(guesses) if i != j]
    return torch.stack(terms).mean()


@client("DINO, multi-crop", "torchvision")
def dino(run: Run) -> list[float]:
    images = datasets.ImageFolder(str(run.photos / "train"), MultiCrop(small=2))
    loader = run.sink(DataLoader(images, batch_size=BATCH, shuffle=True, num_workers=2, drop_last=True))
    student = network(FEATURES).to(run.device)
    teacher, center = copy.deepcopy(student), torch.zeros(1, FEATURES, device=run.device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        for crops, _labels in loader:
            crops = [crop.to(run.device, non_blocking=True) for crop in crops]
            with torch.no_grad():
                taught = teacher(torch.cat(crops[:2]))
            # Crops of a size go through the network together.
            learned = torch.cat([student(torch.cat(crops[:2])), student(torch.cat(crops[2:]))])
            targets = ((taught - center) / 0.04).softmax(-1).chunk(2)
            guesses = (learned / 0.1).log_softmax(-1).chunk(len(crops))
            loss = dino_loss(targets, guesses)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 3.0)
            optimizer.step()
            follow(teacher, student, 0.99)
            center = 0.9 * center + 0.1 * taught.mean(0, keepdim=True)
            losses.append(loss.item())
    return losses


class Views:
    """MoCo's and SimCLR's: some draws of one transform."""

    def __init__(self, base: Any, views: int = 2) -> None:
        self.base, self.views = base, views

    def __call__(self, image: Image.Image) -> list[Tensor]:
        return [self.base(image) for _ in range(self.views)]


@client("MoCo, two crops", "torchvision")
def moco(run: Run) -> list[float]:
    images = datasets.ImageFolder(str(run.photos / "train"), Views(jittered(SIZE, (0.2, 1.0), PillowBlur())))
    loader = run.sink(DataLoader(images, batch_size=BATCH, shuffle=True, num_workers=1, drop_last=True))
    encoder = network(FEATURES).to(run.device)
    key_encoder = copy.deepcopy(encoder)
    queue = functional.normalize(torch.randn(FEATURES, 16), dim=0).to(run.device)
    optimizer = torch.optim.SGD(encoder.parameters(), 0.03, momentum=0.9)
    losses = []
    for _ in range(2):
        for (query_images, key_images), _labels in loader:
            query_images, key_images = query_images.to(run.device), key_images.to(run.device)
            query = functional.normalize(encoder(query_images), dim=1)
            with torch.no_grad():
                follow(key_encoder, encoder, 0.99)
                shuffled = torch.randperm(len(key_images), device=run.device)
                key = functional.normalize(key_encoder(key_images[shuffled]), dim=1)[shuffled.argsort()]
            positive = torch.einsum("nc,nc->n", query, key).unsqueeze(-1)
            logits = torch.cat([positive, torch.einsum("nc,ck->nk", query, queue)], dim=1) / 0.07
            loss = functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=run.device))
            queue = torch.cat([key.T, queue], dim=1)[:, : queue.shape[1]]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


class NumpySolarize:
    """Solarizes with Pillow, on a draw of NumPy's."""

    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, image: Image.Image) -> Image.Image:
        return ImageOps.solarize(image) if np.random.rand() < self.p else image


class Pair:
    """VICReg's: two pipelines that are not alike."""

    def __init__(self) -> None:
        self.first = jittered(SIZE, (0.08, 1.0), PillowBlur(1.0), NumpySolarize(0.0))
        self.second = jittered(SIZE, (0.08, 1.0), PillowBlur(0.1), NumpySolarize(0.2))

    def __call__(self, image: Image.Image) -> tuple[Tensor, Tensor]:
        return self.first(image), self.second(image)


def vicreg_loss(first: Tensor, second: Tensor) -> Tensor:
    """Variance, invariance and covariance."""
    loss = 25.0 * functional.mse_loss(first, second)
    for features in (first, second):
        centered = features - features.mean(0)
        spread = (centered.var(0) + 1e-4).sqrt()
        covariance = centered.T @ centered / (len(features) - 1)
        loss = loss + 12.5 * functional.relu(1 - spread).mean()
        loss = loss + covariance.fill_diagonal_(0).pow(2).sum() / FEATURES
    return loss


@client("VICReg", "torchvision")
def vicreg(run: Run) -> list[float]:
    images = datasets.ImageFolder(str(run.photos / "train"), Pair())
    loader = run.sink(DataLoader(images, batch_size=BATCH, shuffle=True, num_workers=1, drop_last=True))
    model = network(FEATURES).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for _ in range(2):
        for (first, second), _labels in loader:
            loss = vicreg_loss(model(first.to(run.device)), model(second.to(run.device)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def info_nce(features: Tensor, views: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Similarities to the positive first and to the negatives after it, and the labels, all 0."""
    labels = torch.cat([torch.arange(len(features) // views) for _ in range(views)])
    same = (labels[:, None] == labels).to(features.device)
    features = functional.normalize(features, dim=1)
    similarity = features @ features.T
    others = ~torch.eye(len(same), dtype=torch.bool, device=features.device)
    same, similarity = same[others].view(len(same), -1), similarity[others].view(len(same), -1)
    logits = torch.cat([similarity[same].view(len(same), -1), similarity[~same].view(len(same), -1)], dim=1)
    return logits / temperature, torch.zeros(len(logits), dtype=torch.long, device=features.device)


@client("SimCLR, two views", "torchvision")
def simclr(run: Run) -> list[float]:
    jitter = transforms.ColorJitter(0.8, 0.8, 0.8, 0.2)
    base = transforms.Compose(
        [
            transforms.RandomResizedCrop(size=SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([jitter], p=0.8),
            transforms.RandomGrayscale(p=0.2),
            transforms.ToTensor(),
        ]
    )
    images = datasets.ImageFolder(str(run.photos / "train"), Views(base))
    loader = run.sink(DataLoader(images, batch_size=BATCH, shuffle=True, num_workers=2, drop_last=True))
    model = network(FEATURES).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-4)
    losses = []
    for _ in range(2):
        for views, _labels in loader:
            logits, labels = info_nce(model(torch.cat(views, dim=0).to(run.device)), len(views), 0.07)
            loss = functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@client("BYOL, two views", "torchvision")
def byol(run: Run) -> list[float]:
    """The views are made of tensors, and both networks see both."""
    to_view = [
        transforms.Compose(
            [
                transforms.RandomResizedCrop(SIZE, scale=(0.2, 1.0)),
                transforms.RandomHorizontalFlip(),
                transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
                transforms.RandomGrayscale(p=0.2),
                PillowBlur(p_blur),
                transforms.RandomSolarize(128, p=p_solarize),
                to_normalized,
            ]
        )
        for p_blur, p_solarize in ((1.0, 0.0), (0.1, 0.2))
    ]

    def views(image: Image.Image) -> dict[str, Tensor]:
        return {"view_1": to_view[0](image), "view_2": to_view[1](image)}

    images = datasets.ImageFolder(str(run.photos / "train"), views)
    loader = run.sink(DataLoader(images, batch_size=BATCH, shuffle=True, drop_last=True))
    online, predictor = network(FEATURES).to(run.device), nn.Linear(FEATURES, FEATURES).to(run.device)
    target = copy.deepcopy(online)
    optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], 0.03, momentum=0.9)
    losses = []
    for _ in range(2):
        for batch, _labels in loader:
            first, second = batch["view_1"].to(run.device), batch["view_2"].to(run.device)
            with torch.no_grad():
                wanted = [functional.normalize(target(view), dim=-1) for view in (second, first)]
            guesses = [functional.normalize(predictor(online(view)), dim=-1) for view in (first, second)]
            terms = [2 - 2 * (guess * want).sum(-1) for guess, want in zip(guesses, wanted, strict=True)]
            loss = torch.stack(terms).sum(0).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            follow(target, online, 0.99)
            losses.append(loss.item())
    return losses


class DinoTwoCrops:
    """DINOv2's: a dict of lists; the teacher's crops are the student's global ones."""

    def __init__(self, small: int) -> None:
        to_global = transforms.RandomResizedCrop(SIZE, scale=(0.32, 1.0), interpolation=InterpolationMode.BICUBIC)
        to_local = transforms.RandomResizedCrop(SIZE // 2, scale=(0.05, 0.32), interpolation=InterpolationMode.BICUBIC)
        flip = transforms.RandomHorizontalFlip(p=0.5)
        self.geometric_global, self.geometric_local = (
            transforms.Compose([crop, flip]) for crop in (to_global, to_local)
        )
        jitter = transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8)
        colors = [jitter, transforms.RandomGrayscale(p=0.2)]
        solarize = transforms.RandomSolarize(threshold=128, p=0.2)
        self.first = transforms.Compose([*colors, PillowBlur(1.0), to_normalized])
        self.second = transforms.Compose([*colors, PillowBlur(0.1), solarize, to_normalized])
        self.local, self.small = transforms.Compose([*colors, PillowBlur(0.5), to_normalized]), small

    def __call__(self, image: Image.Image) -> dict[str, Any]:
        crops = [self.first(self.geometric_global(image)), self.second(self.geometric_global(image))]
        local = [self.local(self.geometric_local(image)) for _ in range(self.small)]
        return {"global_crops": crops, "global_crops_teacher": crops, "local_crops": local, "offsets": ()}


def without_label(_label: int) -> tuple[()]:
    """DINOv2's datasets give no labels."""
    return ()


def collate_and_cast(samples: list[Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """DINOv2's: all crops of a kind are one batch, crop by crop."""
    kinds = ("global_crops", "local_crops")
    stacks = {
        kind: torch.stack([sample[0][kind][at] for at in range(len(samples[0][0][kind])) for sample in samples])
        for kind in kinds
    }
    return {f"collated_{kind}": stack.to(dtype) for kind, stack in stacks.items()}


@client("DINOv2, multi-crop", "torchvision", note="Pillow's blur in place of torchvision's")
def dino_two(run: Run) -> list[float]:
    images = datasets.ImageFolder(str(run.photos / "train"), DinoTwoCrops(small=2), target_transform=without_label)
    collate = functools.partial(collate_and_cast, dtype=torch.float32)
    options: dict[str, Any] = {"shuffle": True, "num_workers": 1, "drop_last": True, "collate_fn": collate}
    loader = run.sink(DataLoader(images, batch_size=BATCH, **options))
    student = network(FEATURES).to(run.device)
    teacher = copy.deepcopy(student)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        for batch in loader:
            large = batch["collated_global_crops"].to(run.device, non_blocking=True)
            small = batch["collated_local_crops"].to(run.device, non_blocking=True)
            with torch.no_grad():
                targets = (teacher(large) / 0.07).softmax(-1).chunk(2)
            guesses = [part for crops in (large, small) for part in (student(crops) / 0.1).log_softmax(-1).chunk(2)]
            loss = dino_loss(targets, guesses)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            follow(teacher, student, 0.99)
            losses.append(loss.item())
    return losses
