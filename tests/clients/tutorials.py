"""In the manner of PyTorch's tutorials and of pytorch/examples, one technique each."""

from __future__ import annotations

import copy
import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler, swa_utils
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torchvision import datasets, io, models, ops, transforms, tv_tensors
from torchvision.transforms import v2

from .client import BATCH, CLASSES, MEAN, SIZE, STD, Run, client, fit, network

augment = transforms.Compose(
    [
        transforms.RandomResizedCrop(SIZE),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
)
evaluate = transforms.Compose(
    [transforms.Resize(SIZE), transforms.CenterCrop(SIZE), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
)


def photographs(run: Run, transform: Any = augment, part: str = "train") -> datasets.ImageFolder:
    return datasets.ImageFolder(str(run.photos / part), transform)


def descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def mean_loss(model: nn.Module, loader: Any, device: torch.device) -> float:
    model.eval()
    with torch.no_grad():
        losses = [functional.cross_entropy(model(x.to(device)), y.to(device), reduction="sum") for x, y in loader]
    model.train()
    return torch.stack(losses).sum().item()


@client("k-fold cross-validation with `Subset`", "torchvision")
def k_fold(run: Run) -> list[float]:
    trained, tested = photographs(run), photographs(run, evaluate)
    history = []
    for fold in torch.randperm(len(trained)).chunk(3):
        rest = sorted(set(range(len(trained))) - set(fold.tolist()))
        loader = run.sink(DataLoader(data.Subset(trained, rest), BATCH, shuffle=True, num_workers=1))
        held_out = run.sink(DataLoader(data.Subset(tested, fold.tolist()), BATCH))
        model = network().to(run.device)
        history += [*fit(model, loader, run.device, epochs=1), mean_loss(model, held_out, run.device)]
    return history


@client("imbalanced classes: `WeightedRandomSampler`, weighted loss", "torchvision")
def weighted_sampler(run: Run) -> list[float]:
    photos = photographs(run)
    counts = torch.bincount(torch.tensor(photos.targets)).float()
    sampler = data.WeightedRandomSampler([1 / counts[label].item() for label in photos.targets], 2 * len(photos))
    loader = run.sink(DataLoader(photos, batch_size=BATCH, sampler=sampler, num_workers=2))
    criterion = nn.CrossEntropyLoss(weight=(counts.sum() / counts).to(run.device))
    return fit(network().to(run.device), loader, run.device, loss_of=criterion)


@client("`ConcatDataset`, `random_split`, early stopping on the best weights", "torchvision")
def early_stopping(run: Run) -> list[float]:
    both = data.ConcatDataset([photographs(run), photographs(run, part="val")])
    train, valid = data.random_split(both, [0.7, 0.3], generator=torch.Generator().manual_seed(4))
    loader = run.sink(DataLoader(train, BATCH, shuffle=True, num_workers=2, persistent_workers=True))
    valid_loader = run.sink(DataLoader(valid, BATCH, num_workers=1))
    model, best, weights, patience = network().to(run.device), float("inf"), {}, 2
    history = []
    for _ in range(4):
        history += fit(model, loader, run.device, epochs=1)
        history.append(mean_loss(model, valid_loader, run.device))
        if history[-1] < best:
            best, weights, patience = history[-1], copy.deepcopy(model.state_dict()), 2
        elif (patience := patience - 1) == 0:
            break
    model.load_state_dict(weights)
    return [*history, mean_loss(model, valid_loader, run.device)]


class Shards(IterableDataset[Any]):
    """Each worker reads its own files."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        files = self.files if info is None else self.files[info.id :: info.num_workers]
        for file in files:
            with Image.open(file) as image:
                yield augment(image.convert("RGB")), int(file.parent.name[-1])


@client("an `IterableDataset` split over the workers", "torchvision")
def iterable_shards(run: Run) -> list[float]:
    loader = DataLoader(Shards(sorted((run.photos / "train").glob("*/*"))), batch_size=BATCH, num_workers=2)
    return fit(network().to(run.device), run.sink(loader), run.device)


@client("accumulated gradients, autocast, averaged weights, one-cycle rates", "torchvision")
def accumulate(run: Run) -> list[float]:
    loader = run.sink(DataLoader(photographs(run), 2, shuffle=True, num_workers=1, drop_last=True))
    model = network().to(run.device)
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6)
    history = []
    for _ in range(2):
        for step, (images, labels) in enumerate(loader):
            images, labels = images.to(run.device), labels.to(run.device)
            with torch.autocast(run.device.type, torch.bfloat16):
                loss = functional.cross_entropy(model(images), labels) / 2
            loss.backward()
            if step % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                averaged.update_parameters(model)
            history.append(loss.item())
    return [*history, mean_loss(averaged, loader, run.device)]


@client("test-time augmentation with `FiveCrop`, as in its documentation", "torchvision")
def five_crop(run: Run) -> list[float]:
    crops = transforms.Compose(
        [
            transforms.Resize(SIZE + 16),
            transforms.FiveCrop(SIZE),
            transforms.Lambda(lambda crops: torch.stack([transforms.ToTensor()(crop) for crop in crops])),
        ]
    )
    loader = run.sink(DataLoader(photographs(run), BATCH, shuffle=True, num_workers=1))
    tested = run.sink(DataLoader(photographs(run, crops, "val"), BATCH, num_workers=1))
    model = network().to(run.device)
    history = fit(model, loader, run.device)
    for images, labels in tested:
        count, crop_count, *shape = images.size()
        with torch.no_grad():
            result = model(images.view(-1, *shape).to(run.device)).view(count, crop_count, -1).mean(1)
        history.append(functional.cross_entropy(result, labels.to(run.device)).item())
    return history


def mixed(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor, float]:
    """Mixup, written out."""
    images, labels = default_collate(samples)
    share, order = float(np.random.beta(0.4, 0.4)), torch.randperm(len(images))
    return share * images + (1 - share) * images[order], labels, labels[order], share


@client("mixup written out in `collate_fn`", "torchvision")
def mixup_by_hand(run: Run) -> list[float]:
    loader = run.sink(DataLoader(photographs(run), BATCH, shuffle=True, num_workers=2, collate_fn=mixed))
    model = network().to(run.device)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(2):
        for images, first, second, share in loader:
            output = model(images.to(run.device))
            terms = [functional.cross_entropy(output, labels.to(run.device)) for labels in (first, second)]
            losses.append(descend(share * terms[0] + (1 - share) * terms[1], optimizer))
    return losses


class Pairs(Dataset[Any]):
    """Two images, and whether they are of one class: as in pytorch/examples, siamese_network."""

    def __init__(self, photos: datasets.ImageFolder) -> None:
        self.photos = photos

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> Any:
        other = int(torch.randint(len(self.photos), ()))
        (first, one), (second, two) = self.photos[index], self.photos[other]
        return first, second, torch.tensor(float(one == two))


@client("siamese network (`pytorch/examples`)", "torchvision")
def siamese(run: Run) -> list[float]:
    loader = run.sink(DataLoader(Pairs(photographs(run)), BATCH, shuffle=True, num_workers=1))
    body, head = network(16).to(run.device), nn.Linear(32, 1).to(run.device)
    optimizer = torch.optim.Adadelta([*body.parameters(), *head.parameters()], lr=1.0)
    scheduler, losses = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7), []
    for _ in range(2):
        for first, second, target in loader:
            features = torch.cat([body(first.to(run.device)), body(second.to(run.device))], 1)
            output = torch.sigmoid(head(features)).squeeze(1)
            losses.append(descend(functional.binary_cross_entropy(output, target.to(run.device)), optimizer))
        scheduler.step()
    return losses


@client("a model under `torch.compile`", "torchvision", note='`backend="aot_eager"`')
def compiled_model(run: Run) -> list[float]:
    torch._dynamo.reset()
    loader = run.sink(DataLoader(photographs(run), BATCH, shuffle=True, num_workers=1))
    return fit(torch.compile(network().to(run.device), backend="aot_eager"), loader, run.device)


def gram(features: Tensor) -> Tensor:
    count, channels, height, width = features.size()
    flat = features.view(count, channels, height * width)
    return flat.bmm(flat.transpose(1, 2)) / (channels * height * width)


@client("fast neural style (`pytorch/examples`)", "torchvision")
def neural_style(run: Run) -> list[float]:
    steps = [transforms.Resize(SIZE), transforms.CenterCrop(SIZE), transforms.ToTensor()]
    photos = photographs(run, transforms.Compose([*steps, transforms.Lambda(lambda image: image.mul(255))]))
    loader = run.sink(DataLoader(photos, batch_size=BATCH))
    style = transforms.ToTensor()(
        Image.open(sorted((run.photos / "val").glob("*/*"))[0]).convert("RGB").resize((SIZE, SIZE))
    )
    made, fixed = nn.Conv2d(3, 3, 3, padding=1).to(run.device), nn.Conv2d(3, 6, 3).to(run.device).requires_grad_(False)
    wanted = gram(fixed(style.mul(255).repeat(BATCH, 1, 1, 1).to(run.device)))
    optimizer, losses = torch.optim.Adam(made.parameters(), 1e-3), []
    for _ in range(2):
        for images, _labels in loader:
            images = images.to(run.device)
            features = fixed(made(images))
            content = functional.mse_loss(features, fixed(images))
            loss = content + 1e-3 * functional.mse_loss(gram(features), wanted[: len(images)])
            losses.append(descend(loss, optimizer))
    return losses


class Smaller(Dataset[Any]):
    """The luma of photographs, small and large: as in pytorch/examples, super_resolution."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*/*"))
        steps = [transforms.CenterCrop(2 * SIZE), transforms.Resize(SIZE), transforms.ToTensor()]
        self.small, self.large = transforms.Compose(steps), transforms.Compose([steps[0], steps[2]])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        luma, _, _ = Image.open(self.files[index]).convert("YCbCr").split()
        target = luma.copy()
        return self.small(luma), self.large(target)


