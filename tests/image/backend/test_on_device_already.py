"""Images that lie on a device: torchvision's transforms run there, as without the backend, and no report counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulators.fake_cuda import fake_cuda, rehearse  # noqa: F401
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.check import assert_same_bits
from torch_sink.image.core.origins import NOTHING_RECORDED

pytestmark = [pytest.mark.cuda(rehearsed=True), pytest.mark.usefixtures("rehearse")]

SIZE = 20, 24
IMAGES: dict[str, Callable[[], torch.Tensor]] = {
    "uint8 batch": lambda: torch.randint(0, 256, (2, 3, *SIZE), dtype=torch.uint8),
    "float32 batch": lambda: torch.rand(2, 3, *SIZE),
    "uint8 image": lambda: torch.randint(0, 256, (3, *SIZE), dtype=torch.uint8),
    "image of transforms.v2": lambda: tv_tensors.Image(torch.rand(3, *SIZE)),
}
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "v1": v1.Compose(
        [
            v1.RandomResizedCrop(12, antialias=True),
            v1.RandomHorizontalFlip(),
            v1.ColorJitter(0.4, 0.4, 0.4),
            v1.ConvertImageDtype(torch.float32),
            v1.Normalize((0.5,), (0.2,)),
            v1.RandomErasing(1.0),
        ]
    ),
    "v2": v2.Compose(
        [
            v2.RandomResizedCrop(12, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.2)),
            v2.RandomErasing(1.0),
        ]
    ),
    "five crops": lambda image: torch.stack([F.hflip(crop) for crop in F.five_crop(image, [8, 8])]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", IMAGES)
def test_what_lies_on_a_device_stays_there(kind: str, transform: str) -> None:
    torch.manual_seed(3)
    image, results = IMAGES[kind]().cuda(), []
    for name, settings in (("PIL", {}), ("device", {"device": "cuda", "strict": True})):
        torch.manual_seed(4)
        with torch_sink.image_backend(name, **settings):  # type: ignore[arg-type]
            results.append(TRANSFORMS[transform](image))
    assert not torch_sink.fallback_report()
    expected, made = results
    assert expected.device == made.device == torch.device("cuda", 0)
    assert_same_bits(made.cpu(), expected.cpu())


def test_mixes_of_a_batch_on_a_device() -> None:
    batch, labels, results = IMAGES["float32 batch"]().cuda(), torch.tensor([0, 1]).cuda(), []
    for name, settings in (("PIL", {}), ("device", {"device": "cuda", "strict": True})):
        torch.manual_seed(4)
        with torch_sink.image_backend(name, **settings):  # type: ignore[arg-type]
            results.append(v2.MixUp(num_classes=2)(batch, labels))
    assert not torch_sink.fallback_report()
    for expected, made in zip(*results, strict=True):
        assert made.device.type == "cuda"
        assert_same_bits(made.cpu(), expected.cpu())


def test_nothing_was_recorded_on_the_device() -> None:
    with torch_sink.image_backend("device", device="cuda"):
        F.hflip(IMAGES["uint8 batch"]().cuda())
        assert str(torch_sink.fallback_report()) == NOTHING_RECORDED
