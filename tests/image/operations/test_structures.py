"""Images with boxes, masks, key points and labels: the same draws for all of them, as in stock torchvision.

The pipelines are those that torchvision's reference scripts train detection and segmentation models with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

import torch_sink
from image.cases import array_opener, encoded, opener
from image.check import Opener
from image.random_pipelines import Scenario, compare_scenario

pytestmark = pytest.mark.halved

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OPENERS = [opener(encoded(90, 64, 1, quality=90)), opener(encoded(40, 70, 2, "L")), array_opener(64, 64, 3)]


# --- samples


def boxes_of(image: Image.Image, kind: str = "XYXY") -> tv_tensors.BoundingBoxes:
    width, height = image.size
    corners = [[1, 2, width // 2, height // 2], [width // 3, height // 4, width - 1, height - 2]]
    boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(height, width))  # type: ignore[arg-type, call-arg]
    return F.convert_bounding_box_format(boxes, new_format=tv_tensors.BoundingBoxFormat[kind])


def masks_of(image: Image.Image, count: int = 2) -> tv_tensors.Mask:
    width, height = image.size
    values = torch.arange(count * height * width).reshape(count, height, width) * 7 % 5
    return tv_tensors.Mask(values.to(torch.uint8))


def points_of(image: Image.Image) -> tv_tensors.KeyPoints:
    width, height = image.size
    return tv_tensors.KeyPoints(
        [[0, 0], [width // 2, height // 3], [width - 1, height - 1]], canvas_size=(height, width)
    )  # type: ignore[arg-type, call-arg]


def as_detection(image: Image.Image) -> Any:
    """(image, target) as `wrap_dataset_for_transforms_v2` gives for COCO."""
    target = {"boxes": boxes_of(image), "masks": masks_of(image), "labels": torch.tensor([3, 8]), "image_id": 17}
    return image, target


def as_keypoints(image: Image.Image) -> Any:
    return {
        "image": image,
        "keypoints": points_of(image),
        "boxes": boxes_of(image, "CXCYWH"),
        "labels": torch.tensor([1, 2]),
    }


def as_segmentation(image: Image.Image) -> Any:
    """(image, mask), the mask one of classes."""
    return image, masks_of(image, 1)[0].as_subclass(tv_tensors.Mask)


def as_nested(image: Image.Image) -> Any:
    """Two views and their annotations, in everything that a sample may be made of."""
    return [
        {"views": (image, image.copy()), "annotations": [boxes_of(image), {"points": points_of(image)}]},
        "name",
        3.5,
        None,
    ]


# --- pipelines


def _detection(*augment: Any) -> v2.Compose:
    return v2.Compose(
        [*augment, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.ConvertBoundingBoxFormat("XYXY"),
         v2.SanitizeBoundingBoxes(), v2.ToPureTensor()]
    )  # fmt: skip


def _segmentation(*augment: Any) -> v2.Compose:
    dtypes = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
    return v2.Compose([v2.ToImage(), *augment, v2.ToDtype(dtypes, scale=True), v2.Normalize(MEAN, STD)])


MEANS = {tv_tensors.Image: (123.0, 117.0, 104.0), Image.Image: (123, 117, 104), tv_tensors.Mask: 0, "others": 0}
DETECTION: dict[str, Callable[[], Any]] = {
    "hflip": lambda: _detection(v2.RandomHorizontalFlip(0.5)),
    "lsj": lambda: _detection(
        v2.ScaleJitter((60, 60), antialias=True),
        v2.RandomCrop((60, 60), pad_if_needed=True, fill=MEANS),
        v2.RandomHorizontalFlip(0.5),
    ),
    "multiscale": lambda: _detection(v2.RandomShortestSize((24, 32, 48), max_size=90), v2.RandomHorizontalFlip(0.5)),
    "ssd": lambda: _detection(
        v2.RandomPhotometricDistort(), v2.RandomZoomOut(fill=MEANS), v2.RandomIoUCrop(), v2.RandomHorizontalFlip(0.5)
    ),
    "ssdlite": lambda: _detection(v2.RandomIoUCrop(), v2.RandomHorizontalFlip(0.5)),
    "evaluation": lambda: _detection(),
    "warps": lambda: _detection(
        v2.RandomRotation(20, InterpolationMode.BILINEAR),
        v2.RandomPerspective(0.3, 1.0),
        v2.RandomResizedCrop((40, 50)),
    ),
    "elastic": lambda: _detection(v2.ElasticTransform(30.0, 3.0), v2.RandomAffine(10, (0.1, 0.1), (0.8, 1.2), 5)),
}
# torchvision 0.23 has key points, and not this transform of them.
SANITIZED = [v2.SanitizeKeyPoints(labels_getter=None)] if hasattr(v2, "SanitizeKeyPoints") else []
KEYPOINTS: dict[str, Callable[[], Any]] = {
    "flips": lambda: v2.Compose([v2.RandomHorizontalFlip(0.5), v2.RandomVerticalFlip(0.5), v2.ToImage()]),
    "crops": lambda: v2.Compose([v2.Resize(40), v2.RandomCrop(36), v2.ClampKeyPoints(), v2.ToImage()]),
    "warps": lambda: v2.Compose(
        [v2.RandomAffine(20, (0.1, 0.2), (0.7, 1.3), 9), v2.RandomPerspective(0.4, 1.0), *SANITIZED, v2.ToImage()]
    ),
    "pads": lambda: v2.Compose([v2.Pad((1, 2, 3, 4), fill=MEANS), v2.CenterCrop(50), v2.ToImage()]),
}  # fmt: skip
SEGMENTATION: dict[str, Callable[[], Any]] = {
    "training": lambda: _segmentation(
        v2.RandomResize(32, 80), v2.RandomHorizontalFlip(0.5), v2.RandomCrop((48, 48), pad_if_needed=True,
        fill={tv_tensors.Image: 0, tv_tensors.Mask: 255, "others": 0})
    ),
    "evaluation": lambda: _segmentation(v2.Resize((52,))),
    "warps": lambda: _segmentation(v2.RandomRotation(30, InterpolationMode.BILINEAR), v2.RandomResizedCrop((32, 40))),
}  # fmt: skip
NESTED: dict[str, Callable[[], Any]] = {
    "one draw for all": lambda: v2.Compose(
        [v2.RandomResizedCrop((30, 32)), v2.RandomHorizontalFlip(0.5), v2.ColorJitter(0.4, 0.4, 0.4, 0.1), v2.ToImage()]
    ),
    "chosen": lambda: v2.Compose(
        [v2.RandomChoice([v2.Resize((20, 30)), v2.Pad(3)]), v2.RandomOrder([v2.RandomCrop(18), v2.RandomVerticalFlip(0.5)]),
         v2.RandomApply([v2.RandomRotation(40)], 0.5), v2.ToImage()]
    ),
}  # fmt: skip


def check(pipeline: Callable[[], Any], arrange: Callable[[Image.Image], Any]) -> None:
    """Equal images, annotations, types and draws over several seeds."""

    def sample(open_image: Opener) -> Callable[[], Any]:
        return lambda: arrange(open_image())

    for seed in range(4):
        for outcome in compare_scenario(Scenario(pipeline, [sample(item) for item in OPENERS]), 100 * seed):
            assert outcome.error is None, repr(outcome.error)


@pytest.mark.parametrize("name", DETECTION)
@pytest.mark.sampled(4)
def test_detection(name: str) -> None:
    check(DETECTION[name], as_detection)


@pytest.mark.parametrize("name", KEYPOINTS)
def test_key_points(name: str) -> None:
    check(KEYPOINTS[name], as_keypoints)


@pytest.mark.parametrize("name", SEGMENTATION)
def test_segmentation(name: str) -> None:
    check(SEGMENTATION[name], as_segmentation)


@pytest.mark.parametrize("name", NESTED)
def test_nested_samples(name: str) -> None:
    check(NESTED[name], as_nested)


@pytest.mark.parametrize("name", ["hflip", "lsj", "multiscale", "ssdlite", "evaluation"])
def test_images_of_detection_pipelines_are_recorded(name: str) -> None:
    """What the boxes need is computed at once, the image waits."""
    torch.manual_seed(3)
    with torch_sink.image_backend("device", device="meta", strict=True):
        image, target = DETECTION[name]()(as_detection(OPENERS[0]()))
    assert image.is_recording
    assert all(type(leaf) is not type(image) for leaf in tree_leaves(target))
