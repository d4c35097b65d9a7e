"""Operations on single values, some with the histogram of the channel: inversion, thresholds, stretched ranges.

A threshold or a stretched range turns a difference in the last bits into a large one. So on float tensors, and on bytes
that torch's float kernels have rounded, these operations run in stock torchvision.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch

from torch_sink.image.core.arguments import is_computed_in_float32, is_factor, is_number, is_rounded_by_torch
from torch_sink.image.core.fallback import image_of
from torch_sink.image.core.lowering import FAMILIES, LoweredImage, by_formula, float_bits, three
from torch_sink.image.core.ops import NUMERIC, STOCK, Op, Operation, Recorder
from torch_sink.image.core.recording import Recording
from torch_sink.image.operations.functionals import functional
from torch_sink.triton_kernels.rows import Formula, Kind


def _is_exact_bytes(image: Recording) -> bool:
    """True for bytes that no float kernel of torch has rounded: thresholds of these are exact."""
    return image.dtype == torch.uint8 and not is_rounded_by_torch(image)


# --- by the histogram


def _on_exact_bytes(name: str) -> Recorder:
    """Records a call without arguments, on exact bytes alone."""
    return lambda family, image: image.record(Op(f"{family}.{name}")) if _is_exact_bytes(image) else NotImplemented


def _lower_autocontrast(lowered: LoweredImage, formula: Formula) -> None:
    """AUTOCONTRAST: (bits of 255,)."""
    lowered.add(Kind.AUTOCONTRAST, *float_bits(255.0), formula=formula)


functional(
    "autocontrast",
    _on_exact_bytes("autocontrast"),
    by_formula("autocontrast", _lower_autocontrast, FAMILIES),
)


functional(
    "equalize",
    _on_exact_bytes("equalize"),
    lambda lowered: lowered.add(Kind.EQUALIZE, *float_bits(255.0)),  # (bits of 255,)
)

# --- thresholds


def _posterize(family: str, image: Recording, bits: Any) -> Any:
    least = 1 if family == "pil" else 0
    if not _is_exact_bytes(image) or type(bits) is not int or not least <= bits <= 8:
        return NotImplemented
    return image.record(Op(f"{family}.posterize", (bits,)))


def _lower_posterize(lowered: LoweredImage, bits: int) -> None:
    """POSTERIZE: (bits of 1 / the distance of the values that stay, bits of that distance)."""
    step = 2.0 ** (8 - bits)
    lowered.add(Kind.POSTERIZE, *float_bits(1 / step, step))


functional(
    "posterize",
    _posterize,
    _lower_posterize,
)


def _solarize(family: str, image: Recording, threshold: Any) -> Any:
    if not _is_exact_bytes(image) or not is_number(threshold) or (threshold > 255 and family != "pil"):
        return NotImplemented
    if not is_computed_in_float32(family, image):
        return NotImplemented
    return image.record(Op(f"{family}.solarize", (threshold,)))


def _lower_solarize_image(lowered: LoweredImage, threshold: float) -> None:
    """SOLARIZE: (bits of the first value that is inverted,)."""
    lowered.add(Kind.SOLARIZE, *float_bits(min(max(math.ceil(threshold), 0), 256)))


def _lower_solarize(lowered: LoweredImage, threshold: float) -> None:
    # torch compares bytes with a float in float32.
    _lower_solarize_image(lowered, float(np.float32(threshold)))


functional(
    "solarize",
    _solarize,
    {"pil.solarize": _lower_solarize_image, "v1.solarize": _lower_solarize, "v2.solarize": _lower_solarize},
)

# --- inversion


functional(
    "invert",
    lambda family, image: image.record(Op(f"{family}.invert")) if image.dtype in NUMERIC else NotImplemented,
    lambda lowered: lowered.add(Kind.INVERT),
)

# --- tables


def _gamma(family: str, image: Recording, gamma: Any, gain: Any = 1) -> Any:
    if not _is_exact_bytes(image) or not is_factor(gamma) or not is_number(gain):
        return NotImplemented
    return image.record(Op(f"{family}.adjust_gamma", (gamma, gain)))


def _lower_gamma(family: str, lowered: LoweredImage, gamma: float, gain: float) -> None:
    look_up(lowered, stock_table(f"{family}.adjust_gamma", gamma, gain))


functional(
    "adjust_gamma",
    _gamma,
    {f"{family}.adjust_gamma": functools.partial(_lower_gamma, family) for family in FAMILIES},
)


def _point(image: Recording, lut: Any, mode: str | None = None) -> Any:
    if image.mode == "P" or mode not in (None, image.mode) or not _is_exact_bytes(image):
        return NotImplemented
    if not isinstance(lut, (list, tuple)) or len(lut) != 256 * image.shape[0]:
        return NotImplemented
    if not all(type(value) in (int, float) and abs(value) < 2**31 for value in lut):
        return NotImplemented
    return image.record(Op("pil.point", (bytes(min(max(round(value), 0), 255) for value in lut),)))


@functools.lru_cache(maxsize=1024)
def _point_tables(table: bytes) -> tuple[np.ndarray, ...]:
    return tuple(np.frombuffer(table, np.uint8).astype(np.float32).view(np.int32).reshape(-1, 256))


def look_up(lowered: LoweredImage, *tables: np.ndarray) -> None:
    """LOOKUP: (bits of 255,), and a table of 256 values for each of three channels, float32 by their bits."""
    lowered.add(Kind.LOOKUP, *float_bits(255.0), tables=three(tables))


@functools.lru_cache(maxsize=1024, typed=True)
def stock_table(name: str, *args: float) -> np.ndarray:
    """The results of stock code for the values 0 to 255, float32 [256] by their bits."""
    ramp = np.arange(256, dtype=np.uint8).reshape(1, 256)
    if name.startswith("pil."):
        made = np.asarray(STOCK[name](image_of(ramp), *args))
    else:
        made = STOCK[name](torch.from_numpy(ramp)[None], *args).numpy()
    return made.flatten().astype(np.float32).view(np.int32)


Operation(
    "point",
    stock={"pil.point": lambda image, table: image.point(list(table))},
    record={"Image.point": _point},
    lower=lambda lowered, table: look_up(lowered, *_point_tables(table)),
)
