"""What samples are made by where no image of theirs is recorded, in words: what to open images with instead."""

from __future__ import annotations

from collections.abc import Iterable

# The middle of an origin, a row of three: a dataset gave batches of this, or of this, which can be no image; its code
# called this function; a transform of torchvision got this array.
GAVE, GAVE_NO_IMAGE, CALLED, GOT = "gave", "gave no image", "called", "got"
Origin = tuple[str, ...]

NOTHING_RECORDED = "nothing was recorded: torchvision's transforms got no image from Pillow or torchvision.io"
NO_IMAGES = "nothing was recorded: the batches hold no images"
OPEN = 'Image.open(path).convert("RGB")'
INSTEAD = (
    "open them with Pillow (from PIL import Image), and give them to torchvision's transforms:",
    f"     a file:         {OPEN}",
    '     encoded bytes:  Image.open(io.BytesIO(data)).convert("RGB")',
    "     an RGB array:   Image.fromarray(array)",
    "     a tensor:       torchvision.transforms.functional.to_pil_image(tensor)",
    '   More: docs/troubleshooting.md, "My images come from OpenCV or Albumentations"',
)


def said_of_nothing_recorded(origins: Iterable[Origin]) -> list[str]:
    """Why nothing was recorded, what the samples were made by, and behind "->" what to do, as lines."""
    gave: dict[str, list[str]] = {}
    called: dict[str, list[str]] = {}
    got: list[str] = []
    may_hold_images = False
    for name, verb, what in origins:
        may_hold_images = may_hold_images or verb in (GAVE, GOT)
        if verb == GOT:
            got.append(f"{name} got {what}")
        else:
            (called if verb == CALLED else gave).setdefault(name, []).append(what)
    lines = []
    for name, held in gave.items():
        calls = f", made by {', '.join(called[name])}" if name in called else ""
        lines.append(f"{name} gave {' and '.join(held)}{calls}")
    if gave and not may_hold_images:
        return [NO_IMAGES, *lines]
    if not (gave or got):
        return [NOTHING_RECORDED]
    first, *others = INSTEAD
    return [NOTHING_RECORDED, *lines, *got, f"-> {'' if got else 'if these are images, '}{first}", *others]


def said_beside_recorded(origins: Iterable[Origin]) -> list[str]:
    """Which transforms got arrays of bytes, in a process that records other images."""
    return [
        f"not recorded: {name} got {what}; make an image of it with Image.fromarray(array)"
        for name, verb, what in origins
        if verb == GOT and "uint8" in what
    ]
