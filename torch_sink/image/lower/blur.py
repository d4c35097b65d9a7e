"""Gaussian blur and Pillow's box blur -> atoms.

torch convolves in float32: one fused multiply-add a tap, row by row (oneDNN on x86-64). Small kernels are done in just
that way. Large ones are done one axis after the other, which is many times cheaper and rounds differently in one value
of ten thousand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torchvision.transforms import _functional_tensor
from torchvision.transforms.v2.functional import _misc as v2_misc

from torch_sink.image.core.atoms import Kind, Lowering, lowers

# The largest kernel, in taps, that is done as torch does it.
_EXACT_TAPS = 81
# `ConvParams::use_mkldnn` in ATen's `Convolution.cpp`: smaller images of one channel are not convolved by oneDNN.
_SMALL_CHANNEL = 20480


def _blur(family: str, state: Lowering, kernel_size: tuple[int, int], sigma: tuple[float, float]) -> None:
    """BLUR: (width, height, kernel width, kernel height, fused), and the kernel's float32 weights, row by row.
    BLUR_X, BLUR_Y: (width, height, kernel size), and the float32 weights of that axis."""
    across, down = kernel_size
    if across == down == 1:
        return
    size = state.width, state.height
    if across * down <= _EXACT_TAPS:
        padded_pixels = (size[0] + across - 1) * (size[1] + down - 1)
        fused = is_fused(state.channels, kernel_size, padded_pixels)
        weights = kernel_weights(family, kernel_size, sigma)
        state.add(Kind.BLUR, *size, across, down, int(fused), tables=(weights,))
        return
    state.add(Kind.BLUR_X, *size, across, tables=(_axis_weights(family, across, sigma[0]),))
    state.add(Kind.BLUR_Y, *size, down, tables=(_axis_weights(family, down, sigma[1]),))


def is_fused(channels: int, kernel_size: tuple[int, int], pixels: int) -> bool:
    """True where torch's convolution of `pixels`, padding included, rounds once a tap."""
    return channels == 3 or min(kernel_size) > 3 or pixels > _SMALL_CHANNEL


lowers("v1.gaussian_blur")(functools.partial(_blur, "v1"))
lowers("v2.gaussian_blur")(functools.partial(_blur, "v2"))

_PASSES = 3  # of a box, in Pillow's Gaussian blur
_ONE = 1 << 24


@lowers("pil.box_blur")
def _box_blur(state: Lowering, radii: tuple[float, float], passes: int = 1) -> None:
    """BOX_BLUR: (width, height, whole radius, weight of whole pixels, of the two in part, step across, step down)."""
    for (across, down), radius in zip(((1, 0), (0, 1)), map(np.float32, radii), strict=True):
        whole_radius = int(radius)
        weight = int(np.float32(_ONE) / (radius * np.float32(2) + np.float32(1)))
        part = (_ONE - (2 * whole_radius + 1) * weight) // 2
        for _ in range(passes if radius != 0 else 0):
            state.add(Kind.BOX_BLUR, state.width, state.height, whole_radius, weight, part, across, down)


@lowers("pil.gaussian_blur")
def _pillow_blur(state: Lowering, radii: tuple[float, float]) -> None:
    _box_blur(state, tuple(map(_box_radius, radii)), _PASSES)  # type: ignore[arg-type]


def _box_radius(sigma: float) -> np.float32:
    """The box whose passes come closest to a Gaussian: `_gaussian_blur_radius` of `BoxBlur.c`, in float32."""
    one, three = np.float32(1), np.float32(3)
    variance = np.float32(sigma) * np.float32(sigma) / np.float32(_PASSES)
    length = np.float32(np.sqrt(12.0 * np.float64(variance) + 1.0))
    whole = np.float32(np.floor((np.float64(length) - 1.0) / 2.0))
    part = (np.float32(2) * whole + one) * (whole * (whole + one) - three * variance)
    return whole + part / (np.float32(6) * (variance - (whole + one) * (whole + one)))


_AXIS: dict[str, Callable[..., torch.Tensor]] = {
    "v1": _functional_tensor._get_gaussian_kernel1d,
    "v2": v2_misc._get_gaussian_kernel1d,
}
_BOTH: dict[str, Callable[..., torch.Tensor]] = {
    "v1": _functional_tensor._get_gaussian_kernel2d,
    "v2": v2_misc._get_gaussian_kernel2d,
}


@functools.lru_cache(maxsize=1024)
def _axis_weights(family: str, size: int, sigma: float) -> np.ndarray:
    return _as_table(_AXIS[family](size, sigma, torch.float32, torch.device("cpu")))


@functools.lru_cache(maxsize=1024)
def kernel_weights(family: str, kernel_size: tuple[int, int], sigma: tuple[float, float]) -> np.ndarray:
    return _as_table(_BOTH[family](kernel_size, sigma, torch.float32, torch.device("cpu")))


def _as_table(weights: torch.Tensor) -> np.ndarray:
    return weights.contiguous().view(torch.int32).numpy()
