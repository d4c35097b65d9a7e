"""Color -> atoms: operations on pixels, operations that need a histogram, sharpness."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from torch_sink.image.core.atoms import Kind, Lowering, lowers


@lowers("pil.convert")
def _convert(state: Lowering, mode: str) -> None:
    if mode == "L" and state.channels == 3:
        state.add(Kind.GRAY)
    state.channels = 3 if mode == "RGB" else 1


@lowers("pil.to_grayscale")
def _to_grayscale(state: Lowering, channels: int) -> None:
    _convert(state, "L")
    state.channels = channels


@lowers("pil.adjust_hue")
def _hue(state: Lowering, factor: float) -> None:
    """HUE: (the shift of the 8-bit hue, modulo 256,)."""
    state.add(Kind.HUE, int(np.int32(factor * 255).astype(np.uint8)))


@lowers("pil.posterize", "v1.posterize", "v2.posterize")
def _posterize(state: Lowering, bits: int) -> None:
    """POSTERIZE: (mask of the bits that stay,)."""
    state.add(Kind.POSTERIZE, 255 & ~(2 ** (8 - bits) - 1))


@lowers("pil.solarize")
def _solarize(state: Lowering, threshold: float) -> None:
    """SOLARIZE: (first value that is inverted,)."""
    state.add(Kind.SOLARIZE, min(max(math.ceil(threshold), 0), 256))


@lowers("v1.solarize", "v2.solarize")
def _solarize_tensor(state: Lowering, threshold: float) -> None:
    # torch compares bytes with a float in float32.
    _solarize(state, float(np.float32(threshold)))


@lowers("pil.adjust_gamma")
def _gamma(state: Lowering, gamma: float, gain: float) -> None:
    lookup(state, _gamma_table(gamma, gain))


def lookup(state: Lowering, table: np.ndarray) -> None:
    """LOOKUP: a table of 256 values for each of three channels."""
    state.add(Kind.LOOKUP, tables=(table, table, table))


@lowers("pil.point")
def _point(state: Lowering, table: bytes) -> None:
    channels = _point_tables(table)
    state.add(Kind.LOOKUP, tables=channels if len(channels) == 3 else channels * 3)


@functools.lru_cache(maxsize=1024)
def _point_tables(table: bytes) -> tuple[np.ndarray, ...]:
    return tuple(np.frombuffer(table, np.uint8).astype(np.int32).reshape(-1, 256))


@functools.lru_cache(maxsize=1024)
def _gamma_table(gamma: float, gain: float) -> np.ndarray:
    # As `adjust_gamma` writes it, in Python's own arithmetic; Pillow's `point` clips the entries.
    values = [int((255 + 1 - 1e-3) * gain * pow(value / 255.0, gamma)) for value in range(256)]
    return np.clip(values, 0, 255).astype(np.int32)


def _with_factor(kind: Kind) -> Callable[..., None]:
    return lambda state, factor: state.add(kind, factor=factor)


def _without_arguments(kind: Kind) -> Callable[..., None]:
    return lambda state: state.add(kind)


lowers("pil.adjust_brightness", "v1.adjust_brightness")(_with_factor(Kind.BRIGHTNESS))
lowers("pil.adjust_saturation")(_with_factor(Kind.SATURATION))
lowers("pil.adjust_contrast")(_with_factor(Kind.CONTRAST))
lowers("pil.invert", "v1.invert", "v2.invert")(_without_arguments(Kind.INVERT))
lowers("pil.autocontrast")(_without_arguments(Kind.AUTOCONTRAST))
lowers("pil.equalize", "v1.equalize", "v2.equalize")(_without_arguments(Kind.EQUALIZE))


@lowers("pil.adjust_sharpness")
def _sharpness(state: Lowering, factor: float) -> None:
    """SHARPNESS: (width, height) and the factor."""
    state.add(Kind.SHARPNESS, state.width, state.height, factor=factor)
