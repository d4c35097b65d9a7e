"""Mixed precision in a StepLoop, and in a step of your own.

python examples/04_mixed_precision.py DIR
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

import torch_sink

if __name__ == "__main__":
    torch_sink.set_image_backend("device")
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
    photos = datasets.ImageFolder(sys.argv[1], train)
    batches = torch_sink.SinkLoader(DataLoader(photos, batch_size=8, shuffle=True))

    def make_model() -> nn.Module:
        layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(16 * 4 * 4, len(photos.classes))).to(device)

    # O1 is autocast; O2 keeps bfloat16 from layer to layer, normalization and loss in float32; O3 only the loss.
    for level in ("O0", "O1", "O2", "O3"):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = torch_sink.StepLoop(model, nn.functional.cross_entropy, optimizer, amp=level)
        history = loop.run(batches, epochs=2)
        print(f"{level}: last loss {history.losses[-1]:.3f}, parameters are {next(model.parameters()).dtype}")

    # A loop of your own: float16 with a dynamic scale, skipped steps are skipped on the device.
    model = torch_sink.amp.auto_mixed_precision(make_model(), "O2", torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch_sink.amp.DynamicLossScaler()
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        finite = scaler.step(optimizer)
        scaler.adjust(finite)
    print(f"own loop: loss {loss.item():.3f}, {scaler}")
