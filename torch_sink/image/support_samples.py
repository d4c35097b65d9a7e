"""What the support table tries: a few calls of every transform and functional of torchvision.

The first call of each is the usual one; the others, with a label, are arguments that may run differently.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode

HEIGHT, WIDTH = 16, 24
_PIXELS = 3 * HEIGHT * WIDTH
_BILINEAR = {"interpolation": InterpolationMode.BILINEAR}
_NEAREST = {"interpolation": InterpolationMode.NEAREST}
_BICUBIC = {"interpolation": InterpolationMode.BICUBIC}
_STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Enough draws to meet every operation that an automatic augmentation chooses from.
_MANY_DRAWS = 40


class Sample(NamedTuple):
    """One way to call a transform or functional.

    Attributes:
        args: of the constructor, or of the functional after the image.
        kwargs: the same.
        label: what is special about these arguments; empty for the usual ones.
        draws: how often to run it, for what depends on chance.
        form: the image comes alone ("image"), in a dict with boxes ("detection"), or in a batch with labels ("batch").
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012, never written to
    label: str = ""
    draws: int = 1
    form: str = "image"


def _call(*args: Any, label: str = "", draws: int = 1, form: str = "image", **kwargs: Any) -> Sample:
    return Sample(args, kwargs, label, draws, form)


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


def _interpolations(*args: Any, usual: str, **kwargs: Any) -> list[Sample]:
    """The usual call, and one for each interpolation that is not the usual one."""
    named = {"NEAREST": _NEAREST, "BILINEAR": _BILINEAR, "BICUBIC": _BICUBIC}
    others = [name for name in named if name != usual]
    labeled = [Sample(args, {**kwargs, **named[name]}, f"interpolation={name}") for name in others]
    return [Sample(args, kwargs), *labeled]


def _paddings(*args: Any, **kwargs: Any) -> list[Sample]:
    modes = [Sample(args, {**kwargs, "padding_mode": mode}, f"padding_mode={mode!r}") for mode in ("edge", "reflect")]
    return [Sample(args, kwargs), Sample(args, {**kwargs, "fill": (1, 2, 3)}, "fill of one value a channel"), *modes]


def _automatic(**kwargs: Any) -> list[Sample]:
    return [_call(draws=_MANY_DRAWS, **kwargs), _call(label="interpolation=BILINEAR", draws=_MANY_DRAWS, **_BILINEAR)]


def transform_samples(module: ModuleType) -> dict[str, list[Sample]]:
    """{class name: calls} for `torchvision.transforms` or `torchvision.transforms.v2`."""
    flip = module.RandomHorizontalFlip(p=1.0)
    flip_functional = module.functional.hflip
    return {
        **_value_transforms(),
        **_geometric_transforms(),
        **_detection_transforms(),
        "AugMix": [_call(draws=_MANY_DRAWS)],
        "AutoAugment": _automatic(),
        "Compose": [_call([flip])],
        "Lambda": [_call(_read), _call(flip_functional, label="a function that calls recorded functionals")],
        "RandAugment": _automatic(),
        "RandomApply": [_call([flip], p=1.0)],
        "RandomChoice": [_call([flip])],
        "RandomOrder": [_call([flip])],
        "TrivialAugmentWide": _automatic(),
    }


