"""Gaussian blur -> atoms.

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

from torch_sink.image.plan.atoms import Kind, Lowering, lowers

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
