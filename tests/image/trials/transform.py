"""Pillow's own affine transforms."""

from __future__ import annotations

import math
from collections.abc import Iterator

from PIL import Image

from image.examples import Arguments, Example, Examples, of_method


def _examples(a: Arguments) -> Iterator[Example]:
    turn = math.radians(a.chance.uniform(10, 80))
    matrix = (math.cos(turn), math.sin(turn), -2.5, -math.sin(turn), math.cos(turn), 1.5)
    size = a.other[1], a.other[0]
    for filter in (Image.Resampling.NEAREST, Image.Resampling.BICUBIC):
        yield from of_method(a, "transform", {filter.name: (size, Image.Transform.AFFINE, matrix, filter)})


EXAMPLES: dict[str, Examples] = {"transform": _examples}
