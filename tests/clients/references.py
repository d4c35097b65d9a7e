"""In the manner of torchvision's references: classification, segmentation, detection."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import datasets, transforms, tv_tensors
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.transforms import functional as F
from torchvision.transforms import v2

from .client import BATCH, CLASSES, MEAN, SIZE, STD, Run, client, network


def classify(run: Run, train: Any, evaluate: Any) -> list[float]:
    """mixup or cutmix in `collate_fn`, label smoothing, warm-up, averaged weights, evaluation of both models."""
    mix = v2.RandomChoice([v2.MixUp(num_classes=CLASSES, alpha=0.2), v2.CutMix(num_classes=CLASSES, alpha=1.0)])
    images = datasets.ImageFolder(str(run.photos / "train"), train)
    loader = run.sink(
        DataLoader(
            images, batch_size=BATCH, shuffle=True, num_workers=2, pin_memory=True,
            collate_fn=lambda batch: mix(*default_collate(batch)),
        )
    )  # fmt: skip
    test_loader = run.sink(DataLoader(datasets.ImageFolder(str(run.photos / "val"), evaluate), batch_size=BATCH))
    model, criterion = network().to(run.device), nn.CrossEntropyLoss(label_smoothing=0.1)
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
    history = []
    for _ in range(2):
        model.train()
        for image, target in loader:
            image, target = image.to(run.device), target.to(run.device)
            loss = criterion(model(image), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            averaged.update_parameters(model)
            history.append(loss.item())
        warm_up.step()
        for tested in (model, averaged):
            tested.eval()
            with torch.inference_mode():
                for image, target in test_loader:
                    output = tested(image.to(run.device, non_blocking=True))
                    history.append(criterion(output, target.to(run.device, non_blocking=True)).item())
    return history


@client("classification reference, `--backend pil`", "torchvision")
def classification_pil(run: Run) -> list[float]:
    train = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE, interpolation=transforms.InterpolationMode.BILINEAR, antialias=True),
            transforms.RandomHorizontalFlip(0.5),
            transforms.TrivialAugmentWide(interpolation=transforms.InterpolationMode.BILINEAR),
            transforms.PILToTensor(),
            transforms.ConvertImageDtype(torch.float),
            transforms.Normalize(mean=MEAN, std=STD),
            transforms.RandomErasing(p=0.3),
        ]
    )
    evaluate = transforms.Compose(
        [
            transforms.Resize(SIZE + 8, antialias=True),
            transforms.CenterCrop(SIZE),
            transforms.PILToTensor(),
            transforms.ConvertImageDtype(torch.float),
            transforms.Normalize(mean=MEAN, std=STD),
        ]
    )
    return classify(run, train, evaluate)


@client("classification reference, `--backend tensor --use-v2`", "torchvision")
def classification_v2(run: Run) -> list[float]:
    train = v2.Compose(
        [
            v2.PILToTensor(),
            v2.RandomResizedCrop(SIZE, antialias=True),
            v2.RandomHorizontalFlip(0.5),
            v2.RandAugment(magnitude=5),
            v2.ToDtype(torch.float, scale=True),
            v2.Normalize(mean=MEAN, std=STD),
            v2.RandomErasing(p=0.3),
            v2.ToPureTensor(),
        ]
    )
    evaluate = v2.Compose(
        [
            v2.PILToTensor(), v2.Resize(SIZE + 8, antialias=True), v2.CenterCrop(SIZE),
            v2.ToDtype(torch.float, scale=True), v2.Normalize(mean=MEAN, std=STD), v2.ToPureTensor(),
        ]
    )  # fmt: skip
    return classify(run, train, evaluate)


class Segmented(Dataset[Any]):
    """Images and their masks."""

    def __init__(self, photos: Path, joint: Callable[..., Any]) -> None:
        self.images = sorted(file for file in (photos / "train").glob("*/*"))
        self.masks, self.joint = photos / "masks", joint

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image = Image.open(self.images[index]).convert("RGB")
        return self.joint(image, Image.open(self.masks / f"{self.images[index].stem}.png"))


def crop_together(image: Any, mask: Any) -> tuple[Tensor, Tensor]:
    """The reference's transforms, written out: resize, flip, pad and crop the image and its mask alike."""
    size = random.randint(SIZE // 2, 2 * SIZE)
    image = F.resize(image, size, antialias=True)
    mask = F.resize(mask, size, interpolation=F.InterpolationMode.NEAREST)
    if random.random() < 0.5:
        image, mask = F.hflip(image), F.hflip(mask)
    short = min(image.size)
    if short < SIZE:
        padding = [0, 0, max(SIZE - image.size[0], 0), max(SIZE - image.size[1], 0)]
        image, mask = F.pad(image, padding, fill=0), F.pad(mask, padding, fill=255)
    box = transforms.RandomCrop.get_params(image, (SIZE, SIZE))
    image, mask = F.crop(image, *box), F.crop(mask, *box)
    image, target = F.pil_to_tensor(image), torch.as_tensor(np.array(mask), dtype=torch.int64)
    return F.normalize(F.convert_image_dtype(image, torch.float), mean=MEAN, std=STD), target


def padded_batch(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """The reference's `collate_fn`: every image is copied into a batch of the largest size."""
    batches = []
    for tensors, fill in zip(zip(*samples, strict=True), (0, 255), strict=True):
        size = tuple(max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True))
        batch = tensors[0].new(len(tensors), *size).fill_(fill)
        for tensor, place in zip(tensors, batch, strict=True):
            place[..., : tensor.shape[-2], : tensor.shape[-1]].copy_(tensor)
        batches.append(batch)
    return batches[0], batches[1]


def segment(run: Run, joint: Callable[..., Any], collate: Any = None) -> list[float]:
    """A network of one convolution, whose every pixel has a loss."""
    images = Segmented(run.photos, joint)
    loader = run.sink(
        DataLoader(images, batch_size=BATCH, shuffle=True, num_workers=1, collate_fn=collate, drop_last=True)
    )
    model = nn.Conv2d(3, CLASSES, 3, padding=1).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=2 * len(loader), power=0.9)
    losses = []
    for _ in range(2):
        for image, target in loader:
            image, target = image.to(run.device), target.to(run.device)
            loss = functional.cross_entropy(model(image), target.long(), ignore_index=255)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return losses


