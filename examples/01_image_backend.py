"""Two lines around a stock PyTorch script: the device makes the pixels.

python examples/01_image_backend.py DIR      # DIR holds one folder of images per class
"""

import sys

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

import torch_sink  # new line 1

if __name__ == "__main__":
    torch_sink.set_image_backend("device")  # new line 2

    torch.manual_seed(0)
    train = transforms.Compose(
        [
            transforms.RandomResizedCrop(64),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.4, 0.4, 0.4),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    photos = datasets.ImageFolder(sys.argv[1], train)
    loader = DataLoader(photos, batch_size=16, shuffle=True, num_workers=2, pin_memory=torch.cuda.is_available())

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = models.resnet18(num_classes=len(photos.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")
    print(torch_sink.fallback_report())  # what ran in stock torchvision, and why
