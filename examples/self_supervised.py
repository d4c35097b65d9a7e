"""DINO: two large and eight small crops of each image; the student guesses what its own average says of the large ones.

python examples/self_supervised.py DIR
"""

import copy
import sys

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

import torch_sink


def crops_of(size, scale, p_blur, p_solarize=0.0):
    crop = transforms.RandomResizedCrop(size, scale, interpolation=transforms.InterpolationMode.BICUBIC)
    jitter = transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8)
    colors = [jitter, transforms.RandomGrayscale(p=0.2), transforms.RandomSolarize(128, p=p_solarize)]
    blur = transforms.RandomApply([transforms.GaussianBlur(5)], p=p_blur)
    return transforms.Compose([crop, transforms.RandomHorizontalFlip(), *colors, blur, transforms.ToTensor()])


class MultiCrop:
    def __init__(self):
        self.large = crops_of(64, (0.4, 1.0), 1.0), crops_of(64, (0.4, 1.0), 0.1, 0.2)
        self.small = crops_of(32, (0.05, 0.4), 0.5)

    def __call__(self, image):
        return [large(image) for large in self.large] + [self.small(image) for _ in range(8)]


if __name__ == "__main__":
    torch_sink.set_image_backend("device")  # 1
    torch.manual_seed(0)
    photos = datasets.ImageFolder(sys.argv[1], MultiCrop())
    loader = DataLoader(photos, batch_size=8, shuffle=True, num_workers=2, drop_last=True)
    loader = torch_sink.SinkLoader(loader)  # 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    student, center = models.resnet18(num_classes=64).to(device), torch.zeros(64, device=device)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4)
    for _epoch in range(2):
        for crops, _labels in loader:
            crops = [crop.to(device, non_blocking=True) for crop in crops]
            taught = teacher(torch.cat(crops[:2]))
            learned = torch.cat([student(torch.cat(crops[:2])), student(torch.cat(crops[2:]))])
            targets = ((taught - center) / 0.04).softmax(-1).chunk(2)
            guesses = (learned / 0.1).log_softmax(-1).chunk(len(crops))
            pairs = [(target, guess) for i, target in enumerate(targets) for j, guess in enumerate(guesses) if i != j]
            loss = torch.stack([-(target * guess).sum(-1).mean() for target, guess in pairs]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():  # the teacher follows
                center = 0.9 * center + 0.1 * taught.mean(0)
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(fast, 0.004)
        print(f"loss {loss:.3f}")
    print(torch_sink.fallback_report())
