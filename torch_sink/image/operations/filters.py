"""Blurs and sharpness."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from PIL import ImageFilter
from torchvision.transforms import _functional_pil as F_pil
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms.v2 import functional as F_v2

from torch_sink.image.core.arguments import is_factor, is_number, with_numbers
from torch_sink.image.core.ops import EXACT_BYTES, NUMERIC, ROUNDED, Op, Operation, both
from torch_sink.image.operations.examples import Arguments, Example, of_method, sample

# --- torch's Gaussian blur, which torchvision also uses on Pillow images


def _gaussian_blur(family: str, handle: Any, kernel_size: Any, sigma: Any = None) -> Any:
    """Not recorded: a kernel that reaches further than the image is large, which stock code refuses."""
    _, height, width = handle.sink_shape
    if family == "v2" and isinstance(kernel_size, int):
        kernel_size = (kernel_size, kernel_size)
    if handle.sink_dtype not in NUMERIC:
        return NotImplemented
    if not _is_pair(kernel_size, lambda size: type(size) is int and size % 2 == 1):
        return NotImplemented
    if sigma is None and family == "v2":
        sigma = [size * 0.15 + 0.35 for size in kernel_size]
    if is_number(sigma):
        sigma = (float(sigma), float(sigma))
    elif isinstance(sigma, (list, tuple)) and len(sigma) == 1:
        sigma = (sigma[0], sigma[0])
    if not _is_pair(sigma, lambda value: is_number(value) and 0 < value < math.inf):
        return NotImplemented
    if kernel_size[0] // 2 >= width or kernel_size[1] // 2 >= height:
        return NotImplemented
    return handle.record(Op(f"{family}.gaussian_blur", (tuple(kernel_size), tuple(sigma))))


def _is_pair(values: Any, accepts: Callable[[Any], bool]) -> bool:
    return isinstance(values, (list, tuple)) and len(values) == 2 and all(map(accepts, values))


def _blur_examples(a: Arguments) -> Iterator[Example]:
    yield Example("gaussian_blur", ([3, 5], [0.9, 1.3]), label="3 x 5")
    yield Example("gaussian_blur", ([9, 9], a.chance.uniform(0.5, 3)), label="9 x 9")


Operation(
    "Gaussian blur",
    stock={"v1.gaussian_blur": F_tensor.gaussian_blur, "v2.gaussian_blur": F_v2.gaussian_blur_image},
    record=both("gaussian_blur", _gaussian_blur),
    promise=ROUNDED,
    examples=_blur_examples,
    transforms={"GaussianBlur": [sample(3)]},
)

# --- Pillow's blurs

_PILLOW_BLURS = {ImageFilter.GaussianBlur: "pil.gaussian_blur", ImageFilter.BoxBlur: "pil.box_blur"}
_LARGEST_BLUR = 1000.0  # pixels


def _filter(image: Any, filter: Any) -> Any:
    kind = filter if isinstance(filter, type) else type(filter)
    if kind not in _PILLOW_BLURS or image.mode == "P":
        return NotImplemented
    radii = _radii(filter() if isinstance(filter, type) else filter)
    if radii is None:
        return NotImplemented
    return image.record(Op(_PILLOW_BLURS[kind], (radii,))) if any(radii) else image.copy()


def _radii(blur: Any) -> tuple[float, float] | None:
    """The radii of a blur across and down, or None if unsupported."""
    radii = blur.radius if isinstance(blur.radius, (tuple, list)) else (blur.radius, blur.radius)
    fits = len(radii) == 2 and all(isinstance(radius, (int, float)) and 0 <= radius < _LARGEST_BLUR for radius in radii)
    return tuple(map(float, radii)) if fits else None  # type: ignore[return-value]


def _filter_examples(a: Arguments) -> Iterator[Example]:
    radii = a.chance.uniform(0.1, 3), a.chance.uniform(0.1, 3)
    return of_method(a, "filter", {kind.__name__: (kind(radii),) for kind in _PILLOW_BLURS})


Operation(
    "Pillow's blurs",
    stock={
        "pil.gaussian_blur": lambda image, radii: image.filter(ImageFilter.GaussianBlur(radii)),
        "pil.box_blur": lambda image, radii: image.filter(ImageFilter.BoxBlur(radii)),
    },
    record={"Image.filter": _filter},
    examples=_filter_examples,
    keeps_info=lambda op: True,
)

# --- sharpness


@with_numbers
def _sharpness(family: str, handle: Any, sharpness_factor: Any) -> Any:
    if handle.sink_dtype not in NUMERIC or not is_factor(sharpness_factor):
        return NotImplemented
    if min(handle.sink_shape[1:]) <= 2:
        return handle  # which has no inner pixels
    return handle.record(Op(f"{family}.adjust_sharpness", (sharpness_factor,)))


@with_numbers
def _sharpness_of_image(image: Any, sharpness_factor: Any) -> Any:
    if not is_number(sharpness_factor):
        return NotImplemented
    return image.record(Op("pil.adjust_sharpness", (sharpness_factor,)))


Operation(
    "sharpness",
    stock={
        "pil.adjust_sharpness": F_pil.adjust_sharpness,
        "v1.adjust_sharpness": F_tensor.adjust_sharpness,
        "v2.adjust_sharpness": F_v2.adjust_sharpness_image,
    },
    record={**both("adjust_sharpness", _sharpness), "pil.adjust_sharpness": _sharpness_of_image},
    promise=EXACT_BYTES,
    examples=lambda a: iter([Example("adjust_sharpness", (a.factor(),))]),
    transforms={"RandomAdjustSharpness": [sample(2.0, p=1.0)]},
    clamps=True,
    keeps_info=lambda op: True,
)
