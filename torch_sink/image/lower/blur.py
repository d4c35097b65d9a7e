"""Gaussian blur and Pillow's box blur -> atoms.

torch convolves in float32 with a kernel of two axes; here one axis follows the other, which is many times cheaper and
rounds differently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torchvision.transforms import _functional_tensor
from torchvision.transforms.v2.functional import _misc as v2_misc

from torch_sink.image.core.atoms import Kind, Lowering, lowers

_AXIS: dict[str, Callable[..., torch.Tensor]] = {
    "v1": _functional_tensor._get_gaussian_kernel1d,
    "v2": v2_misc._get_gaussian_kernel1d,
}


def _blur(family: str, state: Lowering, kernel_size: tuple[int, int], sigma: tuple[float, float]) -> None:
    """FILTER_X, FILTER_Y: (last position, positions between weights, taps, -, -, first output position, first input
    position that exists, mirrored at the border), and a table of weights, the same ones for each position."""
    if kernel_size == (1, 1):
        return
    for kind, taps, last, width in (
        (Kind.FILTER_X, kernel_size[0], state.width - 1, sigma[0]),
        (Kind.FILTER_Y, kernel_size[1], state.height - 1, sigma[1]),
    ):
        weights = _weights(family, taps, width)
        state.add(kind, last, 1, taps, 0, 0, 0, 0, 1, tables=(weights, weights))


@functools.lru_cache(maxsize=1024)
def _weights(family: str, size: int, sigma: float) -> np.ndarray:
    return _AXIS[family](size, sigma, torch.float32, torch.device("cpu")).contiguous().view(torch.int32).numpy()


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
