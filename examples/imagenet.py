"""Train on ImageNet with the recipe of torchvision's references: augmentation, MixUp and CutMix, averaged weights, AMP.

    python examples/imagenet.py DIR                                    # DIR/train and DIR/val, a folder for each class
    torchrun --nproc-per-node 8 examples/imagenet.py DIR --resume

The defaults are those of ResNet-50's weights IMAGENET1K_V2 (github.com/pytorch/vision/issues/3995) for 8 GPUs with
batches of 128, but for RandAugment in the place of TrivialAugment, and without repeated augmentation.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, default_collate
from torch.utils.data.distributed import DistributedSampler
from torchvision import models
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import torch_sink

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALIZATION = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
POLICIES: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity,
    "ra": v1.RandAugment,
    "ta_wide": v1.TrivialAugmentWide,
    "augmix": v1.AugMix,
}


def parse_arguments(options: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("data", type=Path, metavar="DIR", help="train/ and val/ with a folder for each class")
    add("--model", default="resnet50", choices=models.list_models(module=models), metavar="NAME")
    add("--epochs", type=int, default=600)
    add("--batch-size", type=int, default=128, help="for each process")
    add("--workers", type=int, default=8, help="data workers of each process")
    add("--lr", type=float, default=0.5)
    add("--warmup-epochs", type=int, default=5)
    add("--weight-decay", type=float, default=2e-5, help="of all parameters but those of normalization")
    add("--label-smoothing", type=float, default=0.1)
    add("--mixup", type=float, default=0.2, help="alpha; 0 for none")
    add("--cutmix", type=float, default=1.0, help="alpha; 0 for none")
    add("--augment", choices=POLICIES, default="ra")
    add("--erase", type=float, default=0.1, help="probability of RandomErasing")
    add("--train-size", type=int, default=176, help="pixels of a training crop")
    add("--val-resize", type=int, default=232)
    add("--val-size", type=int, default=224)
    add("--ema-decay", type=float, default=0.99998, help="of the averaged weights, for batches of 1 and 1 epoch")
    add("--amp", choices=("O0", "O1", "O2"), default="O1", help="O1 is torch.autocast to bfloat16")
    add("--steps-per-sync", type=int, default=100, help="steps for each host sync")
    add("--output", type=Path, default=Path("checkpoints"))
    add("--checkpoint-steps", type=int, default=5000)
    add("--max-steps", type=int, help="stop there; --resume goes on")
    add("--resume", action="store_true", help="from the newest complete checkpoint in --output")
    add("--seed", type=int, default=0)
    return parser.parse_args(options)


class MixedBatches:
    """A `collate_fn` that mixes each batch by MixUp or CutMix, which record in the data worker."""

    def __init__(self, mixup: float, cutmix: float, classes: int) -> None:
        choices: list[nn.Module] = []
        if mixup:
            choices.append(v2.MixUp(alpha=mixup, num_classes=classes))
        if cutmix:
            choices.append(v2.CutMix(alpha=cutmix, num_classes=classes))
        self.mix = v2.RandomChoice(choices) if choices else v2.Identity()

    def __call__(self, samples: list[Any]) -> Any:
        return self.mix(*default_collate(samples))


def open_folders(arguments: argparse.Namespace) -> tuple[ImageFolder, ImageFolder]:
    tail = [v1.ToTensor(), v1.Normalize(MEAN, DEVIATION)]
    crop = [v1.RandomResizedCrop(arguments.train_size), v1.RandomHorizontalFlip()]
    train = v1.Compose([*crop, POLICIES[arguments.augment](), *tail, v1.RandomErasing(arguments.erase)])
    val = v1.Compose([v1.Resize(arguments.val_resize), v1.CenterCrop(arguments.val_size), *tail])
    return ImageFolder(arguments.data / "train", train), ImageFolder(arguments.data / "val", val)


def make_loader(data: ImageFolder, arguments: argparse.Namespace, collate: Any = None) -> torch_sink.SinkLoader:
    """The training loader has a `collate`; its epochs have full batches only, as many on each process."""
    train = collate is not None
    sampler = DistributedSampler(data, shuffle=train, seed=arguments.seed) if distributed.is_initialized() else None
    loader = DataLoader(
        data,
        batch_size=arguments.batch_size,
        shuffle=train and sampler is None,
        sampler=sampler,
        num_workers=arguments.workers,
        persistent_workers=arguments.workers > 0,
        drop_last=train,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(arguments.seed),
    )
    return torch_sink.SinkLoader(loader, memory_format=torch.channels_last)


def make_optimizer(model: nn.Module, arguments: argparse.Namespace) -> torch.optim.SGD:
    """Weight decay for all parameters but those of normalization."""
    of_norms = [p for m in model.modules() if isinstance(m, NORMALIZATION) for p in m.parameters(recurse=False)]
    known = {id(parameter) for parameter in of_norms}
    others = [parameter for parameter in model.parameters() if id(parameter) not in known]
    groups = [{"params": others}, {"params": of_norms, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=arguments.lr, momentum=0.9, weight_decay=arguments.weight_decay)


def make_schedule(optimizer: torch.optim.Optimizer, epochs: int, warmup: int) -> Any:
    """Linear warmup from a hundredth, then half a cosine, stepped once an epoch."""
    cosine = CosineAnnealingLR(optimizer, max(epochs - warmup, 1))
    if not warmup:
        return cosine
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.01, total_iters=warmup), cosine], milestones=[warmup])


def main(options: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(options)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        distributed.init_process_group()
    processes = distributed.get_world_size() if distributed.is_initialized() else 1
    is_first = not distributed.is_initialized() or distributed.get_rank() == 0
    torch.manual_seed(arguments.seed)

    torch_sink.set_image_backend("device")
    train, val = open_folders(arguments)
    train_loader = make_loader(train, arguments, MixedBatches(arguments.mixup, arguments.cutmix, len(train.classes)))
    val_loader = make_loader(val, arguments)

    network = models.get_model(arguments.model, num_classes=len(train.classes))
    network = network.to(device, memory_format=torch.channels_last)
    optimizer = make_optimizer(network, arguments)
    model: nn.Module = DistributedDataParallel(network) if distributed.is_initialized() else network
    loop = torch_sink.StepLoop(
        model,
        nn.CrossEntropyLoss(label_smoothing=arguments.label_smoothing),
        optimizer,
        scheduler=make_schedule(optimizer, arguments.epochs, arguments.warmup_epochs),
        schedule="epoch",
        amp=arguments.amp,
        # Scaled with the batch and the epochs as in the references, but averaged at every step, not at each 32nd.
        ema=1 - min(1.0, (1 - arguments.ema_decay) * processes * arguments.batch_size / arguments.epochs),
        steps_per_sync=arguments.steps_per_sync,
    )
    config = torch_sink.CheckpointConfig(save_checkpoint_steps=arguments.checkpoint_steps, keep_checkpoint_max=2)
    callbacks: list[torch_sink.Callback] = [
        torch_sink.ModelCheckpoint(arguments.model, arguments.output, config),
        torch_sink.Evaluation(val_loader, metrics={"accuracy", "top5"}, ema=True),
        torch_sink.LossMonitor(per_print_times=arguments.steps_per_sync),
        torch_sink.TimeMonitor(),
    ]
    resumed = loop.resume(arguments.output, train_loader) if arguments.resume else 0
    if is_first and resumed:
        print(f"resumed at step {resumed}")
    history = loop.run(train_loader, epochs=arguments.epochs, callbacks=callbacks, max_steps=arguments.max_steps)
    if is_first:
        print(f"{history.steps} steps, {history.samples_per_second:.0f} images/s on each of {processes} processes")
        print(f"queue: {train_loader.stats()}")
        print(torch_sink.fallback_report())
    for part in (loop, train_loader, val_loader):
        part.close()
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
