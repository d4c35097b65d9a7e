"""Segmentation with transforms v2: the image is made on the device, the mask follows the same draws.

python examples/segmentation.py DIR     # DIR/images/*.jpg and DIR/masks/*.png
"""

import sys
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import models, tv_tensors
from torchvision.transforms import v2

import torch_sink


class Folder(Dataset):
    """An image and its mask, of equal names."""

    def __init__(self, root, transform):
        self.images = sorted(Path(root, "images").glob("*.jpg"))
        self.masks = [Path(root, "masks", f"{image.stem}.png") for image in self.images]
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = Image.open(self.images[index]).convert("RGB")
        mask = tv_tensors.Mask(v2.functional.pil_to_tensor(Image.open(self.masks[index])))
        return self.transform(image, mask)


if __name__ == "__main__":
    torch_sink.set_image_backend("device")
    torch.manual_seed(0)
    train = v2.Compose(
        [
            v2.RandomResizedCrop((64, 64), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
        ]
    )
    data = Folder(sys.argv[1], train)
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=2, drop_last=True)
    model = models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")

    def loss(model, batch):
        images, masks = batch
        return torch.nn.functional.cross_entropy(model(images)["out"], masks.squeeze(1).long(), ignore_index=255)

    loop = torch_sink.StepLoop(model, None, torch.optim.SGD(model.parameters(), lr=0.01), forward=loss)
    with torch_sink.SinkLoader(loader) as batches:
        print(loop.run(batches, epochs=2).losses)
    print(torch_sink.fallback_report())
