"""The pipelines and images that both ways of execution are checked with: the CPU path, and the kernels."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import functional as F1
from torchvision.transforms.v2 import functional as F2

from image.check import Opener, Pipeline
from torch_sink.cli.photos import make_photo
from torch_sink.image.operations.resize import integer_resize_fits

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = (13, 19)  # height and width: neither square nor a multiple of anything
# Without AVX2 torchvision resizes bytes through float32, whose last bits depend on the processor.
RESIZES_BYTES_IN_INTEGERS = integer_resize_fits(InterpolationMode.BILINEAR)
EXACT_ON_BYTES = InterpolationMode.BILINEAR if RESIZES_BYTES_IN_INTEGERS else InterpolationMode.NEAREST


@functools.cache
def encoded(width: int, height: int, seed: int = 0, mode: str = "RGB", kind: str = "JPEG", **save: Any) -> bytes:
    """The file of a generated photograph."""
    buffer = io.BytesIO()
    photo = make_photo(width, height, seed)
    image = photo if mode == "RGB" else photo.convert(mode if mode != "I;16" else "L")
    if mode == "RGBA":
        image.putalpha(photo.convert("L"))
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    image.save(buffer, kind, **save)
    return buffer.getvalue()


def write_classes(folder: Path, count: int) -> Path:
    """An ImageFolder of small files in two classes."""
    for number in range(count):
        (folder / f"class_{number % 2}").mkdir(exist_ok=True)
        (folder / f"class_{number % 2}" / f"{number}.jpg").write_bytes(encoded(40 + number, 30, number))
    return folder


def opener(data: bytes, mode: str | None = "RGB") -> Opener:
    """Opens a file as user code does: `Image.open(...).convert(mode)`."""

    def open_image() -> Image.Image:
        image = Image.open(io.BytesIO(data))
        return image if mode is None else image.convert(mode)

    return open_image


def array_opener(width: int, height: int, seed: int = 0) -> Opener:
    """Makes an image from an array, as CIFAR does."""
    pixels = np.asarray(make_photo(width, height, seed))
    return lambda: Image.fromarray(pixels)


def rgb_images() -> list[Opener]:
    """Small RGB images: odd sizes, one row, one column, three ways of chroma, one that never was a file."""
    return [
        opener(encoded(61, 47, 1, subsampling="4:2:0", quality=90)),
        opener(encoded(17, 11, 2, subsampling="4:4:4")),
        opener(encoded(1, 23, 3)),
        opener(encoded(29, 1, 4)),
        opener(encoded(40, 56, 5, progressive=True)),
        array_opener(32, 32, 6),
    ]


def some_rgb_images(name: str, count: int) -> list[Opener]:
    """`count` of `rgb_images`, other ones for other names: an interpreted kernel pays for each image."""
    images = rgb_images()
    first = sum(map(ord, name)) % len(images)
    return [*images[first:], *images[:first]][:count]


def gray_images() -> list[Opener]:
    """Images of mode L."""
    return [opener(encoded(45, 31, 7, "L"), None), opener(encoded(17, 11, 8), "L"), opener(encoded(1, 9, 9, "L"), None)]


def images_of_other_modes() -> list[Opener]:
    """Files whose own mode is not RGB, converted as torchvision's loader does."""
    return [
        opener(encoded(37, 29, 1, "RGBA", "PNG")),
        opener(encoded(37, 29, 2, "P", "PNG")),
        opener(encoded(37, 29, 3, "1", "PNG")),
        opener(encoded(37, 29, 4, "I;16", "PNG")),
        opener(encoded(37, 29, 5, "CMYK", "JPEG")),
        opener(encoded(37, 29, 6, "L", "JPEG")),
    ]


def _v1(*transforms: Any, normalize: bool = True) -> Pipeline:
    tail = [v1.ToTensor(), v1.Normalize(MEAN, STD)] if normalize else [v1.PILToTensor()]
    return v1.Compose([*transforms, *tail])


