"""Flips, turns and copies."""

from __future__ import annotations

from collections.abc import Iterator

from PIL import Image
from torchvision.transforms import InterpolationMode as Mode

from image.examples import Arguments, Example, Examples, of_functional, of_method, sample


def _turn_examples(a: Arguments) -> Iterator[Example]:
    yield Example("rotate", (90.0, Mode.BILINEAR), {"expand": True}, "BILINEAR, a quarter turn")
    if not a.is_pillow:
        yield Example("rot90", run=lambda image: image.rot90(1, (1, 2)))


EXAMPLES: dict[str, Examples] = {
    "horizontal flip": of_functional("hflip"),
    "vertical flip": of_functional("vflip"),
    "flip of tensors": lambda a: [] if a.is_pillow else [Example("flip", run=lambda image: image.flip(0, 1, 2))],
    "transpose": lambda a: of_method(a, "transpose", {method.name: (method,) for method in Image.Transpose}),
    "quarter turns": _turn_examples,
    "rows and columns": lambda a: (
        [] if a.is_pillow else [Example("transpose", run=lambda image: image.transpose(1, 2))]
    ),
    "clone": lambda a: [] if a.is_pillow else [Example("clone", run=lambda image: image.clone())],
    "contiguous": lambda a: [] if a.is_pillow else [Example("contiguous", run=lambda image: image.contiguous())],
}
TRANSFORMS = {
    "RandomHorizontalFlip": [sample(p=1.0)],
    "RandomVerticalFlip": [sample(p=1.0)],
}
