"""The `info` of a handle: that of the file, and what its user writes to it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageFilter
from torchvision.transforms import functional as F

import torch_sink
from image.cases import encoded

pytestmark = pytest.mark.halved

FUNCTIONALS: dict[str, Callable[[Any], Any]] = {
    "hflip": F.hflip,
    "crop": lambda image: F.crop(image, 1, 1, 5, 5),
    "resize": lambda image: F.resize(image, [5, 6]),
    "pad": lambda image: F.pad(image, [2, 2]),
    "rotate": lambda image: F.rotate(image, 30),
    "affine": lambda image: F.affine(image, 10, [1, 1], 1.1, [3.0]),
    "adjust_brightness": lambda image: F.adjust_brightness(image, 0.5),
    "adjust_contrast": lambda image: F.adjust_contrast(image, 0.5),
    "adjust_saturation": lambda image: F.adjust_saturation(image, 0.5),
    "adjust_hue": lambda image: F.adjust_hue(image, 0.2),
    "adjust_gamma": lambda image: F.adjust_gamma(image, 2),
    "adjust_sharpness": lambda image: F.adjust_sharpness(image, 2),
    "one gray channel": lambda image: F.to_grayscale(image, 1),
    "three gray channels": lambda image: F.to_grayscale(image, 3),
    "invert": F.invert,
    "posterize": lambda image: F.posterize(image, 3),
    "solarize": lambda image: F.solarize(image, 99),
    "autocontrast": F.autocontrast,
    "equalize": F.equalize,
    "gaussian_blur": lambda image: F.gaussian_blur(image, 3),
    "filter": lambda image: image.filter(ImageFilter.GaussianBlur(2)),
    "pickle": lambda image: pickle.loads(pickle.dumps(image)),
    "deepcopy": copy.deepcopy,
    "copy": lambda image: image.copy(),
    "convert": lambda image: image.convert("L"),
}


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", FUNCTIONALS)
@pytest.mark.parametrize("converted", [True, False])
@pytest.mark.sampled(50)
def test_what_a_user_writes_to_info_stays(tmp_path: Path, mode: str, name: str, converted: bool) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(encoded(53, 37, 4, mode, quality=92))
    results = []
    for backend, settings in (("PIL", {}), ("device", {"device": "cpu"})):
        with torch_sink.image_backend(backend, **settings), Image.open(path) as file:
            image = file.convert(file.mode) if converted else file
            image.info["written"] = 1
            made = FUNCTIONALS[name](image)
            results.append((made.info, image.info))
    assert results[0] == results[1]
