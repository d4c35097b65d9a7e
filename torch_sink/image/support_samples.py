"""What the support table tries besides the examples of operations: what torchvision has and no operation is."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torchvision import tv_tensors

from torch_sink.image.core.examples import MANY_DRAWS, Example, Sample, interpolations, sample

HEIGHT, WIDTH = 16, 24
_PIXELS = 3 * HEIGHT * WIDTH


def detection_targets() -> dict[str, Any]:
    """Two boxes, two key points and two labels of the sample image."""
    size = (HEIGHT, WIDTH)
    return {
        "boxes": tv_tensors.BoundingBoxes([[1, 2, 9, 12], [4, 3, 20, 14]], format="XYXY", canvas_size=size),  # type: ignore[arg-type, call-arg]
        "points": tv_tensors.KeyPoints([[3, 4], [12, 9]], canvas_size=size),  # type: ignore[call-arg]
        "labels": torch.tensor([0, 1]),
    }


def _read(image: Any) -> Any:
    np.asarray(image)
    return image


def other_transforms(module: ModuleType) -> dict[str, list[Sample]]:
    """{class name: ways to construct it} for `torchvision.transforms` or `torchvision.transforms.v2`."""
    flip = module.RandomHorizontalFlip(p=1.0)
    automatic = [way._replace(draws=MANY_DRAWS) for way in interpolations(usual="NEAREST")[:2]]
    return {
        "AutoAugment": automatic,
        "ClampBoundingBoxes": [sample(form="detection")],
        "ClampKeyPoints": [sample(form="detection")],
        "Compose": [sample([flip])],
        "ConvertBoundingBoxFormat": [sample("CXCYWH", form="detection")],
        "GaussianNoise": [sample()],
        "Identity": [sample()],
        "JPEG": [sample(90)],
        "Lambda": [sample(_read), sample(module.functional.hflip, label="a function that calls recorded functionals")],
        "LinearTransformation": [sample(torch.eye(_PIXELS), torch.zeros(_PIXELS))],
        "RandAugment": automatic,
        "RandomApply": [sample([flip], p=1.0)],
        "RandomChoice": [sample([flip])],
        "RandomIoUCrop": [sample(form="detection", draws=8)],
        "RandomOrder": [sample([flip])],
        "SanitizeBoundingBoxes": [sample(form="detection")],
        "SanitizeKeyPoints": [sample(labels_getter=None, form="detection")],
        "SetClampingMode": [sample("hard", form="detection")],
        "TrivialAugmentWide": automatic,
        "UniformTemporalSubsample": [sample(2)],
    }


OTHER_FUNCTIONALS = (
    Example("clamp_bounding_boxes"), Example("clamp_keypoints"),
    Example("convert_bounding_box_format", (), {"new_format": "CXCYWH"}), Example("gaussian_noise"),
    Example("get_dimensions"), Example("get_image_num_channels"), Example("get_image_size"),
    Example("get_num_channels"), Example("get_num_frames"), Example("get_size"), Example("is_pure_tensor"),
    Example("jpeg", (90,)), Example("sanitize_bounding_boxes"), Example("sanitize_keypoints"),
    Example("uniform_temporal_subsample", (2,)),
)  # fmt: skip
# Other names of functionals of which operations have examples.
ALIASES = {"horizontal_flip": "hflip", "vertical_flip": "vflip", "elastic": "elastic_transform"}
