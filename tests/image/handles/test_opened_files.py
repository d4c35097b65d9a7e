"""What `Image.open` returns, under calls in any order: the first that reads the pixels ends the file, as in Pillow."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torchvision import transforms, tv_tensors
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.cases import encoded

pytestmark = pytest.mark.halved

CALLS: dict[str, Callable[[Any], Any]] = {
    "crop": lambda image: image.crop((3, 2, 45, 33)),
    "crop of everything": lambda image: image.crop(),
    "impossible crop": lambda image: image.crop((9, 9, 3, 3)),
    "resize": lambda image: image.resize((31, 22)),
    "resize to its size": lambda image: image.resize(image.size),
    "impossible resize": lambda image: image.resize((4, 4), 99),
    "reduce": lambda image: image.reduce(2),
    "transpose": lambda image: image.transpose(Image.Transpose.ROTATE_90),
    "rotate": lambda image: image.rotate(0),
    "transform": lambda image: image.transform((9, 8), Image.Transform.AFFINE, (1, 0.2, 0, 0.1, 1, 0)),
    "convert": lambda image: image.convert("L"),
    "convert to its mode": lambda image: image.convert(image.mode),
    "copy": lambda image: image.copy(),
    "copied thumbnail": lambda image: _in_place(image.copy(), lambda copied: copied.thumbnail((12, 12))),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda image: pickle.loads(pickle.dumps(image)),
    "filter": lambda image: image.filter(ImageFilter.BoxBlur(1)),
    "point": lambda image: image.point(lambda value: 255 - value),
    "split": lambda image: image.split()[0],
    "getchannel": lambda image: image.getchannel(0),
    "autocontrast": ImageOps.autocontrast,
    "exif_transpose": ImageOps.exif_transpose,
    "enhance": lambda image: ImageEnhance.Brightness(image).enhance(0.7),
    "thumbnail": lambda image: _in_place(image, lambda image: image.thumbnail((20, 20))),
    "large thumbnail": lambda image: _in_place(image, lambda image: image.thumbnail((500, 500))),
    "thumbnail without a draft": lambda image: _in_place(
        image, lambda image: image.thumbnail((20, 20), reducing_gap=None)
    ),
    "draft": lambda image: image.draft("L", (30, 30)),
    "draft of a size": lambda image: image.draft(None, (20, 20)),
    "draft of a mode": lambda image: image.draft("L", None),
    "load": lambda image: _in_place(image, lambda image: image.load()),
    "verify": lambda image: image.verify(),
    "getpixel": lambda image: image.getpixel((1, 1)),
    "putpixel": lambda image: image.putpixel((1, 1), 7),
    "paste": lambda image: image.paste(5, (0, 0, 9, 9)),
    "getextrema": lambda image: image.getextrema(),
    "asarray": lambda image: np.asarray(image).tolist(),
    "leave": lambda image: image.__exit__(None, None, None),
    "close": lambda image: image.close(),
    "facts": lambda image: (image.size, image.mode, image.width, image.getbands(), image.format, image.readonly),
    "state": lambda image: (getattr(image, "fp", None) is None, len(getattr(image, "tile", ()))),
    "exif": lambda image: dict(image.getexif()),
    "equal": lambda image: image == image.copy(),
    "F.resize": lambda image: F.resize(image, [20, 30]),
    "F.resize to its size": lambda image: F.resize(image, [image.height, image.width]),
    "F.resize, LANCZOS": lambda image: F.resize(image, [20, 30], F.InterpolationMode.LANCZOS),
    "F.hflip": F.hflip,
    "F.rotate": lambda image: F.rotate(image, 20),
    "F.crop": lambda image: F.crop(image, 2, 3, 9, 8),
    "impossible F.crop": lambda image: F.crop(image, 2, 3, -9, 8),
    "F.adjust_hue": lambda image: F.adjust_hue(image, 0.1),
    "F.adjust_contrast": lambda image: F.adjust_contrast(image, 0.5),
    "impossible F.adjust_hue": lambda image: F.adjust_hue(image, 0.9),
    "F.pad": lambda image: F.pad(image, [1, 2]),
    "F.equalize": F.equalize,
    "F.get_image_size": F.get_image_size,
    "ToTensor": transforms.ToTensor(),
    "PILToTensor": transforms.PILToTensor(),
    "RandomCrop": transforms.RandomCrop(5000),
    "v2.Resize": v2.Resize(9),
    "v2.ToImage": v2.ToImage(),
    "tv_tensors.Image": tv_tensors.Image,
    "v2.Compose": v2.Compose([v2.CenterCrop(9), v2.ToImage()]),
}


def _in_place(image: Any, call: Callable[[Any], Any]) -> Any:
    call(image)
    return image


def _told(made: Any) -> Any:
    """What a test compares of a result; of images only what reads no pixels."""
    if isinstance(made, Image.Image):
        return type(made).__name__.removeprefix("Lazy"), made.size, made.mode
    return (type(made).__name__, made.shape, made.dtype) if isinstance(made, torch.Tensor) else made


def _pixels(made: Any) -> Any:
    try:
        return made.tolist() if isinstance(made, torch.Tensor) else (made.size, made.mode, made.tobytes())
    except Exception as error:
        return type(error), str(error)


def _log_of(path: Path, seed: int) -> list[Any]:
    """Opens a file, and calls what `seed` draws on it and on the images that this gives; returns what came of it."""
    draws = random.Random(seed)
    images: list[Any] = [Image.open(path)]
    tensors: list[torch.Tensor] = []
    log: list[Any] = []
    for _ in range(draws.randint(2, 6)):
        at, name = draws.randrange(max(1, len(images) - 2)), draws.choice(sorted(CALLS))
        try:
            made = CALLS[name](images[at])
        except Exception as error:
            made = type(error), str(error)
        same = [other for other, image in enumerate(images) if image is made]
        log.append((name, at, same, _told(made)))
        if isinstance(made, Image.Image) and not same:
            images.append(made)
        if isinstance(made, torch.Tensor):
            tensors.append(made)
    return [*log, *(("pixels", _pixels(made), _told(made)) for made in (*images, *tensors))]


@pytest.fixture(params=["RGB", "L", "CMYK"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    file = tmp_path / "photo.jpg"
    file.write_bytes(encoded(67, 53, 4, request.param, quality=92))
    return file


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(120, 480, 120))])
@pytest.mark.sampled(2)
def test_calls_in_any_order(path: Path, device: str, first: int) -> None:
    for seed in range(first, first + 120):
        stock = _log_of(path, seed)
        with torch_sink.image_backend("device", device=device):
            assert _log_of(path, seed) == stock, seed
