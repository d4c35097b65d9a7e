"""Conversions of images and types; normalization, and arithmetic with constants."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from image.examples import STATISTICS, Arguments, Example, Examples, sample


def _type_examples(a: Arguments) -> Iterator[Example]:
    for dtype in (torch.float32, torch.float16, torch.uint8, torch.float64):
        label = "" if dtype == torch.float32 else str(dtype).removeprefix("torch.")
        yield Example("to_dtype", (dtype,), {"scale": True}, label)
        yield Example("to_dtype", (dtype,), {}, f"{label or 'float32'}, unscaled")
        yield Example("convert_image_dtype", (dtype,), label=label)


_TYPE_SAMPLES = [sample(dtype, label=str(dtype).removeprefix("torch.")) for dtype in (torch.float16, torch.float64)]


def _normalize_examples(a: Arguments) -> Iterator[Example]:
    yield Example("normalize", ([0.4] * a.channels, [0.25] * a.channels))
    if a.scale != 1:
        yield Example("arithmetic", label="(x - 0.45) / 0.225 + 0.1", run=lambda image: (image - 0.45) / 0.225 + 0.1)
        yield Example("arithmetic", label="in place", run=lambda image: image.sub_(0.5).div_(0.25))


def _product_examples(a: Arguments) -> Iterator[Example]:
    if a.scale != 1:
        yield Example("arithmetic", label="x * 2 - 1", run=lambda image: image * 2 - 1)
        yield Example("arithmetic", label="product in place", run=lambda image: image.mul_(-1.7))


EXAMPLES: dict[str, Examples] = {
    "to_tensor": lambda a: [Example("to_tensor")] if a.is_pillow else [],
    "pil_to_tensor": lambda a: [Example("pil_to_tensor")] if a.is_pillow else [],
    "to_image": lambda a: [Example("to_image")] if a.is_pillow else [],
    "to Pillow image": lambda a: [] if a.is_pillow else [Example("to_pil_image")],
    "to dtype": _type_examples,
    "normalize": _normalize_examples,
    "product": _product_examples,
}
TRANSFORMS = {
    "ToTensor": [sample()],
    "PILToTensor": [sample()],
    "ToPureTensor": [sample()],
    "ToImage": [sample()],
    "ToPILImage": [sample()],
    "ConvertImageDtype": [sample(torch.float32), *_TYPE_SAMPLES],
    "ToDtype": [sample(torch.float32, scale=True), sample(torch.float32, label="scale=False"), *_TYPE_SAMPLES],
    "Normalize": [sample(*STATISTICS), sample(*STATISTICS, inplace=True, label="inplace=True")],
}
