"""The calls that the parity table compares: every operation of torchvision, with random arguments."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from PIL import ImageFilter
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import functional as F1
from torchvision.transforms.v2 import functional as F2

REFERENCES = ("Pillow", "v1 uint8", "v1 float32", "v2 uint8", "v2 float32")
_PADDINGS = ("constant", "edge", "reflect", "symmetric")
_NEAREST, _BILINEAR, _BICUBIC = InterpolationMode.NEAREST, InterpolationMode.BILINEAR, InterpolationMode.BICUBIC

Run = Callable[[Any], Any]


class Call(NamedTuple):
    """One operation with its arguments.

    Attributes:
        operation: its name, and after a comma what is special about the arguments.
        run: takes an image of the reference's kind and returns the result.
    """

    operation: str
    run: Run


def converted(image: Any, reference: str) -> Any:
    """A Pillow image as a reference takes it: itself, or the tensor of its family and dtype."""
    if reference == "Pillow":
        return image
    family, dtype = reference.split()
    if family == "v1":
        return F1.pil_to_tensor(image) if dtype == "uint8" else F1.to_tensor(image)
    tensor = F2.to_image(image)
    return tensor if dtype == "uint8" else F2.to_dtype(tensor, torch.float32, scale=True)


class _Arguments:
    """Random arguments for images of one size and kind."""

    def __init__(self, chance: random.Random, reference: str, height: int, width: int, channels: int) -> None:
        self.chance, self.height, self.width, self.channels = chance, height, width, channels
        self.is_pillow = reference == "Pillow"
        self.scale = 1 / 255 if reference.endswith("float32") else 1
        self.transforms: Any = v2 if reference.startswith("v2") else v1
        self.functional: Any = self.transforms.functional
        self.smaller = [max(height * 2 // 3, 1), max(width * 3 // 5, 1)]
        self.other = [height * 2 // 3 + 3, width * 3 // 4 + 5]
        self.padding = [min(2, width - 1), min(3, height - 1), min(1, width - 1), min(4, height - 1)]

    def factor(self) -> float:
        return self.chance.uniform(0.0, 2.5)

    def fill(self) -> list[float]:
        values = [self.chance.randrange(256) * self.scale for _ in range(self.channels)]
        return [int(value) for value in values] if self.scale == 1 else values

    def corner(self) -> tuple[int, int]:
        """(top, left) of a box of the smaller size."""
        top, left = self.height - self.smaller[0], self.width - self.smaller[1]
        return self.chance.randint(0, top), self.chance.randint(0, left)

    def corner_outside(self) -> tuple[int, int]:
        """(top, left) of a box of the smaller size that ends to the right of the image, and mostly begins above it."""
        left = self.width - self.smaller[1]
        return -self.chance.randint(0, self.smaller[0] - 1), left + self.chance.randint(1, self.smaller[1])

    def corners(self) -> tuple[list[list[int]], list[list[int]]]:
        """Corners before and after a perspective transform, [x, y] each."""
        right, bottom = self.width - 1, self.height - 1
        start = [[0, 0], [right, 0], [right, bottom], [0, bottom]]
        moved = [[x + self._shift(x, self.width), y + self._shift(y, self.height)] for x, y in start]
        return start, moved

    def _shift(self, at: int, side: int) -> int:
        inwards = self.chance.randint(0, side // 4)
        return inwards if at == 0 else -inwards

    def displacement(self) -> torch.Tensor:
        """[1, H, W, 2] in fractions of half the image."""
        generator = torch.Generator().manual_seed(self.chance.randrange(1 << 30))
        return torch.rand((1, self.height, self.width, 2), generator=generator) * 0.2 - 0.1

    def noise(self, height: int, width: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.chance.randrange(1 << 30))
        values = torch.randint(0, 256, (self.channels, height, width), generator=generator)
        return values.to(torch.uint8) if self.scale == 1 else values / 255


def random_calls(chance: random.Random, reference: str, height: int, width: int, channels: int) -> Iterator[Call]:
    """Every operation once, for images [channels, height, width] of a reference; some raise in stock code."""
    a = _Arguments(chance, reference, height, width, channels)
    for group in (_moves, _resizes, _warps, _colors, _erasures, _conversions, _mixes):
        for operation, function, args, kwargs in group(a):
            yield Call(operation, _bound(function, args, kwargs))
    flip = a.functional.hflip
    yield Call("five_crop", lambda image: a.functional.five_crop(image, a.smaller)[3])
    yield Call("ten_crop", lambda image: a.functional.ten_crop(flip(image), a.smaller)[6])
    if a.is_pillow:
        table = [chance.randrange(256) for _ in range(256 * channels)]
        yield Call("point, a table", lambda image: flip(image).point(table))
        for kind in (ImageFilter.GaussianBlur, ImageFilter.BoxBlur):
            blur = kind((chance.uniform(0.1, 3), chance.uniform(0.1, 3)))
            yield Call(f"filter, {kind.__name__}", functools.partial(_filtered, blur))
        return
    yield Call("to_pil_image", a.functional.to_pil_image)
    if a.functional is F1:
        yield Call("contiguous", lambda image: image.contiguous())


def _filtered(blur: Any, image: Any) -> Any:
    return F1.hflip(image).filter(blur)


_Row = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    return lambda image: function(image, *args, **kwargs)


def _moves(a: _Arguments) -> Iterator[_Row]:
    F = a.functional
    yield "hflip", F.hflip, (), {}
    yield "vflip", F.vflip, (), {}
    yield "crop", F.crop, (*a.corner(), *a.smaller), {}
    yield "crop, partly outside", F.crop, (*a.corner_outside(), *a.smaller), {}
    yield "center_crop", F.center_crop, (a.smaller,), {}
    yield "center_crop, larger", F.center_crop, ([a.height + 3, a.width + 4],), {}
    for mode in _PADDINGS:
        fill = {"fill": a.chance.randrange(256) * a.scale} if mode == "constant" else {}
        yield f"pad, {mode}", F.pad, (a.padding,), {"padding_mode": mode, **fill}
    yield "pad, a color", F.pad, (a.padding,), {"fill": tuple(a.fill()) if a.is_pillow else a.fill()}


def _resizes(a: _Arguments) -> Iterator[_Row]:
    F = a.functional
    modes = list(InterpolationMode) if a.is_pillow else [_NEAREST, InterpolationMode.NEAREST_EXACT, _BILINEAR, _BICUBIC]
    for mode in modes:
        yield f"resize, {mode.name}", F.resize, (a.other, mode), {}
        yield f"resized_crop, {mode.name}", F.resized_crop, (*a.corner(), *a.smaller, a.other, mode), {}
    if not a.is_pillow:
        for mode in (_BILINEAR, _BICUBIC):
            yield f"resize, {mode.name}, antialias=False", F.resize, (a.other, mode), {"antialias": False}
    yield "resize, max_size", F.resize, ([max(min(a.other) - 2, 1)],), {"max_size": max(a.other) + 3}


def _warps(a: _Arguments) -> Iterator[_Row]:
    F = a.functional
    for mode in (_NEAREST, _BILINEAR, _BICUBIC) if a.is_pillow else (_NEAREST, _BILINEAR):
        how = {"interpolation": mode, "fill": a.fill()}
        angle, shift = a.chance.uniform(-180, 180), [a.chance.randint(-3, 3), a.chance.randint(-3, 3)]
        shear = [a.chance.uniform(-20, 20), a.chance.uniform(-20, 20)]
        yield f"rotate, {mode.name}", F.rotate, (angle,), how
        yield f"affine, {mode.name}", F.affine, (angle, shift, a.chance.uniform(0.6, 1.6), shear), how
        yield f"perspective, {mode.name}", F.perspective, a.corners(), how
        yield f"elastic, {mode.name}", F.elastic_transform, (a.displacement(),), how
    yield "rotate, NEAREST, expand=True", F.rotate, (a.chance.uniform(10, 80),), {"expand": True}
    yield "rotate, BILINEAR, a quarter turn", F.rotate, (90.0, _BILINEAR), {"expand": True}


def _colors(a: _Arguments) -> Iterator[_Row]:
    F, largest = a.functional, 255 * a.scale
    for name in ("brightness", "contrast", "saturation", "sharpness"):
        yield f"adjust_{name}", getattr(F, f"adjust_{name}"), (a.factor(),), {}
    yield "adjust_hue", F.adjust_hue, (a.chance.uniform(-0.5, 0.5),), {}
    yield "adjust_gamma", F.adjust_gamma, (a.chance.uniform(0.3, 2.5), a.chance.uniform(0.5, 1.5)), {}
    yield "invert", F.invert, (), {}
    yield "posterize", F.posterize, (a.chance.randint(1, 7),), {}
    yield "solarize", F.solarize, (a.chance.uniform(0.1, 0.9) * largest,), {}
    yield "autocontrast", F.autocontrast, (), {}
    yield "equalize", F.equalize, (), {}
    yield "rgb_to_grayscale, 1 channel", F.rgb_to_grayscale, (1,), {}
    yield "rgb_to_grayscale, 3 channels", F.rgb_to_grayscale, (3,), {}
    yield "gaussian_blur, 3 x 5", F.gaussian_blur, ([3, 5], [0.9, 1.3]), {}
    yield "gaussian_blur, 9 x 9", F.gaussian_blur, ([9, 9], a.chance.uniform(0.5, 3)), {}
    if a.functional is F2 or a.is_pillow:
        order = a.chance.sample(range(a.channels), a.channels)
        yield "permute_channels", F2.permute_channels, (order,), {}
        yield "grayscale_to_rgb", lambda image: F2.grayscale_to_rgb(F2.rgb_to_grayscale(image, 1)), (), {}


def _erasures(a: _Arguments) -> Iterator[_Row]:
    F, (top, left), (height, width) = (F2 if a.is_pillow else a.functional), a.corner(), a.smaller
    color = torch.tensor(a.fill()).to(torch.uint8 if a.scale == 1 else torch.float32).reshape(-1, 1, 1)
    yield "erase", F.erase, (top, left, height, width, color), {}
    yield "erase, random values", F.erase, (top, left, height, width, a.noise(height, width)), {}


def _mixes(a: _Arguments) -> Iterator[_Row]:
    augmix, seed = a.transforms.AugMix(10, fill=a.fill()), a.chance.randrange(1 << 30)
    if a.scale == 1 or a.transforms is v2:  # on floats v1 refuses some of what it draws
        yield "augmix", _seeded, (augmix, seed), {}


def _seeded(image: Any, transform: Run, seed: int) -> Any:
    """What a transform gives that draws from a generator with that seed; the generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transform(image)


