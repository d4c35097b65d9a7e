"""Train a small network on a folder of images and write down what was measured."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import torch_sink
from demo_meter import Meter


def make_model() -> nn.Module:
    layers: list[nn.Module] = []
    for channels_in, channels_out in ((3, 24), (24, 48), (48, 96)):
        layers += [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(96, 10))


@torch.no_grad()
def measure_accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    right = 0
    for images, labels in loader:
        right += (model(images.to(device)).argmax(1).cpu() == labels).sum().item()
    return right / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--count-launches", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch_sink.set_image_backend("device")

    normalize = transforms.Normalize((0.28, 0.28, 0.28), (0.32, 0.32, 0.32))
    augment = transforms.RandomResizedCrop(32, scale=(0.8, 1.0), ratio=(0.9, 1.1))
    train_data = ImageFolder(arguments.data / "train", transforms.Compose([augment, transforms.ToTensor(), normalize]))
    resize = transforms.Resize(32)
    test_data = ImageFolder(arguments.data / "test", transforms.Compose([resize, transforms.ToTensor(), normalize]))
    meter = Meter(arguments.workers, arguments.count_launches)
    train_loader = DataLoader(
        train_data,
        batch_size=64,
        shuffle=True,
        num_workers=arguments.workers,
        persistent_workers=arguments.workers > 0,
        collate_fn=meter.collate,
        worker_init_fn=meter.start_worker,
        generator=torch.Generator().manual_seed(0),
    )
    test_loader = DataLoader(test_data, batch_size=64)

    steps = arguments.epochs * len(train_loader)
    model = make_model().to(device)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    loop = torch_sink.StepLoop(model, loss_fn, optimizer, scheduler=scheduler, sink_size=len(train_loader))
    with meter, torch_sink.SinkLoader(train_loader) as sink_loader:
        history = loop.run(sink_loader, epochs=arguments.epochs, callbacks=[torch_sink.ProgressBar()])
    losses = history.losses.tolist()
    host_syncs = history.host_syncs

    accuracy = measure_accuracy(model, test_loader, device)
    images = arguments.epochs * len(train_data)
    meter.write(arguments.report, losses=losses, accuracy=accuracy, images=images, host_syncs=host_syncs)


if __name__ == "__main__":
    main()
