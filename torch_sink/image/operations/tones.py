"""What is done to each value by itself, or by the histogram of its channel: inversion, thresholds, stretched ranges.

A threshold or a stretched range turns a difference in the last bits into a large one. On float tensors these fall back
to stock torchvision, and so they do on bytes that torch's float kernels have rounded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torchvision.transforms import _functional_pil as F_pil
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms.v2 import functional as F_v2

from torch_sink.image.core.arguments import is_factor, is_number
from torch_sink.image.core.atoms import FAMILIES, Formula, Kind, Lowering, by_formula, float_bits, three
from torch_sink.image.core.exactness import is_rounded_by_torch
from torch_sink.image.core.examples import Arguments, Example, of_method, sample
from torch_sink.image.core.ops import NUMERIC, STOCK, Op, Operation, Recorder, both

# --- to kernel work


def _lower_posterize(state: Lowering, bits: int) -> None:
    """POSTERIZE: (bits of 1 / the distance of the values that stay, bits of that distance)."""
    step = 2.0 ** (8 - bits)
    state.add(Kind.POSTERIZE, *float_bits(1 / step, step))


def _lower_solarize_image(state: Lowering, threshold: float) -> None:
    """SOLARIZE: (bits of the first value that is inverted,)."""
    state.add(Kind.SOLARIZE, *float_bits(min(max(math.ceil(threshold), 0), 256)))


def _lower_solarize(state: Lowering, threshold: float) -> None:
    # torch compares bytes with a float in float32.
    _lower_solarize_image(state, float(np.float32(threshold)))


def _lower_autocontrast(state: Lowering, formula: Formula) -> None:
    """AUTOCONTRAST: (bits of 255,)."""
    state.add(Kind.AUTOCONTRAST, *float_bits(255.0), formula=formula)


def _lower_equalize(state: Lowering, formula: Formula) -> None:
    """EQUALIZE: (bits of 255,)."""
    state.add(Kind.EQUALIZE, *float_bits(255.0))


def look_up(state: Lowering, *tables: np.ndarray) -> None:
    """LOOKUP: (bits of 255,), and a table of 256 values for each of three channels, float32 by their bits."""
    state.add(Kind.LOOKUP, *float_bits(255.0), tables=three(tables))


def _lower_gamma_of_image(state: Lowering, gamma: float, gain: float) -> None:
    look_up(state, _gamma_table(gamma, gain))


def _lower_gamma(family: str, state: Lowering, gamma: float, gain: float) -> None:
    look_up(state, stock_table(f"{family}.adjust_gamma", gamma, gain))


def _lower_point(state: Lowering, table: bytes) -> None:
    look_up(state, *_point_tables(table))


@functools.lru_cache(maxsize=1024)
def _point_tables(table: bytes) -> tuple[np.ndarray, ...]:
    return tuple(np.frombuffer(table, np.uint8).astype(np.float32).view(np.int32).reshape(-1, 256))


@functools.lru_cache(maxsize=1024)
def _gamma_table(gamma: float, gain: float) -> np.ndarray:
    # As `adjust_gamma` writes it, in Python's own arithmetic; Pillow's `point` clips the entries.
    values = [int((255 + 1 - 1e-3) * gain * pow(value / 255.0, gamma)) for value in range(256)]
    return np.clip(values, 0, 255).astype(np.float32).view(np.int32)


@functools.lru_cache(maxsize=1024, typed=True)
def stock_table(name: str, *args: float) -> np.ndarray:
    """What stock code makes of each value, float32 [256] by their bits."""
    ramp = torch.arange(256, dtype=torch.uint8, device="cpu").view(1, 1, 256)
    return STOCK[name](ramp, *args).flatten().float().view(torch.int32).numpy()


# --- records


def _is_steep(handle: Any) -> bool:
    """True for bytes that nothing has rounded."""
    return getattr(handle, "sink_dtype", torch.uint8) == torch.uint8 and not is_rounded_by_torch(handle)


def _without_arguments(name: str) -> dict[Any, Recorder]:
    def record(family: str, handle: Any) -> Any:
        return handle.record(Op(f"{family}.{name}")) if _is_steep(handle) else NotImplemented

    return {**both(name, record), f"pil.{name}": lambda image: record("pil", image)}


def of_all_families(name: str) -> dict[str, Any]:
    """The stock functions of one name: on Pillow images, in `transforms` and in `transforms.v2`."""
    return {
        f"pil.{name}": getattr(F_pil, name),
        f"v1.{name}": getattr(F_tensor, name),
        f"v2.{name}": getattr(F_v2, f"{name}_image"),
    }


for _name, _lower in (("autocontrast", _lower_autocontrast), ("equalize", _lower_equalize)):
    Operation(
        _name,
        stock=of_all_families(_name),
        record=_without_arguments(_name),
        lower=by_formula(_name, _lower, FAMILIES),
        examples=lambda a, name=_name: iter([Example(name)]),  # type: ignore[misc]
        transforms={f"Random{_name.capitalize()}": [sample(p=1.0)]},
        keeps_info=lambda op: True,
    )


def _posterize(family: str, handle: Any, bits: Any) -> Any:
    if not _is_steep(handle) or type(bits) is not int or not 0 <= bits <= 8:
        return NotImplemented
    return handle.record(Op(f"{family}.posterize", (bits,)))


def _posterize_image(image: Any, bits: Any) -> Any:
    return _posterize("pil", image, bits) if type(bits) is int and bits else NotImplemented


Operation(
    "posterize",
    stock=of_all_families("posterize"),
    record={**both("posterize", _posterize), "pil.posterize": _posterize_image},
    lower=_lower_posterize,
    examples=lambda a: iter([Example("posterize", (a.chance.randint(1, 7),))]),
    transforms={"RandomPosterize": [sample(2, p=1.0)]},
    keeps_info=lambda op: True,
)


def _solarize(family: str, handle: Any, threshold: Any) -> Any:
    if not _is_steep(handle) or not is_number(threshold) or threshold > 255:
        return NotImplemented
    return handle.record(Op(f"{family}.solarize", (threshold,)))


def _solarize_image(image: Any, threshold: Any) -> Any:
    if not _is_steep(image) or not is_number(threshold):
        return NotImplemented
    return image.record(Op("pil.solarize", (threshold,)))


def _solarize_examples(a: Arguments) -> Iterator[Example]:
    yield Example("solarize", (a.chance.uniform(0.1, 0.9) * 255 * a.scale,))
    yield Example("solarize", (0.5,), label="a threshold below 1")


Operation(
    "solarize",
    stock=of_all_families("solarize"),
    record={**both("solarize", _solarize), "pil.solarize": _solarize_image},
    lower={"pil.solarize": _lower_solarize_image, **both("solarize", _lower_solarize)},
    examples=_solarize_examples,
    transforms={"RandomSolarize": [sample(128, p=1.0), sample(0.5, p=1.0, label="a threshold below 1")]},
    keeps_info=lambda op: True,
)

# --- inversion


def _invert(family: str, handle: Any) -> Any:
    return handle.record(Op(f"{family}.invert")) if handle.sink_dtype in NUMERIC else NotImplemented


def _invert_image(image: Any) -> Any:
    return image.record(Op("pil.invert"))


Operation(
    "invert",
    stock={"pil.invert": F_pil.invert, "v1.invert": F_tensor.invert, "v2.invert": F_v2.invert_image},
    record={**both("invert", _invert), "pil.invert": _invert_image},
    lower=lambda state: state.add(Kind.INVERT),
    is_point=True,
    examples=lambda a: iter([Example("invert")]),
    transforms={"RandomInvert": [sample(p=1.0)]},
    keeps_info=lambda op: True,
)

# --- tables


def _gamma(family: str, handle: Any, gamma: Any, gain: Any = 1) -> Any:
    if not _is_steep(handle) or not is_factor(gamma) or not is_number(gain):
        return NotImplemented
    return handle.record(Op(f"{family}.adjust_gamma", (gamma, gain)))


def _gamma_of_image(image: Any, gamma: Any, gain: Any = 1.0) -> Any:
    if not is_factor(gamma) or not is_number(gain) or not _is_steep(image):
        return NotImplemented
    return image.record(Op("pil.adjust_gamma", (gamma, gain)))


Operation(
    "gamma",
    stock=of_all_families("adjust_gamma"),
    record={**both("adjust_gamma", _gamma), "pil.adjust_gamma": _gamma_of_image},
    lower={
        "pil.adjust_gamma": _lower_gamma_of_image,
        "v1.adjust_gamma": functools.partial(_lower_gamma, "v1"),
        "v2.adjust_gamma": functools.partial(_lower_gamma, "v2"),
    },
    examples=lambda a: iter([Example("adjust_gamma", (a.chance.uniform(0.3, 2.5), a.chance.uniform(0.5, 1.5)))]),
    keeps_info=lambda op: True,
)


def _point(image: Any, lut: Any, mode: str | None = None) -> Any:
    table = _byte_table(lut, 3 if image.mode == "RGB" else 1)
    if image.mode == "P" or mode not in (None, image.mode) or table is None or not _is_steep(image):
        return NotImplemented
    return image.record(Op("pil.point", (table,)))


def _byte_table(lut: Any, channels: int) -> bytes | None:
    """What `point` makes of each value of each channel, or None if unsupported."""
    if not isinstance(lut, (list, tuple)) or len(lut) != 256 * channels:
        return None
    if not all(type(value) in (int, float) and abs(value) < 2**31 for value in lut):
        return None
    return bytes(min(max(round(value), 0), 255) for value in lut)


def _tables(a: Arguments) -> Any:
    return of_method(a, "point", {"a table": ([a.chance.randrange(256) for _ in range(256 * a.channels)],)})


Operation(
    "point",
    stock={"pil.point": lambda image, table: image.point(list(table))},
    record={"Image.point": _point},
    lower=_lower_point,
    examples=_tables,
    keeps_info=lambda op: True,
)