def _conversions(a: _Arguments) -> Iterator[_Row]:
    if a.is_pillow:
        yield "to_grayscale, 1 channel", F1.to_grayscale, (1,), {}
        yield "to_grayscale, 3 channels", F1.to_grayscale, (3,), {}
        # An image that exists is converted at once: these are recorded behind a recorded call.
        for mode in ("L", "RGB"):
            yield f"convert, {mode}", _convert, (mode,), {}
        yield "to_tensor", lambda image: F1.to_tensor(F1.hflip(image)), (), {}
        yield "pil_to_tensor", lambda image: F1.pil_to_tensor(F1.hflip(image)), (), {}
        yield "to_image", lambda image: F2.to_image(F2.hflip(image)), (), {}
        return
    for dtype in (torch.float32, torch.float16, torch.uint8, torch.float64, *([torch.int32] if a.scale == 1 else [])):
        name = str(dtype).removeprefix("torch.")
        if a.functional is F1:
            yield f"convert_image_dtype, {name}", F1.convert_image_dtype, (dtype,), {}
        else:
            yield f"to_dtype, {name}", F2.to_dtype, (dtype,), {"scale": True}
            yield f"to_dtype, {name}, unscaled", F2.to_dtype, (dtype,), {}
    if a.scale != 1:
        yield "normalize", a.functional.normalize, ([0.4] * a.channels, [0.25] * a.channels), {}


def _convert(image: Any, mode: str) -> Any:
    return F1.hflip(image).convert("L" if mode == "RGB" else "RGB").convert(mode)
