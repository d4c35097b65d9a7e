"""Blurs and sharpness."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms.v2.functional import _misc as v2_misc

from torch_sink.image.core.arguments import is_number, is_rounded_by_torch
from torch_sink.image.core.lowering import FAMILIES, LoweredImage, by_formula, float_bits
from torch_sink.image.core.ops import EXACT_BYTES, NUMERIC, ROUNDED, Op, Operation, always
from torch_sink.image.core.recording import Recording
from torch_sink.image.operations.functionals import adjusted, functional, stock_of
from torch_sink.triton_kernels.rows import Formula, Kind

# --- torch's Gaussian blur, which torchvision also uses on Pillow images

_AXIS: dict[str, Callable[..., torch.Tensor]] = {
    "v1": F_tensor._get_gaussian_kernel1d,
    "v2": v2_misc._get_gaussian_kernel1d,
}


def _lower_gaussian_blur(
    family: str, lowered: LoweredImage, kernel_size: tuple[int, int], sigma: tuple[float, float]
) -> None:
    """FILTER_X, FILTER_Y: (last position, positions between weights, taps, -, -, first output position, first input
    position that exists, mirrored at the border), and a table of weights, the same ones for each position."""
    if kernel_size == (1, 1):
        return
    for kind, taps, last, width in (
        (Kind.FILTER_X, kernel_size[0], lowered.width - 1, sigma[0]),
        (Kind.FILTER_Y, kernel_size[1], lowered.height - 1, sigma[1]),
    ):
        weights = _weights(family, taps, width)
        lowered.add(kind, last, 1, taps, 0, 0, 0, 0, 1, tables=(weights, weights))


@functools.lru_cache(maxsize=1024)
def _weights(family: str, size: int, sigma: float) -> np.ndarray:
    return _AXIS[family](size, sigma, torch.float32, torch.device("cpu")).contiguous().view(torch.int32).numpy()


def _gaussian_blur(family: str, image: Recording, kernel_size: Any, sigma: Any = None) -> Any:
    """Records torch's blur, unless its kernel reaches further than the image is large, which stock code refuses."""
    _, height, width = image.shape
    if family == "v2" and isinstance(kernel_size, int):
        kernel_size = (kernel_size, kernel_size)
    if image.dtype not in NUMERIC or not _is_pair(kernel_size, _is_size_of_kernel):
        return NotImplemented
    if sigma is None and family == "v2":
        sigma = [size * 0.15 + 0.35 for size in kernel_size]
    if is_number(sigma):
        sigma = (float(sigma), float(sigma))
    elif isinstance(sigma, (list, tuple)) and len(sigma) == 1:
        sigma = (sigma[0], sigma[0])
    reaches_too_far = kernel_size[0] // 2 >= width or kernel_size[1] // 2 >= height
    if reaches_too_far or not _is_pair(sigma, _is_sigma):
        return NotImplemented
    return image.record(Op(f"{family}.gaussian_blur", (tuple(kernel_size), tuple(sigma))))


_PLANE: dict[str, Callable[..., torch.Tensor]] = {
    "v1": F_tensor._get_gaussian_kernel2d,
    "v2": v2_misc._get_gaussian_kernel2d,
}
_STOCK = stock_of("gaussian_blur")
_SCALE = 2.0**100


