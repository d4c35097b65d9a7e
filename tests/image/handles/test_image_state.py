"""What changes the state of a Pillow image is seen by all that follows, and by nothing that was recorded before."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImagePalette
from torch.utils.data import default_collate
from torchvision import transforms as v1
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.cases import encoded
from torch_sink.image.handles.image import LazyImage, LazyPixels

pytestmark = pytest.mark.halved

GRAY, COLOR, CMYK = (encoded(19, 14, 3, mode) for mode in ("L", "RGB", "CMYK"))
ARRAY = np.random.default_rng(5).integers(0, 256, (14, 19, 3), dtype=np.uint8)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


_photo = Image.fromarray(ARRAY)
_gray, _few_colors = _photo.convert("L"), _photo.quantize(9)
CLEAR_GRAY, CLEAR_COLOR = saved(_gray, "PNG", transparency=7), saved(_photo, "PNG", transparency=(1, 2, 3))
CLEAR_MASK = saved(_few_colors, "PNG", transparency=bytes([0, 128, 255]))
FRAMES = saved(_few_colors, "GIF", save_all=True, append_images=[_photo.transpose(0), _gray])

IMAGES: dict[str, Callable[[], Image.Image]] = {
    "gray file": lambda: opened(GRAY),
    "color file": lambda: opened(COLOR),
    "CMYK file": lambda: opened(CMYK),
    "converted file": lambda: opened(COLOR).convert("L"),
    "handle": lambda: F.resize(opened(COLOR).convert("RGB"), [9, 12]),
    "gray handle": lambda: F.hflip(opened(GRAY)),
    "moved mask": lambda: F.hflip(_few_colors),
    "moved mask with transparent colors": lambda: F.resize(opened(CLEAR_MASK), [9, 12]),
    "moved gray file with a transparent color": lambda: F.crop(opened(CLEAR_GRAY), 1, 2, 9, 12),
    "moved file with a transparent color": lambda: F.vflip(opened(CLEAR_COLOR)),
    "frames": lambda: opened(FRAMES),
    "array": lambda: Image.fromarray(ARRAY),
    "gray array": lambda: Image.fromarray(ARRAY[:, :, 0].copy()),
    "image of a tensor": lambda: F.to_pil_image(F.pil_to_tensor(opened(COLOR))),
}

COLORS = [(255 - value) // part for value in range(256) for part in (1, 2, 3)]


def color_of(image: Image.Image) -> Any:
    return (9, 8, 7, 6)[: len(image.getbands())] if len(image.getbands()) > 1 else 9


def set_dirty_palette(image: Image.Image) -> None:
    image.palette = ImagePalette.ImagePalette("RGB", bytes(COLORS))
    image.palette.dirty = 1


def turn_colors_around(image: Image.Image) -> None:
    image.palette.palette = bytes(reversed(bytes(image.palette.palette)))  # type: ignore[union-attr]
    image.palette.dirty = 1  # type: ignore[union-attr]


def cut_tile(image: Any) -> None:
    image.tile[0] = image.tile[0]._replace(extents=(0, 0, image.width, 8))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "putpalette": lambda image: image.putpalette(COLORS),
    "putpalette, with alpha": lambda image: image.putpalette([*range(256)] * 4, "RGBA"),
    "palette =": lambda image: setattr(image, "palette", ImagePalette.ImagePalette("RGB", bytes(COLORS))),
    "dirty palette": set_dirty_palette,
    "colors of the palette": turn_colors_around,
    "getcolor": lambda image: image.palette.getcolor((9, 8, 7), image),
    "mode": lambda image: setattr(image, "_mode", "P"),
    "size": lambda image: setattr(image, "_size", (5, 6)),
    "im =": lambda image: setattr(image, "im", _photo.im),
    "tile": cut_tile,
    "transparency": lambda image: image.info.update(transparency=3),
    "transparency of another mode": lambda image: image.info.update(transparency=(1, 2, 3)),
    "transparency in bytes": lambda image: image.info.update(transparency=b"\0\x80\xff"),
    "info": lambda image: image.info.update(written=[1]),
    "info =": lambda image: setattr(image, "info", {"n": 1}),
    "apply_transparency": lambda image: image.apply_transparency(),
    "putalpha": lambda image: image.putalpha(77),
    "paste": lambda image: image.paste(color_of(image), (1, 1, 5, 6)),
    "pixel": lambda image: image.load().__setitem__((2, 1), color_of(image)),
    "readonly": lambda image: setattr(image, "readonly", 1),
    "draft": lambda image: image.draft("L", (8, 6)),
    "seek": lambda image: image.seek(1),
    "thumbnail": lambda image: image.thumbnail((8, 8)),
    "encoderinfo": lambda image: setattr(image, "encoderinfo", {"quality": 3}),
    "exif": lambda image: image.getexif().update({0x0112: 3}),
    "close": lambda image: image.close(),
    "class": lambda image: setattr(image, "__class__", Image.Image),
}

FOLLOWING: dict[str, Callable[[Any], Any]] = {
    "itself": lambda image: image,
    "convert to RGB": lambda image: image.convert("RGB"),
    "convert to L": lambda image: image.convert("L"),
    "convert to RGBA": lambda image: image.convert("RGBA"),
    "copy": lambda image: image.copy(),
    "crop": lambda image: image.crop((1, 1, 9, 8)),
    "resize": lambda image: F.resize(image, [7, 6]),
    "flips": lambda image: v2.functional.vertical_flip(F.hflip(image)),
    "pad": lambda image: F.pad(F.hflip(image), 2, fill=3),
    "gray": lambda image: F.rgb_to_grayscale(image, 1),
    "saturation": lambda image: F.adjust_saturation(image, 0.5),
    "enhanced": lambda image: ImageEnhance.Color(image).enhance(0.5),
    "save": lambda image: opened(saved(image, "PNG")),
    "pickle": lambda image: pickle.loads(pickle.dumps(image)),
    "deepcopy": copy.deepcopy,
    "equal": lambda image: (image == image.copy(), image == copy.deepcopy(image)),
    "tensor": F.pil_to_tensor,
    "v1": v1.Compose([v1.RandomHorizontalFlip(1.0), v1.Grayscale(3), v1.ToTensor()]),
    "v2": v2.Compose([v2.Resize(6), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]),
    "batch": lambda image: default_collate([F.to_tensor(image)] * 2),
}


def content(value: Any) -> Any:
    if isinstance(value, Image.Image):
        palette, pixels = value.getpalette(), value.tobytes()
        return value.mode, value.size, palette, value.palette and value.palette.mode, sorted(value.info.items()), pixels
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return content(call())
    except Exception as error:
        return type(error), str(error)


def outcomes(image: str, change: str) -> list[Any]:
    """What follows a change of an image, of which every second one was used before."""
    found = []
    for number, following in enumerate(FOLLOWING.values()):
        changed = IMAGES[image]()
        before = F.vflip(changed) if number % 2 else None
        found.append(outcome(lambda changed=changed: CHANGES[change](changed) and None))
        found.append(outcome(lambda following=following, changed=changed: following(changed)))
        found.append(content(before))
    return found


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.sampled(120)
def test_what_follows_a_change_is_stock_codes(image: str, change: str) -> None:
    expected = outcomes(image, change)
    with torch_sink.image_backend("device", device="cpu"):
        assert outcomes(image, change) == expected


@pytest.mark.parametrize("image", ["gray file", "color file", "handle", "moved mask", "gray handle"])
def test_what_changes_nothing_goes_on_recording(image: str) -> None:
    with torch_sink.image_backend("device", device="cpu"):
        made = IMAGES[image]()
        assert isinstance(made, LazyPixels)
        made.info["written"] = 1
        made.readonly = 1
        made.encoderinfo = {}  # type: ignore[attr-defined]
        assert made.is_recording
        assert (type(made.copy()), made.copy().info) == (LazyImage, made.info)
        assert made.is_recording


@pytest.mark.parametrize("name", ["gray file", "handle", "moved mask"])
def test_what_writes_to_a_handle_is_in_the_report(name: str) -> None:
    with torch_sink.image_backend("device", device="cpu"):
        image = F.vflip(IMAGES[name]())
        assert not torch_sink.fallback_report()
        if image.mode != "RGB":
            image.putpalette(COLORS)
        else:
            image.putpixel((1, 1), (1, 2, 3))
        assert torch_sink.fallback_report()


def test_a_functional_that_does_nothing_returns_its_image() -> None:
    """What is written to the one is written to the other."""
    with torch_sink.image_backend("device", device="cpu"):
        for name in ("color file", "array", "handle"):
            image = IMAGES[name]()
            assert v2.functional.resize(image, [image.height, image.width]) is image
