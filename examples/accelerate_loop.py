"""Hugging Face Accelerate: prepare first, then wrap what prepare returns.

accelerate launch examples/accelerate_loop.py DIR      # needs: pip install accelerate
"""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

import torch_sink

if __name__ == "__main__":
    torch_sink.set_image_backend("device")
    torch.manual_seed(0)
    accelerator = Accelerator()
    train = transforms.Compose([transforms.RandomResizedCrop(64), transforms.ToTensor()])
    photos = datasets.ImageFolder(sys.argv[1], train)
    loader = DataLoader(photos, batch_size=8, shuffle=True, num_workers=2)
    model = models.resnet18(num_classes=len(photos.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # shards the loader over the processes
    with torch_sink.SinkLoader(loader) as batches:
        for images, labels in batches:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    accelerator.print(f"loss {loss.item():.3f}")
    accelerator.print(torch_sink.fallback_report())
