"""Two random crops of each image, as SimCLR, MoCo and BYOL take them; a loss of one's own.

python examples/contrastive.py DIR
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

import torch_sink


class TwoCrops:
    """Two draws of one transform."""

    def __init__(self, transform):
        self.transform = transform

    def __call__(self, image):
        return self.transform(image), self.transform(image)


def contrast(model, batch):
    """NT-Xent, equation 1 of Chen et al. 2020: the other crop of an image is its one positive."""
    (first, second), _ = batch
    features = nn.functional.normalize(model(torch.cat([first, second])), dim=1)
    similarity = (features @ features.T / 0.5).fill_diagonal_(float("-inf"))
    positive = torch.arange(len(features), device=features.device).roll(len(first))
    return nn.functional.cross_entropy(similarity, positive)


if __name__ == "__main__":
    torch_sink.set_image_backend("device")
    torch.manual_seed(0)
    jitter = transforms.ColorJitter(0.8, 0.8, 0.8, 0.2)
    crop = transforms.Compose(
        [
            transforms.RandomResizedCrop(64),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([jitter], p=0.8),
            transforms.RandomGrayscale(p=0.2),
            transforms.ToTensor(),
        ]
    )
    photos = datasets.ImageFolder(sys.argv[1], TwoCrops(crop))
    loader = DataLoader(photos, batch_size=8, shuffle=True, num_workers=2, drop_last=True)
    model = models.resnet18(num_classes=32).to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loop = torch_sink.StepLoop(model, None, optimizer, forward=contrast, amp="auto", steps_per_sync=50)
    with torch_sink.SinkLoader(loader) as batches:
        print(loop.run(batches, epochs=2).losses)
    print(torch_sink.fallback_report())