@client("super-resolution (`pytorch/examples`)", "torchvision")
def super_resolution(run: Run) -> list[float]:
    loader = run.sink(DataLoader(Smaller(run.photos / "train"), BATCH, shuffle=True, num_workers=2))
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.PixelShuffle(2)).to(run.device)
    return fit(model, loader, run.device, loss_of=functional.mse_loss)


@client("DCGAN tutorial", "torchvision")
def dcgan(run: Run) -> list[float]:
    steps = [transforms.Resize(SIZE), transforms.CenterCrop(SIZE), transforms.ToTensor()]
    photos = photographs(run, transforms.Compose([*steps, transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))]))
    loader = run.sink(DataLoader(photos, batch_size=BATCH, shuffle=True, num_workers=2))
    judge = network(1).to(run.device)
    maker = nn.Sequential(nn.ConvTranspose2d(8, 3, SIZE), nn.Tanh()).to(run.device)
    criterion, losses = nn.BCEWithLogitsLoss(), []
    optimizers = [torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999)) for model in (judge, maker)]
    for _ in range(2):
        for batch in loader:
            real = batch[0].to(run.device)
            fake = maker(torch.randn(len(real), 8, 1, 1, device=run.device))
            label = torch.full((len(real), 1), 1.0, device=run.device)
            wrong = criterion(judge(real), label) + criterion(judge(fake.detach()), torch.zeros_like(label))
            losses += [descend(wrong, optimizers[0]), descend(criterion(judge(fake), label), optimizers[1])]
    return losses


