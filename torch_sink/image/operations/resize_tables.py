"""Taps and weights of antialiased resizing, as Pillow and torch compute them.

Pillow: `libImaging/Resample.c`. torch on uint8 tensors: `aten/native/cpu/UpSampleKernelAVXAntialias.h`, whose index
ranges are Pillow's, with weights of 16 bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from torch_sink.image.core.fallback import image_of

Resampling = Image.Resampling
PILLOW_PRECISION_BITS = 32 - 8 - 2

SUPPORT: dict[int, float] = {
    Resampling.BOX: 0.5,
    Resampling.BILINEAR: 1.0,
    Resampling.HAMMING: 1.0,
    Resampling.BICUBIC: 2.0,
    Resampling.LANCZOS: 3.0,
}


# The weights of one axis: int32 [out], the first source index of each output position; int32 [taps, out], the weights,
# scaled by 2 ** precision, zero past the last tap of an output; and the precision, the bits after the binary point: 0
# for weights in float32, by their bits.
ResampleTable = tuple[np.ndarray, np.ndarray, int]


def _bilinear(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    return np.where(x < 1.0, 1.0 - x, 0.0)


def _hamming(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    angle = np.where(x == 0.0, 1.0, x * math.pi)
    wave = np.sin(angle) / angle * (float(np.float32(0.54)) + float(np.float32(0.46)) * np.cos(angle))
    return np.where(x == 0.0, 1.0, np.where(x >= 1.0, 0.0, wave))


def _bicubic(a: float) -> Callable[[np.ndarray], np.ndarray]:
    def weight(x: np.ndarray) -> np.ndarray:
        x = np.abs(x)
        near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
        far = (((x - 5) * x + 8) * x - 4) * a
        return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))

    return weight


def _sinc(x: np.ndarray) -> np.ndarray:
    angle = np.where(x == 0.0, 1.0, x * math.pi)
    return np.where(x == 0.0, 1.0, np.sin(angle) / angle)


_FILTERS = {
    Resampling.BILINEAR: _bilinear,
    Resampling.HAMMING: _hamming,
    Resampling.BICUBIC: _bicubic(-0.5),
    Resampling.LANCZOS: lambda x: np.where((x >= -3.0) & (x < 3.0), _sinc(x) * _sinc(x / 3), 0.0),
}


@functools.lru_cache(maxsize=1)
def pillow_chooses_its_order() -> bool:
    """True for a Pillow that shrinks rows first when that is cheaper (13.0 on); older ones begin with columns.

    The image between the two passes is rounded to 8 bits, so the order shows in the pixels: ask Pillow itself.
    """
    noise = np.arange(12 * 16, dtype=np.uint32).reshape(16, 12)
    image = image_of((noise * 2654435761 >> 13).astype(np.uint8))
    size, bicubic = (16, 5), Resampling.BICUBIC
    rows_first = image.resize((12, 5), bicubic).resize(size, bicubic)
    columns_first = image.resize((16, 16), bicubic).resize(size, bicubic)
    whole = image.resize(size, bicubic).tobytes()
    if whole not in (rows_first.tobytes(), columns_first.tobytes()):
        raise RuntimeError("this Pillow resizes in a way that torch_sink does not know; use another release of Pillow")
    return whole != columns_first.tobytes()


def _normalized(in_size: int, out_size: int, resample: int) -> tuple[np.ndarray, np.ndarray]:
    scale = in_size / out_size
    filter_scale = max(scale, 1.0)
    support = SUPPORT[Resampling(resample)] * filter_scale
    center = (np.arange(out_size) + 0.5) * scale
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    count = np.minimum((center + support + 0.5).astype(np.int64), in_size) - first
    taps = np.arange(int(count.max()))
    position = taps[None, :] + first[:, None] - center[:, None] + 0.5
    weights = _FILTERS[Resampling(resample)](position * (1.0 / filter_scale))
    weights[taps[None, :] >= count[:, None]] = 0.0
    # The sum runs from the first tap to the last, as in C: another order rounds differently.
    total = np.add.accumulate(weights, axis=1)[:, -1:]
    return first.astype(np.int32), np.divide(weights, total, out=weights, where=total != 0.0)


@functools.lru_cache(maxsize=1024)
def pillow_table(in_size: int, out_size: int, resample: int) -> ResampleTable:
    """Weights of `Image.resize` for images of 8 bits."""
    first, weights = _normalized(in_size, out_size, resample)
    scaled = weights * (1 << PILLOW_PRECISION_BITS)
    return _rounded(first, scaled, PILLOW_PRECISION_BITS)


@functools.lru_cache(maxsize=1024)
def tensor_table(in_size: int, out_size: int, resample: int) -> ResampleTable:
    """Weights of `interpolate(antialias=True)` for uint8 tensors on a CPU with AVX2."""
    return _in_16_bits(*_normalized(in_size, out_size, resample))


@functools.lru_cache(maxsize=1024)
def tensor_table_without_antialias(in_size: int, out_size: int, resample: int) -> ResampleTable:
    """Weights of `interpolate(antialias=False)` for uint8 tensors on a CPU with AVX2: two taps, or four if bicubic."""
    is_cubic = resample == Resampling.BICUBIC
    taps, weight = (4, _bicubic(-0.75)) if is_cubic else (2, _bilinear)
    position = in_size / out_size * (np.arange(out_size) + 0.5) - 0.5
    if not is_cubic:
        position = np.maximum(position, 0.0)
    nearest = np.minimum(np.floor(position).astype(np.int64), in_size - 1)
    beyond = np.clip(position - nearest, 0.0, 1.0)
    unbounded = nearest - taps // 2 + 1
    first = np.maximum(unbounded, 0)
    weights = np.zeros((out_size, taps))
    for tap in range(taps):
        # Taps beyond the border add to the weight of the pixel there.
        inside = np.clip(unbounded + tap, 0, in_size - 1) - first
        weights[np.arange(out_size), inside] += weight(tap + 1 - taps / 2 - beyond)
    return _in_16_bits(first.astype(np.int32), weights / weights.sum(axis=1, keepdims=True))


def _in_16_bits(first: np.ndarray, weights: np.ndarray) -> ResampleTable:
    """Weights with as many bits after the point as leave the largest below 2 ** 15."""
    largest, precision = float(weights.max()), 0
    while precision < 22 and int(0.5 + largest * (1 << (precision + 1))) < 1 << 15:
        precision += 1
    scaled = weights * (1 << precision)
    return _rounded(first, scaled, precision)


def _rounded(first: np.ndarray, scaled: np.ndarray, precision: int) -> ResampleTable:
    """The table of weights [out, taps] that are already scaled."""
    whole = (scaled + np.copysign(0.5, scaled)).astype(np.int32)
    return first, np.ascontiguousarray(whole.T), precision


@functools.lru_cache(maxsize=1024)
def float_taps(in_size: int, out_size: int, resample: int) -> ResampleTable:
    """Weights of `interpolate(antialias=False)` for float32 tensors: two taps, or four if bicubic."""
    middle = np.arange(out_size, dtype=np.float32) + np.float32(0.5)
    position = _rounded_once(middle, np.float32(in_size) / np.float32(out_size), -0.5)
    one = np.float32(1)
    if resample == Resampling.BICUBIC:
        before = np.floor(position)
        beyond = np.clip(position - before, np.float32(0), one)
        rest = one - beyond
        weights = [_outer_cubic(beyond + one), _inner_cubic(beyond), _inner_cubic(rest), _outer_cubic(rest + one)]
        first = before.astype(np.int32) - 1
    else:
        position = np.maximum(position, np.float32(0))
        first = np.minimum(position.astype(np.int32), in_size - 1)
        beyond = np.clip(position - first.astype(np.float32), np.float32(0), one)
        weights = [one - beyond, beyond]
    return first, np.stack(weights).view(np.int32), 0


def _inner_cubic(x: np.ndarray) -> np.ndarray:
    """((a + 2) x - (a + 3)) x x + 1 with a = -0.75; torch's code rounds once in the first step."""
    return _rounded_once(1.25, x, -2.25) * x * x + np.float32(1)


