"""Crops and pads."""

from __future__ import annotations

from image.examples import Example, Examples, sample

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
}  # fmt: skip
