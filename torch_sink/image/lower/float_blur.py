"""Gaussian blur and sharpness of float32 images -> atoms: every tap as torch does it, however large the kernel."""

from __future__ import annotations

import functools

from torch_sink.image.core.atoms import FloatKind
from torch_sink.image.lower.blur import is_fused, kernel_weights
from torch_sink.image.lower.floats import FloatLowering, bits, lowers_float


def _blur(family: str, state: FloatLowering, kernel_size: tuple[int, int], sigma: tuple[float, float]) -> None:
    """BLUR: (width, height, kernel width, kernel height, fused), and the kernel's float32 weights, row by row."""
    across, down = kernel_size
    if across == down == 1:
        return
    padded_pixels = (state.width + across - 1) * (state.height + down - 1)
    fused = is_fused(state.channels, kernel_size, padded_pixels)
    weights = kernel_weights(family, kernel_size, sigma)
    state.add(FloatKind.BLUR, state.width, state.height, across, down, int(fused), tables=(weights,))


lowers_float("v1.gaussian_blur")(functools.partial(_blur, "v1"))
lowers_float("v2.gaussian_blur")(functools.partial(_blur, "v2"))


def _sharpness(state: FloatLowering, factor: float, is_v2: int) -> None:
    """SHARPNESS: (width, height, fused, is v2, factor, 1 - factor)."""
    fused = is_fused(state.channels, (3, 3), state.width * state.height)
    values = state.width, state.height, int(fused), is_v2, *bits(factor, 1.0 - factor)
    state.add(FloatKind.SHARPNESS, *values)


lowers_float("v1.adjust_sharpness")(functools.partial(_sharpness, is_v2=0))
lowers_float("v2.adjust_sharpness")(functools.partial(_sharpness, is_v2=1))
