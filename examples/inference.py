"""Classify images fast: files of any size and format, decoded and transformed on the device.

python examples/inference.py DIR
"""

import sys

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

import torch_sink

if __name__ == "__main__":
    torch_sink.set_image_backend("device", on_decode_error="skip")  # broken files are left out and listed
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = models.resnet18(num_classes=10).eval().to(device)  # weights="DEFAULT" for pretrained ones
    steps = [transforms.Resize(72), transforms.CenterCrop(64), transforms.ToTensor()]
    photos = datasets.ImageFolder(sys.argv[1], transforms.Compose(steps))

    found = []
    with torch.inference_mode(), torch_sink.SinkLoader(DataLoader(photos, 16, num_workers=2)) as batches:
        for images, _ in batches:
            found.append(model(images).argmax(1))  # no sync: results stay on the device
    print(f"{len(torch.cat(found).cpu())} images classified; {torch_sink.decode_report()}")

    # Without a dataset: a list of files, decoded in one call.
    files = [path for path, _ in photos.samples[:4]]
    for file, image in zip(files, torch_sink.decode_images(files, device=device, on_error="none"), strict=True):
        print(file, "is broken" if image is None else (tuple(image.shape), image.dtype))
