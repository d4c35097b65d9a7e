"""Color -> atoms: operations on pixels, operations that need to know the whole image, sharpness.

Bytes and floats share formulas; the kernels of `transforms` (v1) and of `transforms.v2` round differently.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch

from torch_sink.image.core.atoms import Formula, Kind, Lowering, float_bits, lowers, lowers_both, three
from torch_sink.image.core.ops import STOCK


@lowers("pil.convert")
def _convert(state: Lowering, mode: str) -> None:
    if mode == "L" and state.channels == 3:
        state.add(Kind.GRAY)
    state.channels = 3 if mode == "RGB" else 1


@lowers("pil.to_grayscale")
def _to_grayscale(state: Lowering, channels: int) -> None:
    _convert(state, "L")
    state.channels = channels


@lowers_both("rgb_to_grayscale")
def _tensor_to_grayscale(state: Lowering, formula: Formula, channels: int = 1) -> None:
    if state.channels == 3:
        state.add(Kind.GRAY, formula=formula)
        state.channels = channels
    elif formula == Formula.TENSOR_V2:
        # The kernel of v1 leaves an image of one channel as it is.
        state.channels = channels


@lowers("v2.grayscale_to_rgb")
def _to_rgb(state: Lowering) -> None:
    state.channels = 3


@lowers("v2.permute_channels")
def _permute(state: Lowering, permutation: tuple[int, ...]) -> None:
    """PERMUTE: for each channel of the output the channel of the input."""
    if state.channels == 3:
        state.add(Kind.PERMUTE, *permutation)


@lowers("pil.adjust_hue")
def _hue(state: Lowering, factor: float) -> None:
    """HUE: (the shift of the 8-bit hue, modulo 256,)."""
    state.add(Kind.HUE, int(np.int32(factor * 255).astype(np.uint8)))


@lowers_both("adjust_hue")
def _tensor_hue(state: Lowering, formula: Formula, factor: float) -> None:
    """HUE: the part of a turn as the factor."""
    if state.channels == 3:
        state.add(Kind.HUE, factor=factor, formula=formula)


@lowers("pil.posterize", "v1.posterize", "v2.posterize")
def _posterize(state: Lowering, bits: int) -> None:
    """POSTERIZE: (bits of 1 / the distance of the values that stay, bits of that distance)."""
    step = 2.0 ** (8 - bits)
    state.add(Kind.POSTERIZE, *float_bits(1 / step, step))


@lowers("pil.solarize")
def _solarize(state: Lowering, threshold: float) -> None:
    """SOLARIZE: (bits of the first value that is inverted,)."""
    state.add(Kind.SOLARIZE, *float_bits(min(max(math.ceil(threshold), 0), 256)))


@lowers("v1.solarize", "v2.solarize")
def _tensor_solarize(state: Lowering, threshold: float) -> None:
    # torch compares bytes with a float in float32.
    _solarize(state, float(np.float32(threshold)))


@lowers("pil.adjust_brightness", "v1.adjust_brightness")
def _brightness(state: Lowering, factor: float) -> None:
    state.add(Kind.BRIGHTNESS, factor=factor)


@lowers("v2.adjust_brightness")
def _v2_brightness(state: Lowering, factor: float) -> None:
    """A whole number stays one: stock code multiplies bytes by it, modulo 256."""
    if state.is_uint8 and isinstance(factor, int):
        _lookup(state, _stock_table("v2.adjust_brightness", factor))
    else:
        _brightness(state, factor)


@lowers("pil.adjust_saturation")
def _saturation(state: Lowering, factor: float, formula: Formula = Formula.PILLOW) -> None:
    """SATURATION: (bits of 1 - factor,) and the factor."""
    if state.channels == 3:
        state.add(Kind.SATURATION, *float_bits(1.0 - factor), factor=factor, formula=formula)


@lowers_both("adjust_saturation")
def _tensor_saturation(state: Lowering, formula: Formula, factor: float) -> None:
    _saturation(state, factor, formula)


@lowers("pil.adjust_contrast")
def _contrast(state: Lowering, factor: float, formula: Formula = Formula.PILLOW) -> None:
    """CONTRAST: (bits of 255, bits of 1 - factor, channels) and the factor."""
    values = *float_bits(255.0, 1.0 - factor), state.channels
    state.add(Kind.CONTRAST, *values, factor=factor, formula=formula)


@lowers_both("adjust_contrast")
def _tensor_contrast(state: Lowering, formula: Formula, factor: float) -> None:
    _contrast(state, factor, formula)


@lowers_both("float_contrast")
def _float_contrast(state: Lowering, formula: Formula, factor: float) -> None:
    """BLEND_MEAN: (bits of 1 - factor, -, channels) and the factor."""
    state.add(Kind.BLEND_MEAN, *float_bits(1.0 - factor), 0, state.channels, factor=factor, formula=formula)


@lowers("pil.adjust_sharpness")
def _sharpness(state: Lowering, factor: float, formula: Formula = Formula.PILLOW) -> None:
    """SHARPNESS: (width, height, bits of 1 - factor) and the factor."""
    values = state.width, state.height, *float_bits(1.0 - factor)
    state.add(Kind.SHARPNESS, *values, factor=factor, formula=formula)


@lowers_both("adjust_sharpness")
def _tensor_sharpness(state: Lowering, formula: Formula, factor: float) -> None:
    _sharpness(state, factor, formula)


def _looked_up(kind: Kind) -> Callable[..., None]:
    """AUTOCONTRAST, EQUALIZE: (bits of 255,)."""
    return lambda state, formula=Formula.PILLOW: state.add(kind, *float_bits(255.0), formula=formula)


lowers("pil.autocontrast")(_looked_up(Kind.AUTOCONTRAST))
lowers_both("autocontrast")(_looked_up(Kind.AUTOCONTRAST))
lowers("pil.equalize", "v1.equalize", "v2.equalize")(_looked_up(Kind.EQUALIZE))
lowers("pil.invert", "v1.invert", "v2.invert")(lambda state: state.add(Kind.INVERT))


def _lookup(state: Lowering, *tables: np.ndarray) -> None:
    """LOOKUP: (bits of 255,), and a table of 256 values for each of three channels, float32 by their bits."""
    state.add(Kind.LOOKUP, *float_bits(255.0), tables=three(tables))


@lowers("pil.adjust_gamma")
def _gamma(state: Lowering, gamma: float, gain: float) -> None:
    _lookup(state, _gamma_table(gamma, gain))


@lowers_both("adjust_gamma")
def _tensor_gamma(state: Lowering, formula: Formula, gamma: float, gain: float) -> None:
    family = "v1" if formula == Formula.TENSOR_V1 else "v2"
    _lookup(state, _stock_table(f"{family}.adjust_gamma", gamma, gain))


@lowers("pil.point")
def _point(state: Lowering, table: bytes) -> None:
    _lookup(state, *_point_tables(table))


@functools.lru_cache(maxsize=1024)
def _point_tables(table: bytes) -> tuple[np.ndarray, ...]:
    return tuple(np.frombuffer(table, np.uint8).astype(np.float32).view(np.int32).reshape(-1, 256))


@functools.lru_cache(maxsize=1024)
def _gamma_table(gamma: float, gain: float) -> np.ndarray:
    # As `adjust_gamma` writes it, in Python's own arithmetic; Pillow's `point` clips the entries.
    values = [int((255 + 1 - 1e-3) * gain * pow(value / 255.0, gamma)) for value in range(256)]
    return np.clip(values, 0, 255).astype(np.float32).view(np.int32)


@functools.lru_cache(maxsize=1024, typed=True)
def _stock_table(name: str, *args: float) -> np.ndarray:
    """What stock code makes of each value, float32 [256] by their bits."""
    ramp = torch.arange(256, dtype=torch.uint8, device="cpu").view(1, 1, 256)
    return STOCK[name](ramp, *args).flatten().float().view(torch.int32).numpy()


@lowers("v1.normalize", "v2.normalize")
def _normalize(state: Lowering, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """NORMALIZE: (three means, three standard deviations), by their bits."""
    state.add(Kind.NORMALIZE, *float_bits(*three(mean), *three(std)))


@lowers("mul")
def _multiply(state: Lowering, factor: float) -> None:
    _normalize(state, (0.0,), (1 / factor,))


def _to_byte(state: Lowering, scale: float, rounds: int = 0) -> None:
    """TO_BYTE: (bits of the scale, 0 to cut off or 1 to round and keep in [0, 255])."""
    state.add(Kind.TO_BYTE, *float_bits(scale), rounds)


# What `to_dtype` and `convert_image_dtype` multiply by: 255 + 1 - 1e-3.
_BYTE_SCALE = 255.999


@lowers("v1.convert_image_dtype", "v2.to_dtype")
def _to_dtype(state: Lowering, dtype: torch.dtype, scale: bool = True) -> None:
    """To another kind of floats nothing is to do: the result is rounded to its type when it is written."""
    if dtype == torch.uint8:
        _to_byte(state, _BYTE_SCALE if scale else 1.0)


lowers("to_pil_bytes")(functools.partial(_to_byte, scale=255.0))
