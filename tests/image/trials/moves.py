"""Crops, pads, flips, turns and copies."""

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
    "crop": lambda a: [
        Example("crop", (*a.corner(), *a.smaller)),
        Example("crop", (*a.corner_outside(), *a.smaller), label="partly outside"),
        Example("center_crop", (a.smaller,)), Example("center_crop", ([a.height + 3, a.width + 4],), label="larger"),
        Example("five_crop", (a.smaller,)), Example("ten_crop", (a.smaller,)),
    ],
    "pad": lambda a: [
        Example("pad", (a.padding,), {"fill": a.chance.randrange(256) * a.scale}),
        *(Example("pad", (a.padding,), {"padding_mode": mode}, mode) for mode in ("edge", "reflect", "symmetric")),
        Example("pad", (a.padding,), {"fill": tuple(a.fill()) if a.is_pillow else a.fill()}, "a color"),
    ],
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
}  # fmt: skip
TRANSFORMS = {
    "CenterCrop": [sample(8), sample(32, label="larger than the image")],
    "FiveCrop": [sample(8)],
    "RandomCrop": [
        sample(8), sample(8, padding=2, label="padding"),
        sample(32, pad_if_needed=True, label="pad_if_needed=True"),
    ],
    "TenCrop": [sample(8)],
    "Pad": [
        sample(2), sample(2, fill=(1, 2, 3), label="fill of one value a channel"),
        *(sample(2, padding_mode=mode, label=f"padding_mode={mode!r}") for mode in ("edge", "reflect")),
    ],
    "RandomZoomOut": [sample(p=1.0)],
    "RandomHorizontalFlip": [sample(p=1.0)],
    "RandomVerticalFlip": [sample(p=1.0)],
}  # fmt: skip
