"""Blurs and sharpness."""

from __future__ import annotations

from typing import Any

from PIL import ImageFilter

from image.examples import Arguments, Example, Examples, of_functional, of_method, sample


def _filter_examples(a: Arguments) -> list[Example]:
    calls: dict[str, Any] = {
        "GaussianBlur": ImageFilter.GaussianBlur(a.chance.uniform(0.1, 3)),
        "BoxBlur": ImageFilter.BoxBlur(a.chance.uniform(0.1, 5)),
        "BoxBlur, two radii": ImageFilter.BoxBlur((a.chance.uniform(0.1, 5), a.chance.uniform(0.1, 5))),
        "SHARPEN": ImageFilter.SHARPEN,
        "SMOOTH_MORE": ImageFilter.SMOOTH_MORE,
    }
    for side in (3, 5):
        weights = [a.chance.uniform(-1, 2) for _ in range(side**2)]
        calls[f"Kernel, {side} x {side}"] = ImageFilter.Kernel((side, side), weights, offset=a.chance.uniform(-50, 50))
    return of_method(a, "filter", {name: (filter,) for name, filter in calls.items()})


EXAMPLES: dict[str, Examples] = {
    "gaussian_blur": lambda a: [
        Example("gaussian_blur", ([3, 5], [0.9, 1.3]), label="3 x 5"),
        Example("gaussian_blur", ([9, 9], a.chance.uniform(0.5, 3)), label="9 x 9"),
    ],
    "Pillow's filters": _filter_examples,
    "adjust_sharpness": of_functional("adjust_sharpness", lambda a: (a.factor(),)),
}
TRANSFORMS = {
    "GaussianBlur": [sample(3)],
    "RandomAdjustSharpness": [sample(2.0, p=1.0)],
}
