"""Color on float32 images -> atoms. `is_v2` is 1 where the kernels of `transforms.v2` round differently from v1's."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from torch_sink.image.core.atoms import FloatKind
from torch_sink.image.lower.floats import FloatLowering, bits, lowers_float, three

# How gray is made, as `float_program.py` numbers it.
_CHANNEL_ITSELF, _GRAY_V1, _GRAY_V2 = range(3)


def _gray_kind(state: FloatLowering, is_v2: int) -> int:
    if state.channels == 1:
        return _CHANNEL_ITSELF
    return _GRAY_V2 if is_v2 else _GRAY_V1


@lowers_float("v1.normalize", "v2.normalize")
def _normalize(state: FloatLowering, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """NORMALIZE: (three means, three standard deviations)."""
    state.add(FloatKind.NORMALIZE, *bits(*three(mean), *three(std)))


@lowers_float("mul")
def _multiply(state: FloatLowering, factor: float) -> None:
    _normalize(state, (0.0,), (1 / factor,))


@lowers_float("v1.adjust_brightness", "v2.adjust_brightness")
def _brightness(state: FloatLowering, factor: float) -> None:
    """SCALE: (factor,)."""
    state.add(FloatKind.SCALE, *bits(factor))


@lowers_float("v1.invert", "v2.invert")
def _invert(state: FloatLowering) -> None:
    state.add(FloatKind.INVERT)


def _saturation(state: FloatLowering, factor: float, is_v2: int) -> None:
    """SATURATION: (factor, 1 - factor, kind of gray)."""
    if state.channels == 3:
        state.add(FloatKind.SATURATION, *bits(factor, 1.0 - factor), _gray_kind(state, is_v2))


def _contrast(state: FloatLowering, factor: float, is_v2: int) -> None:
    """CONTRAST: (factor, 1 - factor, is v2, kind of gray, pixels)."""
    pixels = state.height * state.width
    state.add(FloatKind.CONTRAST, *bits(factor, 1.0 - factor), is_v2, _gray_kind(state, is_v2), pixels)


def _hue(state: FloatLowering, factor: float, is_v2: int) -> None:
    """HUE: (turn, is v2)."""
    if state.channels == 3:
        state.add(FloatKind.HUE, *bits(factor), is_v2)


def _gray(state: FloatLowering, channels: int = 1, is_v2: int = 0) -> None:
    """GRAY: (kind of gray,)."""
    if state.channels == 3:
        state.add(FloatKind.GRAY, _gray_kind(state, is_v2))
    elif not is_v2:
        return
    state.channels = channels


for _family, _is_v2 in (("v1", 0), ("v2", 1)):
    lowers_float(f"{_family}.adjust_saturation")(functools.partial(_saturation, is_v2=_is_v2))
    lowers_float(f"{_family}.float_contrast")(functools.partial(_contrast, is_v2=_is_v2))
    lowers_float(f"{_family}.adjust_hue")(functools.partial(_hue, is_v2=_is_v2))
    lowers_float(f"{_family}.rgb_to_grayscale")(functools.partial(_gray, is_v2=_is_v2))


def _to_byte(state: FloatLowering, scale: float, rounds: int = 0) -> None:
    """TO_BYTE: (scale, 0 to cut off, 1 to round and keep in [0, 255])."""
    state.add(FloatKind.TO_BYTE, *bits(scale), rounds)


# What `to_dtype` and `convert_image_dtype` multiply by: 255 + 1 - 1e-3.
_BYTE_SCALE = 255.999


@lowers_float("v1.convert_image_dtype", "v2.to_dtype")
def _convert(state: FloatLowering, dtype: torch.dtype, scale: bool = True) -> None:
    """To another kind of floats nothing is to do: the result is rounded to its type when it is written."""
    if dtype == torch.uint8:
        _to_byte(state, _BYTE_SCALE if scale else 1.0)


lowers_float("to_pil_bytes")(functools.partial(_to_byte, scale=255.0))
lowers_float("round_to_bytes")(functools.partial(_to_byte, scale=1.0, rounds=1))


@lowers_float("v2.grayscale_to_rgb")
def _to_rgb(state: FloatLowering) -> None:
    state.channels = 3


@lowers_float("v2.permute_channels")
def _permute(state: FloatLowering, permutation: Sequence[int]) -> None:
    """PERMUTE: (the channel that each new one is,)."""
    if state.channels == 3:
        state.add(FloatKind.PERMUTE, *permutation)