def _v2(*transforms: Any) -> Pipeline:
    return v2.Compose([*transforms, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def _filters(make: Callable[[InterpolationMode], Pipeline]) -> dict[str, Callable[[], Pipeline]]:
    kinds = [mode for mode in InterpolationMode if mode is not InterpolationMode.NEAREST_EXACT]
    return {mode.value: functools.partial(make, mode) for mode in kinds}


CORE: dict[str, Callable[[], Pipeline]] = {
    # v1
    "v1 imagenet train": lambda: _v1(v1.RandomResizedCrop(24), v1.RandomHorizontalFlip()),
    "v1 imagenet eval": lambda: _v1(v1.Resize(26), v1.CenterCrop(24)),
    "v1 both flips": lambda: _v1(v1.RandomResizedCrop(SIZE), v1.RandomVerticalFlip(0.7), v1.RandomHorizontalFlip(0.3)),
    "v1 random crop, padded": lambda: _v1(v1.RandomCrop(SIZE, padding=(3, 1, 2, 5), pad_if_needed=True, fill=(9, 8, 7))),
    "v1 random crop, mirrored": lambda: _v1(v1.Resize((20, 20)), v1.RandomCrop(20, padding=4, padding_mode="reflect")),
    "v1 pad edge": lambda: _v1(v1.Resize(SIZE), v1.Pad((2, 3), padding_mode="edge")),
    "v1 pad symmetric": lambda: _v1(v1.Resize(SIZE), v1.Pad(4, padding_mode="symmetric"), normalize=False),
    "v1 pad constant": lambda: _v1(v1.Resize(SIZE), v1.Pad((0, 1, 2, 3), fill=200), normalize=False),
    "v1 pad fills beyond a byte": lambda: _v1(v1.Resize(SIZE), v1.Pad(2, fill=(300, -7, 255)), normalize=False),
    "v1 pad before resize": lambda: _v1(v1.Pad((3, 4), padding_mode="edge"), v1.Resize(SIZE)),
    "v1 filled pad before resize": lambda: _v1(v1.Pad(3, fill=90), v1.RandomHorizontalFlip(), v1.Resize(SIZE)),
    "v1 center crop beyond the image": lambda: _v1(v1.CenterCrop((50, 64)), v1.RandomHorizontalFlip()),
    "v1 crop of a crop": lambda: _v1(v1.Resize((30, 31)), v1.CenterCrop(25), v1.RandomCrop(SIZE)),
    "v1 two resizes": lambda: _v1(v1.Resize((40, 21)), v1.RandomHorizontalFlip(), v1.Resize(SIZE), v1.Resize((20, 9))),
    "v1 one axis": lambda: v1.Compose([v1.Resize((31, 33)), v1.Resize((31, 17)), v1.Resize((9, 17)), v1.ToTensor()]),
    "v1 rows, then a crop": lambda: _v1(
        v1.Resize((90, 44)), v1.Resize((90, 40)), v1.RandomHorizontalFlip(1.0), v1.Resize((24, 35)), v1.CenterCrop(SIZE)
    ),
    "v1 dtypes": lambda: v1.Compose([v1.Resize(SIZE), v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)]),
    "v1 float16": lambda: v1.Compose([v1.Resize(SIZE), v1.PILToTensor(), v1.ConvertImageDtype(torch.float16)]),
    "v1 bfloat16, normalized": lambda: v1.Compose(
        [v1.Resize(SIZE), v1.PILToTensor(), v1.ConvertImageDtype(torch.bfloat16), v1.Normalize(MEAN, STD)]
    ),
    "v1 tensors": lambda: v1.Compose(
        [v1.Resize(SIZE), v1.PILToTensor(), v1.RandomHorizontalFlip(), v1.RandomVerticalFlip(), v1.Pad(1, fill=5),
         v1.RandomCrop(12), v1.ConvertImageDtype(torch.float32), v1.CenterCrop(9), v1.Normalize((0,), (0.3,))]
    ),
    "v1 as it is": lambda: v1.Compose([v1.CenterCrop(16), v1.ToTensor()]),
    "v1 one statistic for all": lambda: v1.Compose([v1.Resize(SIZE), v1.ToTensor(), v1.Normalize((0.5,), (0.25,))]),
    # v2
    "v2 imagenet train": lambda: _v2(v2.RandomResizedCrop(24), v2.RandomHorizontalFlip()),
    "v2 imagenet eval": lambda: _v2(v2.Resize(26), v2.CenterCrop(24)),
    "v2 pads": lambda: _v2(v2.Resize(SIZE), v2.Pad((1, 2), fill=77), v2.RandomCrop(15, padding=2), v2.RandomVerticalFlip()),
    "v2 mirrored pads": lambda: _v2(v2.Resize(SIZE), v2.Pad(3, padding_mode="reflect"), v2.Pad(2, padding_mode="edge")),
    "v2 tensor first": lambda: v2.Compose(
        [v2.ToImage(), v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True),
         v2.Normalize(MEAN, STD)]
    ),
    "v2 tensor first, bicubic": lambda: v2.Compose(
        [v2.ToImage(), v2.Resize((16, 22), InterpolationMode.BICUBIC), v2.CenterCrop(14), v2.Pad(2, fill=3),
         v2.RandomVerticalFlip(), v2.ToDtype(torch.bfloat16, scale=True)]
    ),
    "v2 unscaled, pure": lambda: v2.Compose(
        [v2.Resize(SIZE), v2.ToImage(), v2.ToDtype(torch.float32), v2.Normalize((100.0,) * 3, (50.0, 60.0, 70.0)),
         v2.ToPureTensor()]
    ),
    "v2 uint8": lambda: v2.Compose([v2.RandomResizedCrop(SIZE), v2.PILToTensor()]),
    "v2 functionals bound early": lambda: v2.Compose(
        [functools.partial(F2.resize, size=SIZE), v2.ToImage(), functools.partial(F2.crop, top=2, left=3, height=7, width=8),
         F2.horizontal_flip, v2.ToDtype(torch.float16, scale=True)]
    ),
}  # fmt: skip

