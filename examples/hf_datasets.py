"""Hugging Face datasets: images stay encoded until the device decodes them.

python examples/hf_datasets.py DIR      # needs: pip install datasets
"""

import sys

import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from torchvision import models, transforms

import torch_sink

if __name__ == "__main__":
    torch_sink.set_image_backend("device")
    torch.manual_seed(0)
    crop = transforms.Compose([transforms.RandomResizedCrop(64), transforms.ToTensor()])
    photos = load_dataset("imagefolder", data_dir=sys.argv[1], split="train")
    classes = photos.features["label"].num_classes

    def transform(rows):
        return {"images": [crop(image.convert("RGB")) for image in rows["image"]], "labels": rows["label"]}

    loader = DataLoader(photos.with_transform(transform), batch_size=8, shuffle=True, num_workers=2)
    model = models.resnet18(num_classes=classes).to("cuda" if torch.cuda.is_available() else "cpu")

    def loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch["images"]), batch["labels"])

    loop = torch_sink.StepLoop(model, None, torch.optim.SGD(model.parameters(), lr=0.01), forward=loss)
    with torch_sink.SinkLoader(loader) as batches:
        print(loop.run(batches, epochs=2).losses)
    print(torch_sink.fallback_report())