def _outer_cubic(x: np.ndarray) -> np.ndarray:
    """((a x - 5 a) x + 8 a) x - 4 a with a = -0.75; torch's code rounds once in the first two steps."""
    return _rounded_once(_rounded_once(-0.75, x, 3.75), x, -6.0) * x + np.float32(3)


def _rounded_once(a: np.ndarray | float, b: np.ndarray, c: float) -> np.ndarray:
    """a * b + c in float32 with one rounding: the product of two float32 is exact in float64."""
    return (np.float64(a) * b.astype(np.float64) + c).astype(np.float32)


@functools.lru_cache(maxsize=1024)
def tensor_nearest_table(in_size: int, out_size: int, mode: str) -> np.ndarray:
    """Source index of each output position, int32 [out], of `interpolate` with mode "nearest" or "nearest-exact"."""
    positions = torch.arange(in_size, dtype=torch.float32, device="cpu").view(1, 1, in_size)
    return torch.nn.functional.interpolate(positions, size=out_size, mode=mode).flatten().to(torch.int32).numpy()


@functools.lru_cache(maxsize=1024)
def nearest_table(start: float, step: float, out_size: int, in_size: int) -> np.ndarray:
    """Source index of each output position, int32 [out]; -1 outside. As `ImagingScaleAffine` adds up positions."""
    steps = np.full(out_size, step)
    steps[0] = start
    position = np.add.accumulate(steps)
    index = np.where(position < 0.0, -1, position).astype(np.int64)
    return np.where(index < in_size, index, -1).astype(np.int32)
