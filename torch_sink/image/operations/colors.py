"""Brightness, contrast, saturation, hue, gray images and the order of channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from torch_sink.image.core.arguments import is_factor, is_number, with_numbers
from torch_sink.image.core.atoms import FAMILIES, Formula, Kind, Lowering, by_formula, float_bits
from torch_sink.image.core.exactness import is_normalized, may_overshoot
from torch_sink.image.core.examples import Arguments, Example, sample
from torch_sink.image.core.ops import BLENDED, NUMERIC, Op, Operation, both
from torch_sink.image.operations.tones import look_up, of_all_families, stock_table


def _one_factor(functional: str) -> Callable[[Arguments], Iterator[Example]]:
    return lambda a: iter([Example(functional, (a.factor(),))])


# --- to kernel work


def _lower_brightness(state: Lowering, factor: float) -> None:
    state.add(Kind.BRIGHTNESS, factor=factor)


def _lower_v2_brightness(state: Lowering, factor: float) -> None:
    """A whole number stays one: stock code multiplies bytes by it, modulo 256."""
    if state.is_uint8 and isinstance(factor, int):
        look_up(state, stock_table("v2.adjust_brightness", factor))
    else:
        _lower_brightness(state, factor)


def _lower_contrast(state: Lowering, factor: float, formula: Formula) -> None:
    """CONTRAST: (bits of 255, bits of 1 - factor, channels) and the factor.
    BLEND_MEAN, of floats: (bits of 1 - factor, -, channels) and the factor."""
    if state.is_float:
        state.add(Kind.BLEND_MEAN, *float_bits(1.0 - factor), 0, state.channels, factor=factor, formula=formula)
        return
    values = *float_bits(255.0, 1.0 - factor), state.channels
    state.add(Kind.CONTRAST, *values, factor=factor, formula=formula)


def _lower_saturation(state: Lowering, factor: float, formula: Formula) -> None:
    """SATURATION: (bits of 1 - factor,) and the factor."""
    if state.channels == 3:
        state.add(Kind.SATURATION, *float_bits(1.0 - factor), factor=factor, formula=formula)


def _lower_hue_of_image(state: Lowering, factor: float) -> None:
    """HUE: (the shift of the 8-bit hue, modulo 256,)."""
    state.add(Kind.HUE, int(np.int32(factor * 255).astype(np.uint8)))


def _lower_hue(state: Lowering, factor: float, formula: Formula) -> None:
    """HUE: the part of a turn as the factor."""
    if state.channels == 3:
        state.add(Kind.HUE, factor=factor, formula=formula)


# --- brightness


@with_numbers
def _brightness(family: str, handle: Any, brightness_factor: Any) -> Any:
    if handle.sink_dtype not in NUMERIC or not is_factor(brightness_factor):
        return NotImplemented
    return handle.record(Op(f"{family}.adjust_brightness", (brightness_factor,)))


@with_numbers
def _brightness_of_image(image: Any, brightness_factor: Any) -> Any:
    if not is_number(brightness_factor):
        return NotImplemented
    return image.record(Op("pil.adjust_brightness", (brightness_factor,)))


Operation(
    "brightness",
    stock=of_all_families("adjust_brightness"),
    record={**both("adjust_brightness", _brightness), "pil.adjust_brightness": _brightness_of_image},
    lower={
        "pil.adjust_brightness": _lower_brightness,
        "v1.adjust_brightness": _lower_brightness,
        "v2.adjust_brightness": _lower_v2_brightness,
    },
    examples=_one_factor("adjust_brightness"),
    transforms={
        "ColorJitter": [
            sample(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
            sample(brightness=0.4, label="brightness alone"),
        ],
        "RandomPhotometricDistort": [sample(p=1.0), sample(p=0.0, label="p=0")],
    },
    is_point=True,
    clamps=lambda op: True,
)

# --- contrast


@with_numbers
def _contrast(family: str, handle: Any, contrast_factor: Any) -> Any:
    if handle.sink_dtype not in NUMERIC or not is_factor(contrast_factor):
        return NotImplemented
    if handle.sink_dtype == torch.float32 and is_normalized(handle):
        return NotImplemented  # the kernel adds gray values up as whole numbers
    return handle.record(Op(f"{family}.adjust_contrast", (contrast_factor,)))


@with_numbers
def _contrast_of_image(image: Any, contrast_factor: Any) -> Any:
    return image.record(Op("pil.adjust_contrast", (contrast_factor,))) if is_number(contrast_factor) else NotImplemented


Operation(
    "contrast",
    stock=of_all_families("adjust_contrast"),
    record={**both("adjust_contrast", _contrast), "pil.adjust_contrast": _contrast_of_image},
    lower=by_formula("adjust_contrast", _lower_contrast, FAMILIES),
    promise=BLENDED,
    examples=_one_factor("adjust_contrast"),
    clamps=lambda op: True,
)

# --- saturation


@with_numbers
def _saturation(family: str, handle: Any, saturation_factor: Any) -> Any:
    if handle.sink_dtype not in NUMERIC or not is_factor(saturation_factor):
        return NotImplemented
    if handle.sink_shape[0] == 1:
        return handle
    return handle.record(Op(f"{family}.adjust_saturation", (saturation_factor,)))


@with_numbers
def _saturation_of_image(image: Any, saturation_factor: Any) -> Any:
    if not is_number(saturation_factor):
        return NotImplemented
    return image.copy() if image.mode == "L" else image.record(Op("pil.adjust_saturation", (saturation_factor,)))


Operation(
    "saturation",
    stock=of_all_families("adjust_saturation"),
    record={**both("adjust_saturation", _saturation), "pil.adjust_saturation": _saturation_of_image},
    lower=by_formula("adjust_saturation", _lower_saturation, FAMILIES),
    promise=BLENDED,
    examples=_one_factor("adjust_saturation"),
    clamps=lambda op: True,
    keeps_info=lambda op: True,
)

# --- hue


def _hue(family: str, handle: Any, hue_factor: Any) -> Any:
    if handle.sink_dtype not in NUMERIC or not is_number(hue_factor) or not -0.5 <= hue_factor <= 0.5:
        return NotImplemented
    if handle.sink_shape[0] == 1:
        return handle
    if handle.sink_dtype == torch.float32 and (is_normalized(handle) or may_overshoot(handle)):
        return NotImplemented  # stock code makes NaN of some values below 0
    return handle.record(Op(f"{family}.adjust_hue", (hue_factor,)))


def _hue_of_image(image: Any, hue_factor: Any) -> Any:
    if image.mode != "RGB" or not is_number(hue_factor) or not -0.5 <= hue_factor <= 0.5:
        return NotImplemented
    return image.record(Op("pil.adjust_hue", (hue_factor,)))


Operation(
    "hue",
    stock=of_all_families("adjust_hue"),
    record={**both("adjust_hue", _hue), "pil.adjust_hue": _hue_of_image},
    lower={"pil.adjust_hue": _lower_hue_of_image, **by_formula("adjust_hue", _lower_hue)},
    promise=BLENDED,
    examples=lambda a: iter([Example("adjust_hue", (a.chance.uniform(-0.5, 0.5),))]),
)