@client("segmentation reference, its own transforms and `collate_fn`", "torchvision")
def segmentation(run: Run) -> list[float]:
    return segment(run, crop_together, padded_batch)


@client("segmentation reference, `--use-v2`", "torchvision")
def segmentation_v2(run: Run) -> list[float]:
    steps = v2.Compose(
        [
            v2.RandomResize(SIZE, 2 * SIZE, antialias=True),
            v2.RandomHorizontalFlip(0.5),
            v2.RandomCrop(SIZE, pad_if_needed=True, fill={tv_tensors.Image: 0, tv_tensors.Mask: 255}),
            v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
            v2.Normalize(mean=MEAN, std=STD),
            v2.ToPureTensor(),
        ]
    )

    def joint(image: Any, mask: Any) -> Any:
        return steps(v2.functional.to_image(image), tv_tensors.Mask(F.pil_to_tensor(mask).squeeze(0)))

    return segment(run, joint)


class Detected(Dataset[Any]):
    """Images with a box or two."""

    def __init__(self, photos: Path, joint: Callable[..., Any]) -> None:
        self.images, self.joint = datasets.ImageFolder(str(photos / "train")), joint

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image, label = self.images[index]
        width, height = image.size
        boxes = torch.tensor([[4, 6, width - 20, height - 9], [20, 9, width - 4, height - 20]][: 1 + index % 2])
        return self.joint(image, {"boxes": boxes.float(), "labels": torch.full((len(boxes),), 1 + label)})


def detect(run: Run, joint: Callable[..., Any]) -> list[float]:
    """Faster R-CNN on a small backbone; images of a batch differ in size, so that they stay a list."""
    images_of = Detected(run.photos, joint)
    loader = run.sink(
        DataLoader(
            images_of, batch_size=BATCH, shuffle=True, num_workers=1, collate_fn=lambda b: tuple(zip(*b, strict=True))
        )
    )
    backbone: Any = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=4))
    backbone.out_channels = 8
    anchors = AnchorGenerator(sizes=((24, 48),), aspect_ratios=((1.0,),))
    model = FasterRCNN(backbone, 1 + CLASSES, min_size=64, max_size=128, rpn_anchor_generator=anchors).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    history = []
    for _ in range(2):
        for images, targets in loader:
            images = [image.to(run.device) for image in images]
            targets = [{name: value.to(run.device) for name, value in target.items()} for target in targets]
            losses = model(images, targets)
            total = sum(losses.values())
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            history += [total.item(), *(loss.item() for loss in losses.values())]
    return history


def flipped_together(image: Any, target: Any) -> Any:
    """The reference's own transforms: to a tensor, then flip image and boxes."""
    image = F.pil_to_tensor(image)
    if torch.rand(1) < 0.5:
        image = F.hflip(image)
        width = F.get_dimensions(image)[2]
        target["boxes"][:, [0, 2]] = width - target["boxes"][:, [2, 0]]
    return F.convert_image_dtype(image, torch.float), target


@client("detection reference, its own transforms", "torchvision")
def detection(run: Run) -> list[float]:
    return detect(run, flipped_together)


@client("detection reference, `--use-v2 --data-augmentation ssd`", "torchvision")
def detection_v2(run: Run) -> list[float]:
    steps = v2.Compose(
        [
            v2.PILToTensor(),
            v2.RandomPhotometricDistort(),
            v2.RandomZoomOut(fill={tv_tensors.Image: (123.0, 117.0, 104.0), "others": 0}, side_range=(1.0, 1.5)),
            v2.RandomIoUCrop(),
            v2.RandomHorizontalFlip(p=0.5),
            v2.ToDtype(torch.float, scale=True),
            v2.SanitizeBoundingBoxes(),
            v2.ToPureTensor(),
        ]
    )

    def joint(image: Any, target: Any) -> Any:
        size = (image.height, image.width)
        boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=size)  # type: ignore[call-arg]
        return steps(image, {**target, "boxes": boxes})

    return detect(run, joint)