RESIZES = {
    **{f"smaller, {name}": make for name, make in _filters(lambda mode: _v1(v1.Resize(SIZE, mode))).items()},
    **{f"larger, {name}": make for name, make in _filters(lambda mode: _v1(v1.Resize((70, 66), mode))).items()},
    **{f"longer side, {name}": make for name, make in _filters(
        lambda mode: v1.Compose([v1.Resize(12, mode, max_size=40), v1.CenterCrop(11), v1.ToTensor()])).items()},
    "nearest exact": lambda: _v1(v1.Resize(SIZE, InterpolationMode.NEAREST_EXACT)),
}  # fmt: skip

COLOR: dict[str, Callable[[], Pipeline]] = {
    "brightness": lambda: _v1(v1.Resize(SIZE), v1.ColorJitter(brightness=(0.3, 2.5)), normalize=False),
    "contrast": lambda: _v1(v1.Resize(SIZE), v1.ColorJitter(contrast=(0.0, 3.0)), normalize=False),
    "saturation": lambda: _v1(v1.Resize(SIZE), v1.ColorJitter(saturation=(0.0, 3.0)), normalize=False),
    "hue": lambda: _v1(v1.Resize(SIZE), v1.ColorJitter(hue=0.5), normalize=False),
    "jitter": lambda: _v1(v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ColorJitter(0.4, 0.4, 0.4, 0.1)),
    "gray, three channels": lambda: _v1(v1.Resize(SIZE), v1.RandomGrayscale(0.5), normalize=False),
    "gray, one channel": lambda: v1.Compose([v1.Grayscale(), v1.Resize(SIZE), v1.ToTensor()]),
    "invert, posterize": lambda: _v1(v1.RandomInvert(), v1.RandomPosterize(3), v1.Resize(SIZE), normalize=False),
    "solarize": lambda: _v1(v1.Resize(SIZE), v1.RandomSolarize(100.5, 1.0), normalize=False),
    "sharpness": lambda: _v1(v1.Resize(SIZE), v1.RandomAdjustSharpness(2.3, 1.0), normalize=False),
    "sharpness as it is": lambda: _v1(v1.RandomAdjustSharpness(0.2, 1.0), v1.Resize(SIZE), normalize=False),
    "autocontrast": lambda: _v1(v1.Resize(SIZE), v1.RandomAutocontrast(1.0), v1.Pad(1), normalize=False),
    "equalize": lambda: _v1(v1.RandomEqualize(1.0), v1.Resize(SIZE), v1.RandomEqualize(1.0), normalize=False),
    "rotate": lambda: _v1(v1.RandomRotation(80, fill=(10, 20, 30)), v1.Resize(SIZE), v1.RandomRotation(20)),
    "rotate, filled by one value": lambda: v1.Compose(
        [v1.Resize(SIZE), v1.Grayscale(), v1.RandomRotation(80, fill=(9,)), v1.ToTensor()]
    ),
    "affine": lambda: _v1(v1.Resize(SIZE), v1.RandomAffine(40, (0.2, 0.3), (0.6, 1.5), 20), normalize=False),
    "shifted": lambda: _v1(v1.Resize(SIZE), v1.RandomAffine(0, (0.4, 0.4), fill=66), v1.RandomAffine(0, scale=(2, 2))),
    "rand augment": lambda: _v1(v1.Resize((24, 30)), v1.RandAugment(3), normalize=False),
    "auto augment": lambda: _v1(v1.Resize((24, 30)), v1.AutoAugment(), normalize=False),
    "trivial augment": lambda: _v1(v1.Resize((24, 30)), v1.TrivialAugmentWide(), normalize=False),
    "v2 jitter": lambda: _v2(v2.RandomResizedCrop(24), v2.ColorJitter(0.4, 0.4, 0.4, 0.1), v2.RandomGrayscale(0.3)),
    "v2 rand augment": lambda: _v2(v2.Resize((24, 30)), v2.RandAugment(), v2.TrivialAugmentWide()),
    "v2 invert, solarize": lambda: _v2(v2.Resize(SIZE), v2.RandomInvert(), v2.RandomSolarize(90), v2.RandomPosterize(2)),
    "rotate, bilinear": lambda: _v1(
        v1.RandomRotation(80, InterpolationMode.BILINEAR, fill=(10, 20, 30)), v1.Resize(SIZE), normalize=False
    ),
    "affine, bicubic": lambda: _v1(
        v1.Resize(SIZE), v1.RandomAffine(40, (0.2, 0.3), (0.6, 1.5), 20, InterpolationMode.BICUBIC), normalize=False
    ),
    "perspective": lambda: _v1(v1.Resize(SIZE), v1.RandomPerspective(0.6, 1.0, fill=8), v1.RandomHorizontalFlip()),
    "perspective, nearest and bicubic": lambda: _v1(
        v1.Resize((20, 24)),
        v1.RandomPerspective(0.4, 1.0, InterpolationMode.NEAREST),
        v1.RandomPerspective(0.8, 1.0, InterpolationMode.BICUBIC),
        normalize=False,
    ),
    "a table for each channel": lambda: _v1(
        v1.Resize(SIZE), lambda image: image.point([value * 3 % 256 for value in range(768)]), v1.RandomInvert(1.0),
        lambda image: ImageOps.solarize(image, 100), normalize=False,
    ),
    "gamma": lambda: _v1(
        functools.partial(F1.adjust_gamma, gamma=0.4, gain=1.3), v1.Resize(SIZE), normalize=False
    ),
    "erase": lambda: v1.Compose(
        [v1.Resize(SIZE), v1.ToTensor(), v1.RandomErasing(1.0, value=0.5), v1.RandomHorizontalFlip(0.5),
         v1.Normalize(MEAN, STD), v1.RandomErasing(1.0, value=(0.1, 0.2, 0.3)), v1.RandomErasing(0.5)]
    ),
    "v2 erase": lambda: v2.Compose(
        [v2.ToImage(), v2.Resize(SIZE), v2.RandomErasing(1.0, value=7), v2.Pad(1),
         v2.ToDtype(torch.float32, scale=True),
         v2.RandomErasing(1.0, value=0.25), v2.Normalize(MEAN, STD), v2.RandomVerticalFlip(0.5)]
    ),
    "v1 color on uint8": lambda: v1.Compose(
        [v1.Resize(SIZE), v1.PILToTensor(), v1.ColorJitter(brightness=(0.3, 2.5)), v1.RandomInvert(),
         v1.RandomEqualize(),
         v1.RandomPosterize(3), v1.RandomSolarize(90.5), v1.ConvertImageDtype(torch.float32)]
    ),
    "v2 color on uint8": lambda: v2.Compose(
        [v2.ToImage(), v2.Resize(SIZE, EXACT_ON_BYTES), v2.ColorJitter(brightness=(0.3, 2.5)), v2.RandomInvert(), v2.RandomEqualize(),
         v2.RandomPosterize(3), v2.RandomSolarize(90.5), v2.ToDtype(torch.float32, scale=True)]
    ),
}  # fmt: skip

GRAY: dict[str, Callable[[], Pipeline]] = {
    "train": lambda: v1.Compose(
        [v1.RandomResizedCrop(20), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize((0.5,), (0.25,))]
    ),
    "pads": lambda: v1.Compose([v1.Resize(SIZE), v1.Pad(2, fill=33), v1.Pad(1, padding_mode="edge"), v1.PILToTensor()]),
    "to three channels": lambda: v1.Compose([v1.Resize(SIZE), v1.Grayscale(3), v1.ToTensor()]),
    "color": lambda: v1.Compose(
        [v1.Resize(SIZE), v1.ColorJitter(0.5, 0.5), v1.RandomEqualize(1.0), v1.RandomAutocontrast(1.0),
         v1.RandomAdjustSharpness(3, 1.0), v1.RandomInvert(1.0), v1.ToTensor()]
    ),
    "rotate": lambda: v1.Compose([v1.Resize(SIZE), v1.RandomRotation(90, fill=(7,)), v1.ToTensor()]),
    "v2": lambda: v2.Compose([v2.Resize(SIZE), v2.ToImage(), v2.RandomCrop(12), v2.ToDtype(torch.float32, scale=True)]),
}  # fmt: skip
