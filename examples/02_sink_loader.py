"""Wrap a DataLoader: batches wait on the device, and statistics say who waits for whom.

python examples/02_sink_loader.py DIR
"""

import sys

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

import torch_sink

if __name__ == "__main__":
    torch_sink.set_image_backend("device")
    torch.manual_seed(0)
    train = transforms.Compose([transforms.RandomResizedCrop(64), transforms.ToTensor()])
    photos = datasets.ImageFolder(sys.argv[1], train)
    generator = torch.Generator().manual_seed(0)  # a seeded loader resumes exactly
    loader = DataLoader(photos, batch_size=8, shuffle=True, num_workers=2, generator=generator)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = models.resnet18(num_classes=len(photos.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    with torch_sink.SinkLoader(loader, memory_format=torch.channels_last) as batches:
        for epoch in range(2):
            for images, labels in batches:  # on the device; valid until the next batch is asked for
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.3f}")
        print(batches.stats())
        state = batches.state_dict()  # load_state_dict(state) goes on with the very next batch
        print(f"saved after {state['batches']} batches")
