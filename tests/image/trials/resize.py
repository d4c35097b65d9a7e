"""Resizes, and crops that are resized."""

from __future__ import annotations

from collections.abc import Iterator

from torchvision.transforms import InterpolationMode as Mode

from image.examples import Arguments, Example, Examples, interpolations, sample
from torch_sink.image.operations.resize import SMOOTH_MODES


def _examples(a: Arguments) -> Iterator[Example]:
    modes = (Mode.BILINEAR, *(mode for mode in Mode if mode != Mode.BILINEAR))
    for mode in modes:
        yield Example("resize", (a.other, mode), label=mode.name)
        yield Example("resized_crop", (*a.corner(), *a.smaller, a.other, mode), label=mode.name)
    for mode in SMOOTH_MODES if not a.is_pillow else ():
        yield Example("resize", (a.other, mode), {"antialias": False}, f"{mode.name}, antialias=False")
    yield Example("resize", ([max(min(a.other) - 2, 1)],), {"max_size": max(a.other) + 3}, "max_size")
    yield Example("resize", ([a.height, 1],), label="to one column")


EXAMPLES: dict[str, Examples] = {"resize": _examples}
TRANSFORMS = {
    "RandomResize": interpolations(6, 12, usual="BILINEAR"),
    "RandomResizedCrop": interpolations(8, usual="BILINEAR"),
    "RandomShortestSize": interpolations(8, usual="BILINEAR"),
    "Resize": [
        *interpolations((8, 12), usual="BILINEAR"), sample((8, 12), antialias=False, label="antialias=False"),
        sample((8, 1), label="to one column"),
    ],
    "ScaleJitter": interpolations((12, 12), usual="BILINEAR"),
}  # fmt: skip