def _stock_blur(
    family: str, image: torch.Tensor, kernel_size: tuple[int, int], sigma: tuple[float, float]
) -> torch.Tensor:
    """The blur of stock code. Bytes are multiplied with scaled weights, as denormal ones cost a CPU many times as much.

    The bits are equal: in stock code each product and each sum is a multiple of 2**-149, the smallest denormal number,
    so that numbers below 2**-126 are exact there too, and those above are rounded to 24 bits at either scale.
    """
    if image.dtype != torch.uint8:
        return _STOCK[f"{family}.gaussian_blur"](image, kernel_size, sigma)
    weights = _PLANE[family](kernel_size, sigma, torch.float32, image.device).mul_(_SCALE)
    across, down = (size // 2 for size in kernel_size)
    padded = torch.nn.functional.pad(image.to(torch.float32), [across, across, down, down], mode="reflect")
    channels = image.shape[-3]
    made = torch.nn.functional.conv2d(padded, weights.expand(channels, 1, *weights.shape), groups=channels)
    return made.div_(_SCALE).round_().to(torch.uint8)


def _is_size_of_kernel(size: Any) -> bool:
    return type(size) is int and size % 2 == 1 and size > 0


def _is_sigma(value: Any) -> bool:
    return is_number(value) and 0 < value < math.inf


def _is_pair(values: Any, accepts: Callable[[Any], bool]) -> bool:
    return isinstance(values, (list, tuple)) and len(values) == 2 and all(map(accepts, values))


functional(
    "gaussian_blur",
    _gaussian_blur,
    {f"{family}.gaussian_blur": functools.partial(_lower_gaussian_blur, family) for family in _AXIS},
    stock={f"{family}.gaussian_blur": functools.partial(_stock_blur, family) for family in _AXIS},
    promise=ROUNDED,
)

# --- Pillow's blurs

_LARGEST_BLUR = 1000.0  # pixels
_PASSES = 3  # of a box, in Pillow's Gaussian blur
_ONE = 1 << 24


def _add_boxes(lowered: LoweredImage, radius: np.float32, across: int, down: int, passes: int) -> None:
    """BOX_BLUR: (width, height, whole radius, weight of whole pixels, of the two in part, step across, step down)."""
    whole_radius = int(radius)
    weight = int(np.float32(_ONE) / (radius * np.float32(2) + np.float32(1)))
    part = (_ONE - (2 * whole_radius + 1) * weight) // 2
    for _ in range(passes):
        lowered.add(Kind.BOX_BLUR, lowered.width, lowered.height, whole_radius, weight, part, across, down)


def _lower_blur_of_image(lowered: LoweredImage, sigma: float) -> None:
    radius = _box_radius(sigma)
    for across, down in ((1, 0), (0, 1)):
        _add_boxes(lowered, radius, across, down, _PASSES)


def _lower_box_blur(lowered: LoweredImage, x_radius: float, y_radius: float) -> None:
    for radius, across, down in ((x_radius, 1, 0), (y_radius, 0, 1)):
        if radius:  # Pillow leaves an axis alone whose radius is 0
            _add_boxes(lowered, np.float32(radius), across, down, 1)


def _box_radius(sigma: float) -> np.float32:
    """The box whose passes come closest to a Gaussian: `_gaussian_blur_radius` of `BoxBlur.c`, in float32."""
    one, three = np.float32(1), np.float32(3)
    variance = np.float32(sigma) * np.float32(sigma) / np.float32(_PASSES)
    length = np.float32(np.sqrt(12.0 * np.float64(variance) + 1.0))
    whole = np.float32(np.floor((np.float64(length) - 1.0) / 2.0))
    part = (np.float32(2) * whole + one) * (whole * (whole + one) - three * variance)
    return whole + part / (np.float32(6) * (variance - (whole + one) * (whole + one)))


# --- Pillow's kernels of 3 x 3 and 5 x 5 weights: SHARPEN, SMOOTH and the like

_STOCK_FILTER = ImageFilter.BuiltinFilter.filter
_NUMBERS = (int, float, np.integer, np.floating)
_FAR = 1e30  # 25 weights below this limit, times 255, add up to less than the largest float32


def _lower_kernel(lowered: LoweredImage, kernel: tuple[float, ...], scale: float, offset: float) -> None:
    """CONVOLUTION: (width, height, weights a side), what a sum begins with as the factor, and a table of the weights,
    float32 by their bits."""
    weights = _kernel_weights(kernel, scale)
    begin = float(np.float32(offset) + np.float32(0.5))
    lowered.add(
        Kind.CONVOLUTION, lowered.width, lowered.height, math.isqrt(len(kernel)), factor=begin, tables=(weights,)
    )


@functools.lru_cache(maxsize=1024)
def _kernel_weights(kernel: tuple[float, ...], scale: float) -> np.ndarray:
    return (np.array(kernel, np.float32) / np.float32(scale)).view(np.int32)


def _convolve_image(image: Recording, size: Any, scale: Any, offset: Any, kernel: Any) -> Any:
    """Records a convolution, unless weights are (nearly) infinite or this machine's Pillow rounds sums otherwise."""
    if type(size) is not tuple or not all(type(side) is int for side in size) or size not in ((3, 3), (5, 5)):
        return NotImplemented
    if not isinstance(kernel, (list, tuple, np.ndarray)) or len(kernel) != size[0] * size[1]:
        return NotImplemented
    if not all(isinstance(value, _NUMBERS) and -_FAR < value < _FAR for value in (scale, offset, *kernel)):
        return NotImplemented
    weights, scale, offset = tuple(map(float, kernel)), float(scale), float(offset)
    # The most that it may enlarge a difference: not at all behind torch's float kernels, whose last bits vary.
    most = 1 if is_rounded_by_torch(image) else _FAR
    if abs(scale) < 1 / _FAR or sum(map(abs, weights)) > most * abs(scale):
        return NotImplemented
    if not (_rounds_each_product() or _is_exact(_kernel_weights(weights, scale), offset)):
        return NotImplemented
    if min(image.shape[1:]) < size[0]:
        return image.copied()
    return image.record(Op("pil.kernel", (weights, scale, offset)))


@functools.cache
def _rounds_each_product() -> bool:
    """False where Pillow is compiled to round a product and a sum once: on ARM, or for the newest processors alone."""
    # Three times this, which rounding makes 2 ** 26, differs from it by 2.
    third = 2.0**26 / 3
    weights = (third, -third, 0, 2 * third, 0, -2 * third, 0, 0, 0)
    return Image.new("L", (3, 3), 3).filter(ImageFilter.Kernel((3, 3), weights, 1, 100)).getpixel((1, 1)) == 100


def _is_exact(bits: np.ndarray, offset: float) -> bool:
    """True where no sum is rounded: all are multiples of 1 / 256 below 2 ** 16. `bits`: of the weights."""
    weights, begin = bits.view(np.float32).astype(np.float64), np.float64(np.float32(offset)) + 0.5
    steps = 256 * np.array([*weights, begin])
    return bool((steps % 1 == 0).all() and 255 * np.abs(weights).sum() + abs(begin) < 1 << 16)


def _box_blur(image: Recording, radius: Any) -> Any:
    radii = (radius, radius) if is_number(radius) else radius
    if type(radii) is not tuple or len(radii) != 2:
        return NotImplemented
    if not all(is_number(value) and 0 <= value < _LARGEST_BLUR for value in radii):
        return NotImplemented
    return image.record(Op("pil.box_blur", tuple(map(float, radii)))) if any(radii) else image.copied()


def _filter(image: Recording, filter: Any) -> Any:
    if image.mode == "P":
        return NotImplemented
    if type(filter) is ImageFilter.GaussianBlur:
        radius: Any = filter.radius
        if not is_number(radius) or not 0 <= radius < _LARGEST_BLUR:
            return NotImplemented
        return image.record(Op("pil.gaussian_blur", (float(radius),))) if radius else image.copied()
    if type(filter) is ImageFilter.BoxBlur:
        return _box_blur(image, filter.radius)
    # Pillow's own filters, and classes of them, that run no code of a subclass.
    if isinstance(filter, type):
        is_builtin = issubclass(filter, ImageFilter.BuiltinFilter) and filter.__init__ is object.__init__
    else:
        is_builtin = isinstance(filter, ImageFilter.BuiltinFilter) and not callable(filter)
    method: Any = getattr(filter, "filter", None)
    is_stock = is_builtin and getattr(method, "__func__", method) is _STOCK_FILTER
    arguments = getattr(filter, "filterargs", None) if is_stock else None
    return _convolve_image(image, *arguments) if type(arguments) is tuple and len(arguments) == 4 else NotImplemented


Operation(
    "Pillow's filters",
    stock={
        "pil.gaussian_blur": lambda image, sigma: image.filter(ImageFilter.GaussianBlur(sigma)),
        "pil.box_blur": lambda image, x_radius, y_radius: image.filter(ImageFilter.BoxBlur((x_radius, y_radius))),
        "pil.kernel": lambda image, kernel, scale, offset: image.filter(
            ImageFilter.Kernel((math.isqrt(len(kernel)),) * 2, kernel, scale, offset)
        ),
    },
    record={"Image.filter": _filter},
    lower={
        "pil.gaussian_blur": _lower_blur_of_image,
        "pil.box_blur": _lower_box_blur,
        "pil.kernel": _lower_kernel,
    },
)

# --- sharpness


def _sharpness(family: str, image: Recording, sharpness_factor: Any) -> Any:
    made = adjusted(f"{family}.adjust_sharpness", image, sharpness_factor)
    has_inner_pixels = family == "pil" or min(image.shape[1:]) > 2
    return made if made is NotImplemented or has_inner_pixels else image


def _lower_sharpness(lowered: LoweredImage, factor: float, formula: Formula) -> None:
    """SHARPNESS: (width, height, bits of 1 - factor) and the factor."""
    values = lowered.width, lowered.height, *float_bits(1.0 - factor)
    lowered.add(Kind.SHARPNESS, *values, factor=factor, formula=formula)


functional(
    "adjust_sharpness",
    _sharpness,
    by_formula("adjust_sharpness", _lower_sharpness, FAMILIES),
    promise=EXACT_BYTES,
    clamps=always,
)