class Annotated(Dataset[Any]):
    """Images that a table lists: the `CustomImageDataset` of the tutorial on datasets and loaders."""

    def __init__(self, table: Path, transform: Callable[[Tensor], Tensor]) -> None:
        with table.open() as lines:
            self.rows, self.transform = list(csv.reader(lines)), transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        file, label = self.rows[index]
        return self.transform(io.decode_image(file, mode=io.ImageReadMode.RGB)), int(label)


@client("datasets tutorial: `CustomImageDataset`, `decode_image`", "torchvision")
def custom_dataset(run: Run) -> list[float]:
    files = sorted((run.photos / "train").glob("*/*"))
    with (run.folder / "labels.csv").open("w", newline="") as table:
        csv.writer(table).writerows((str(file), file.parent.name[-1]) for file in files)
    steps = [v2.RandomResizedCrop(SIZE, antialias=True), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    photos = Annotated(run.folder / "labels.csv", v2.Compose(steps))
    loader = DataLoader(photos, batch_size=BATCH, shuffle=True, num_workers=1)
    return fit(network().to(run.device), run.sink(loader), run.device)


@client("adversarial examples (FGSM tutorial)", "torchvision")
def fgsm(run: Run) -> list[float]:
    loader = run.sink(DataLoader(photographs(run, evaluate), batch_size=1, shuffle=True))
    model, history = network().to(run.device).eval(), []
    for images, labels in loader:
        images, labels = images.to(run.device), labels.to(run.device)
        images.requires_grad = True
        loss = functional.nll_loss(functional.log_softmax(model(images), 1), labels)
        model.zero_grad()
        loss.backward()
        attacked = torch.clamp(images + 0.1 * images.grad.data.sign(), 0, 1)
        history += [loss.item(), functional.nll_loss(functional.log_softmax(model(attacked), 1), labels).item()]
    return history


class Masked(Dataset[Any]):
    """Images, masks and the boxes around them: the dataset of the tutorial on fine-tuning a detector."""

    def __init__(self, photos: Path, joint: Callable[..., Any]) -> None:
        self.images = sorted((photos / "train").glob("*/*"))
        self.masks, self.joint = photos / "masks", joint

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        file = self.images[index]
        image = tv_tensors.Image(io.read_image(str(file), mode=io.ImageReadMode.RGB))
        mask = io.read_image(str(self.masks / f"{file.stem}.png"))
        masks = (mask == torch.unique(mask)[:, None, None]).to(dtype=torch.uint8)
        boxes = tv_tensors.BoundingBoxes(
            ops.masks_to_boxes(masks), format="XYXY", canvas_size=v2.functional.get_size(image)
        )
        labels = torch.ones((len(masks),), dtype=torch.int64)
        return self.joint(image, {"boxes": boxes, "masks": tv_tensors.Mask(masks), "labels": labels, "image_id": index})


@client("object detection fine-tuning tutorial, with masks", "torchvision")
def mask_rcnn(run: Run) -> list[float]:
    joint = v2.Compose([v2.RandomHorizontalFlip(0.5), v2.ToDtype(torch.float, scale=True), v2.ToPureTensor()])
    photos = Masked(run.photos, joint)
    loader = run.sink(
        DataLoader(photos, 2, shuffle=True, num_workers=1, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
    )
    backbone: Any = nn.Sequential(nn.Conv2d(3, 8, 3, stride=8, padding=1), nn.ReLU())
    backbone.out_channels = 8
    kinds = models.detection
    anchors = kinds.anchor_utils.AnchorGenerator(sizes=((24,),), aspect_ratios=((1.0,),))
    model = kinds.MaskRCNN(
        backbone, 1 + CLASSES, min_size=64, max_size=128, rpn_anchor_generator=anchors, rpn_post_nms_top_n_train=8
    )
    model.roi_heads.box_predictor = kinds.faster_rcnn.FastRCNNPredictor(1024, 1 + CLASSES)
    model.roi_heads.mask_predictor = kinds.mask_rcnn.MaskRCNNPredictor(256, 16, 1 + CLASSES)
    model = model.to(run.device)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9), []
    for images, targets in loader:
        moved = [{name: _moved(value, run.device) for name, value in target.items()} for target in targets]
        parts = model([image.to(run.device) for image in images], moved)
        losses.append(descend(sum(parts.values()), optimizer))
    return losses


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
