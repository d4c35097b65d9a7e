"""Brightness, contrast, saturation, hue, gray images and the order of channels."""

from __future__ import annotations

from collections.abc import Iterator

from torchvision.transforms.v2 import functional as F_v2

from image.examples import Arguments, Example, Examples, of_functional, of_method, sample


def _gray_examples(a: Arguments) -> Iterator[Example]:
    for name in ("to_grayscale", "rgb_to_grayscale") if a.is_pillow else ("rgb_to_grayscale",):
        yield Example(name, (1,))
        yield Example(name, (3,), label="3 channels")
    yield from of_method(a, "convert", {"L": ("L",), "RGB": ("RGB",)})


def _rgb_examples(a: Arguments) -> Iterator[Example]:
    yield Example("grayscale_to_rgb")
    if a.is_pillow or a.functional is F_v2:
        gray = F_v2.rgb_to_grayscale
        yield Example("grayscale_to_rgb", label="gray images", run=lambda image: F_v2.grayscale_to_rgb(gray(image, 1)))


def _spread_examples(a: Arguments) -> Iterator[Example]:
    if a.is_pillow:
        return
    yield Example(
        "repeat", label="gray images", run=lambda image: a.functional.rgb_to_grayscale(image, 1).repeat(3, 1, 1)
    )
    yield Example(
        "expand", label="gray images", run=lambda image: a.functional.rgb_to_grayscale(image, 1).expand(3, -1, -1)
    )


def _permutations(a: Arguments) -> Iterator[Example]:
    if a.is_pillow or a.functional is F_v2:
        yield Example("permute_channels", (a.chance.sample(range(a.channels), a.channels),))


EXAMPLES: dict[str, Examples] = {
    "adjust_brightness": of_functional("adjust_brightness", lambda a: (a.factor(),)),
    "adjust_contrast": of_functional("adjust_contrast", lambda a: (a.factor(),)),
    "adjust_saturation": of_functional("adjust_saturation", lambda a: (a.factor(),)),
    "adjust_hue": of_functional("adjust_hue", lambda a: (a.chance.uniform(-0.5, 0.5),)),
    "gray": _gray_examples,
    "gray to RGB": _rgb_examples,
    "three equal channels": _spread_examples,
    "channels": _permutations,
}
TRANSFORMS = {
    "ColorJitter": [
        sample(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
        sample(brightness=0.4, label="brightness alone"),
    ],
    "RandomPhotometricDistort": [sample(p=1.0), sample(p=0.0, label="p=0")],
    "Grayscale": [sample(), sample(3, label="3 channels")],
    "RandomGrayscale": [sample(p=1.0)],
    "RGB": [sample()],
    "RandomChannelPermutation": [sample()],
}
