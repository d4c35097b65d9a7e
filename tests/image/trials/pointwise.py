"""Functions of torch that make one value of each."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from image.examples import Arguments, Example, Examples


def _pointwise_examples(a: Arguments) -> Iterator[Example]:
    if a.is_pillow:
        return
    low = int(100 * a.scale) if a.scale == 1 else 0.4
    yield Example("comparison", label="x > a", run=lambda image: image > low)
    yield Example("comparison", label="masks", run=lambda image: ((image > low) & ~(image >= 2 * low)).float())
    yield Example("where", run=lambda image: torch.where(image < low, image, 0))
    yield Example("masked_fill", run=lambda image: image.masked_fill(image <= low, 1))
    yield Example("pow", label="x ** 2", run=lambda image: (image * 0.1) ** 2)
    if a.scale == 1:
        yield Example("arithmetic", label="whole numbers", run=lambda image: image // 2 + 3)
    else:
        yield Example("byte", label="x * 255", run=lambda image: (image * 255).round().byte())


def _clamp_examples(a: Arguments) -> Iterator[Example]:
    if not a.is_pillow:
        low, high = (value if a.scale == 1 else value / 255 for value in (30, 200))
        yield Example("clamp", run=lambda image: image.clamp(low, high))
        yield Example("clamp", label="[0, 1]", run=lambda image: a.functional.resize(image, a.other).clamp(0, 1))


EXAMPLES: dict[str, Examples] = {
    "function of single values": _pointwise_examples,
    "function of single values that makes bytes": _pointwise_examples,
    "clamp": _clamp_examples,
}