def _value_transforms() -> dict[str, list[Sample]]:
    half = _call(torch.float16, label="float16")
    whole = _call(torch.int32, label="int32")
    double = _call(torch.float64, label="float64")
    return {
        "ColorJitter": [
            _call(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
            _call(brightness=0.4, label="brightness alone"),
        ],
        "ConvertImageDtype": [_call(torch.float32), half, double, whole],
        "CutMix": [_call(num_classes=4, form="batch")],
        "GaussianBlur": [_call(3)],
        "GaussianNoise": [_call()],
        "Grayscale": [_call(), _call(3, label="3 channels")],
        "Identity": [_call()],
        "JPEG": [_call(90)],
        "LinearTransformation": [_call(torch.eye(_PIXELS), torch.zeros(_PIXELS))],
        "MixUp": [_call(num_classes=4, form="batch")],
        "Normalize": [_call(*_STATISTICS), _call(*_STATISTICS, inplace=True, label="inplace=True")],
        "PILToTensor": [_call()],
        "RGB": [_call()],
        "RandomAdjustSharpness": [_call(2.0, p=1.0)],
        "RandomAutocontrast": [_call(p=1.0)],
        "RandomChannelPermutation": [_call()],
        "RandomEqualize": [_call(p=1.0)],
        "RandomErasing": [_call(p=1.0), _call(p=1.0, value="random", label='value="random"')],
        "RandomGrayscale": [_call(p=1.0)],
        "RandomInvert": [_call(p=1.0)],
        "RandomPhotometricDistort": [_call(p=1.0), _call(p=0.0, label="p=0")],
        "RandomPosterize": [_call(2, p=1.0)],
        "RandomSolarize": [_call(128, p=1.0), _call(0.5, p=1.0, label="a threshold below 1")],
        "ToDtype": [_call(torch.float32, scale=True), _call(torch.float32, label="scale=False"), half, double, whole],
        "ToImage": [_call()],
        "ToPILImage": [_call()],
        "ToPureTensor": [_call()],
        "ToTensor": [_call()],
        "UniformTemporalSubsample": [_call(2)],
    }


def _geometric_transforms() -> dict[str, list[Sample]]:
    return {
        "CenterCrop": [_call(8), _call(32, label="larger than the image")],
        "ElasticTransform": _interpolations(sigma=1.0, usual="BILINEAR"),
        "FiveCrop": [_call(8)],
        "Pad": _paddings(2),
        "RandomAffine": [
            *_interpolations(10, translate=(0.1, 0.1), scale=(0.8, 1.2), shear=5, usual="NEAREST"),
            _call(0, translate=(0.2, 0.2), label="translation alone"),
        ],
        "RandomCrop": [
            _call(8), _call(8, padding=2, label="padding"), _call(32, pad_if_needed=True, label="pad_if_needed=True"),
        ],
        "RandomHorizontalFlip": [_call(p=1.0)],
        "RandomIoUCrop": [_call(form="detection", draws=8)],
        "RandomPerspective": [_call(p=1.0)],
        "RandomResize": _interpolations(6, 12, usual="BILINEAR"),
        "RandomResizedCrop": _interpolations(8, usual="BILINEAR"),
        "RandomRotation": [
            *_interpolations((20, 30), usual="NEAREST"),
            _call((20, 30), expand=True, label="expand=True"),
        ],
        "RandomShortestSize": _interpolations(8, usual="BILINEAR"),
        "RandomVerticalFlip": [_call(p=1.0)],
        "RandomZoomOut": [_call(p=1.0)],
        "Resize": [
            *_interpolations((8, 12), usual="BILINEAR"), _call((8, 12), antialias=False, label="antialias=False"),
            _call((8, 1), label="to one column"),
        ],
        "ScaleJitter": _interpolations((12, 12), usual="BILINEAR"),
        "TenCrop": [_call(8)],
    }  # fmt: skip


def _detection_transforms() -> dict[str, list[Sample]]:
    return {
        "ClampBoundingBoxes": [_call(form="detection")],
        "ClampKeyPoints": [_call(form="detection")],
        "ConvertBoundingBoxFormat": [_call("CXCYWH", form="detection")],
        "SanitizeBoundingBoxes": [_call(form="detection")],
        "SanitizeKeyPoints": [_call(labels_getter=None, form="detection")],
        "SetClampingMode": [_call("hard", form="detection")],
    }


def functional_samples(module: ModuleType) -> dict[str, list[Sample]]:
    """{function name: calls} for `torchvision.transforms.functional` or `torchvision.transforms.v2.functional`."""
    samples = {
        **_value_functionals(),
        **_geometric_functionals(),
        **{name: [_call()] for name in _QUERIES},
        **{name: [_call()] for name in ("clamp_bounding_boxes", "clamp_keypoints", "sanitize_keypoints")},
        "convert_bounding_box_format": [_call(new_format="CXCYWH")],
        "sanitize_bounding_boxes": [_call()],
        "uniform_temporal_subsample": [_call(2)],
    }
    for alias, name in _ALIASES.items():
        samples[alias] = samples[name]
    return samples


_QUERIES = (
    "get_dimensions", "get_image_num_channels", "get_image_size", "get_num_channels", "get_num_frames", "get_size",
    "is_pure_tensor",
)  # fmt: skip
_ALIASES = {"horizontal_flip": "hflip", "vertical_flip": "vflip", "elastic_transform": "elastic"}


def _value_functionals() -> dict[str, list[Sample]]:
    return {
        "adjust_brightness": [_call(1.3)],
        "adjust_contrast": [_call(1.3)],
        "adjust_gamma": [_call(1.3)],
        "adjust_hue": [_call(0.1)],
        "adjust_saturation": [_call(1.3)],
        "adjust_sharpness": [_call(1.3)],
        "autocontrast": [_call()],
        "convert_image_dtype": [_call(torch.float32), _call(torch.float64, label="float64")],
        "equalize": [_call()],
        "erase": [_call(1, 1, 4, 4, torch.zeros(3, 1, 1))],
        "gaussian_blur": [_call([3, 3])],
        "gaussian_noise": [_call()],
        "grayscale_to_rgb": [_call()],
        "invert": [_call()],
        "jpeg": [_call(90)],
        "normalize": [_call(*map(list, _STATISTICS))],
        "permute_channels": [_call([2, 1, 0])],
        "pil_to_tensor": [_call()],
        "posterize": [_call(3)],
        "rgb_to_grayscale": [_call(), _call(3, label="3 channels")],
        "solarize": [_call(128), _call(0.5, label="a threshold below 1")],
        "to_dtype": [_call(torch.float32, scale=True), _call(torch.float64, scale=True, label="float64")],
        "to_grayscale": [_call(), _call(3, label="3 channels")],
        "to_image": [_call()],
        "to_pil_image": [_call()],
        "to_tensor": [_call()],
    }


def _geometric_functionals() -> dict[str, list[Sample]]:
    corners = [[0, 0], [WIDTH - 1, 0], [WIDTH - 1, HEIGHT - 1], [0, HEIGHT - 1]]
    moved = [[2, 1], [WIDTH - 3, 0], [WIDTH - 1, HEIGHT - 2], [1, HEIGHT - 1]]
    return {
        "affine": _interpolations(10.0, [1, 2], 1.1, [3.0, 1.0], usual="NEAREST"),
        "center_crop": [_call([8, 8]), _call([32, 32], label="larger than the image")],
        "crop": [_call(2, 3, 8, 9), _call(-2, -3, 12, 13, label="partly outside the image")],
        "elastic": [_call(torch.zeros(1, HEIGHT, WIDTH, 2))],
        "five_crop": [_call([8, 8])],
        "hflip": [_call()],
        "pad": _paddings([1, 2, 3, 4]),
        "perspective": [_call(corners, moved)],
        "resize": [
            *_interpolations([8, 12], usual="BILINEAR"), _call([8, 12], antialias=False, label="antialias=False"),
            _call([8, 1], label="to one column"),
        ],
        "resized_crop": _interpolations(2, 3, 8, 9, [6, 6], usual="BILINEAR"),
        "rotate": [*_interpolations(20.0, usual="NEAREST"), _call(20.0, expand=True, label="expand=True")],
        "ten_crop": [_call([8, 8])],
        "vflip": [_call()],
    }  # fmt: skip
