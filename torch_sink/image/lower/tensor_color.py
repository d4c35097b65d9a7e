"""Color on uint8 tensors -> atoms. The kernels of `transforms` (v1) and `transforms.v2` compute differently."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from torch_sink.image.core.atoms import Formula, Kind, Lowering, lowers
from torch_sink.image.core.ops import STOCK
from torch_sink.image.lower.color import lookup

_FORMULAS = {"v1": Formula.TENSOR_V1, "v2": Formula.TENSOR_V2}


def float32_bits(value: float) -> int:
    """A number as the kernels read it from a column of integers."""
    return int(np.float32(value).view(np.int32))


def _lowers_both(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function that takes the formula after the state, for both families."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for family, formula in _FORMULAS.items():
            lowers(f"{family}.{name}")(lambda state, *args, formula=formula: function(state, formula, *args))
        return function

    return register


@_lowers_both("rgb_to_grayscale")
def _to_grayscale(state: Lowering, formula: Formula, channels: int) -> None:
    if state.channels == 3:
        state.add(Kind.GRAY, formula=formula)
        state.channels = channels
    elif formula == Formula.TENSOR_V2:
        # The kernel of v1 leaves an image of one channel as it is.
        state.channels = channels


@lowers("v2.grayscale_to_rgb")
def _to_rgb(state: Lowering) -> None:
    state.channels = 3


@_lowers_both("adjust_saturation")
def _saturation(state: Lowering, formula: Formula, factor: float) -> None:
    """SATURATION: (bits of 1 - factor,) and the factor."""
    state.add(Kind.SATURATION, float32_bits(1.0 - factor), factor=factor, formula=formula)


@_lowers_both("adjust_contrast")
def _contrast(state: Lowering, formula: Formula, factor: float) -> None:
    """CONTRAST: (bits of 1 - factor, channels) and the factor."""
    state.add(Kind.CONTRAST, float32_bits(1.0 - factor), state.channels, factor=factor, formula=formula)


@_lowers_both("adjust_sharpness")
def _sharpness(state: Lowering, formula: Formula, factor: float) -> None:
    """SHARPNESS: (width, height, bits of 1 - factor) and the factor."""
    values = state.width, state.height, float32_bits(1.0 - factor)
    state.add(Kind.SHARPNESS, *values, factor=factor, formula=formula)


@_lowers_both("adjust_hue")
def _hue(state: Lowering, formula: Formula, factor: float) -> None:
    """HUE: the part of a turn as the factor."""
    state.add(Kind.HUE, factor=factor, formula=formula)


@_lowers_both("autocontrast")
def _autocontrast(state: Lowering, formula: Formula) -> None:
    state.add(Kind.AUTOCONTRAST, formula=formula)


@lowers("v2.permute_channels")
def _permute(state: Lowering, permutation: tuple[int, ...]) -> None:
    """PERMUTE: for each channel of the output the channel of the input."""
    if state.channels == 3:
        state.add(Kind.PERMUTE, *permutation)


@_lowers_both("adjust_gamma")
def _gamma(state: Lowering, formula: Formula, gamma: float, gain: float) -> None:
    family = "v1" if formula == Formula.TENSOR_V1 else "v2"
    lookup(state, _stock_table(f"{family}.adjust_gamma", gamma, gain))


@lowers("v2.adjust_brightness")
def _brightness(state: Lowering, factor: float) -> None:
    """A whole number stays one: stock code multiplies bytes by it, modulo 256."""
    if isinstance(factor, int):
        lookup(state, _stock_table("v2.adjust_brightness", factor))
    else:
        state.add(Kind.BRIGHTNESS, factor=factor)


@functools.lru_cache(maxsize=1024, typed=True)
def _stock_table(name: str, *args: float) -> np.ndarray:
    """What stock code makes of each value, int32 [256]."""
    ramp = torch.arange(256, dtype=torch.uint8, device="cpu").view(1, 1, 256)
    return STOCK[name](ramp, *args).flatten().to(torch.int32).numpy()
