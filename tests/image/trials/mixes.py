"""Erased boxes, and mixed images."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from image.examples import Arguments, Example, Examples, sample


def _erase_examples(a: Arguments) -> Iterator[Example]:
    (top, left), (height, width) = a.corner(), a.smaller
    color = torch.tensor(a.fill()).to(torch.uint8 if a.scale == 1 else torch.float32).reshape(-1, 1, 1)
    yield Example("erase", (top, left, height, width, color))
    yield Example("erase", (top, left, height, width, a.noise(height, width)), label="random values")


EXAMPLES: dict[str, Examples] = {"erase": _erase_examples}
TRANSFORMS = {
    "RandomErasing": [sample(p=1.0), sample(p=1.0, value="random", label='value="random"')],
    "MixUp": [sample(num_classes=4, form="batch")],
    "CutMix": [sample(num_classes=4, form="batch")],
}
