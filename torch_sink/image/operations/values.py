"""Normalization, and arithmetic with constants.

A sum, a difference or a quotient is a normalization with one step left out, (x - mean) / std, which gives stock code's
very bits. A product is a call of its own: stock code's bits while a table of 256 values stands for the floats, and
behind that a division by the reciprocal, whose last bit may differ where the constant is no power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from torch_sink.image.core.arguments import has_minus_zero, is_number, is_tabled
from torch_sink.image.core.atoms import Kind, Lowering, float_bits, three
from torch_sink.image.core.examples import STATISTICS, Arguments, Example, sample
from torch_sink.image.core.ops import EXACT_BYTES, Op, Operation, Recorder, always, both, record_maybe_in_place
from torch_sink.image.operations.conversions import convert_dtype, to_dtype
from torch_sink.image.operations.functionals import stock_of


def _lower_normalize(state: Lowering, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """NORMALIZE: (three means, three standard deviations), by their bits."""
    state.add(Kind.NORMALIZE, *float_bits(*three(mean), *three(std)))


# --- normalization

# Less may be zero in the image's dtype, which stock code refuses.
_SMALLEST_STD = 1e-6


def _statistics(values: Any, channels: int) -> tuple[float, ...] | None:
    """mean or std as a tuple of floats, or None if unsupported."""
    if isinstance(values, (torch.Tensor, np.ndarray)) and values.ndim == 1:
        values = values.tolist()
    fits = isinstance(values, (list, tuple)) and len(values) in (1, channels) and all(map(is_number, values))
    return tuple(map(float, values)) if fits and not has_minus_zero(values) else None


def _normalize(family: str, handle: Any, mean: Any, std: Any, inplace: bool = False) -> Any:
    if family == "v2" and handle.sink_dtype == torch.float32 and not inplace:
        handle = _spread(handle, mean, std)
    channels = handle.sink_shape[0]
    mean, std = _statistics(mean, channels), _statistics(std, channels)
    if mean is None or std is None or not handle.sink_dtype.is_floating_point:
        return NotImplemented
    if handle.sink_dtype != torch.float32 and not is_tabled(handle):
        return NotImplemented
    if min(map(abs, std)) < _SMALLEST_STD or (inplace and not handle.changes_in_place):
        return NotImplemented
    return record_maybe_in_place(handle, inplace, f"{family}.normalize", (mean, std))


def _spread(handle: Any, mean: Any, std: Any) -> Any:
    """A gray image with as many channels as there are statistics: the kernel of `transforms.v2` makes so many."""
    channels, height, width = handle.sink_shape
    if channels != 1 or _statistics(mean, 3) is None or _statistics(std, 3) is None or len(mean) == len(std) == 1:
        return handle
    return handle.record(Op("v2.grayscale_to_rgb"), shape=(3, height, width))


# --- arithmetic

_SMALLEST, _LARGEST = 1e-6, 1e6
_Arithmetic = Callable[[Any, Any, bool], Any]


def _ways(name: str, record: _Arithmetic) -> dict[Any, Recorder]:
    """How programs call an operator of torch's: as a function, a method, and in place."""

    def made(image: Any, constant: Any = None) -> Any:
        return record(image, constant, False)

    def made_in_place(image: Any, constant: Any = None) -> Any:
        return record(image, constant, True)

    places = getattr(torch, name), getattr(torch.Tensor, name)
    return {**dict.fromkeys(places, made), getattr(torch.Tensor, f"{name}_"): made_in_place}


def _shifted(image: Any, mean: Any, in_place: bool) -> Any:
    image = _as_floats(image, type(mean) is float and not in_place)
    means = _constants(image, mean, in_place)
    if means is None:
        return NotImplemented
    return record_maybe_in_place(image, in_place, "v1.normalize", (means, (1.0,)))


def _added(image: Any, constant: Any, in_place: bool) -> Any:
    is_constant = is_number(constant) or type(constant) is torch.Tensor
    # What 0 is added to is not -0 afterwards; -0 of an integer would be 0.
    is_zero = type(constant) is int and constant == 0
    return _shifted(image, -constant if is_constant and not is_zero else None, in_place)


def _divided(image: Any, std: Any, in_place: bool) -> Any:
    if is_number(std) and std == 255 and not in_place and _is_bytes(image):
        return convert_dtype("v1", image)
    image = _as_floats(image, is_number(std) and not in_place)
    stds = _constants(image, std, in_place)
    if stds is None or min(map(abs, stds)) < _SMALLEST:
        return NotImplemented
    return record_maybe_in_place(image, in_place, "v1.normalize", ((0.0,), stds))


def _multiplied(image: Any, factor: Any, in_place: bool) -> Any:
    """The image times a constant, or the other way around."""
    image, factor = (factor, image) if is_number(image) else (image, factor)
    image = _as_floats(image, type(factor) is float and not in_place)
    if not is_number(factor) or abs(factor) < _SMALLEST or _constants(image, factor, in_place) is None:
        return NotImplemented
    return record_maybe_in_place(image, in_place, "mul", (float(factor),))


def _subtracted_from(image: Any, constant: Any = None) -> Any:
    """`constant - image`; of bytes `255 - image`, which is an inversion."""
    if getattr(image, "sink_dtype", None) == torch.uint8 and type(constant) is int:
        return image.record(Op("v1.invert")) if constant == 255 else NotImplemented
    negative = _multiplied(image, -1.0, False) if is_number(constant) and constant != 0 else NotImplemented
    return negative if negative is NotImplemented else _shifted(negative, -constant, False)


def _is_bytes(image: Any) -> bool:
    return getattr(image, "sink_dtype", None) == torch.uint8 and torch.get_default_dtype() == torch.float32


def _as_floats(image: Any, becomes_floats: bool) -> Any:
    """Bytes as the floats that arithmetic with a float, and every quotient, makes of them first."""
    return to_dtype("v2", image) if becomes_floats and _is_bytes(image) else image


def _constants(image: Any, constant: Any, in_place: bool) -> tuple[float, ...] | None:
    """A constant for float32 values, or one a channel, which leaves them far from infinity; None if unsupported."""
    if getattr(image, "sink_dtype", None) != torch.float32 or (in_place and not image.changes_in_place):
        return None
    values = (float(constant),) if is_number(constant) else _of_each_channel(constant, image.sink_shape[0])
    fits = values and all(abs(value) <= _LARGEST for value in values) and not has_minus_zero(values)
    return values if fits else None


def _of_each_channel(constant: Any, channels: int) -> tuple[float, ...]:
    """The values of a tensor [C, 1, 1], as programs write a mean; () for anything else."""
    is_plain = type(constant) is torch.Tensor and constant.dtype == torch.float32 and constant.device.type == "cpu"
    if not is_plain or constant.requires_grad or constant.shape not in ((channels, 1, 1), (1, 1, 1)):
        return ()
    return tuple(constant.flatten().tolist())


def _normalize_examples(a: Arguments) -> Iterator[Example]:
    yield Example("normalize", ([0.4] * a.channels, [0.25] * a.channels))
    if a.scale != 1:
        yield Example("arithmetic", label="(x - 0.45) / 0.225 + 0.1", run=lambda image: (image - 0.45) / 0.225 + 0.1)
        yield Example("arithmetic", label="in place", run=lambda image: image.sub_(0.5).div_(0.25))


def _product_examples(a: Arguments) -> Iterator[Example]:
    if a.scale != 1:
        yield Example("arithmetic", label="x * 2 - 1", run=lambda image: image * 2 - 1)
        yield Example("arithmetic", label="product in place", run=lambda image: image.mul_(-1.7))


Operation(
    "normalize",
    stock=stock_of("normalize"),
    record={
        **both("normalize", _normalize),
        **_ways("sub", _shifted),
        **_ways("add", _added),
        **_ways("div", _divided),
        **dict.fromkeys((torch.rsub, torch.Tensor.__rsub__), _subtracted_from),
    },
    lower=_lower_normalize,
    is_value=True,
    examples=_normalize_examples,
    transforms={"Normalize": [sample(*STATISTICS), sample(*STATISTICS, inplace=True, label="inplace=True")]},
    leaves_range=always,
)
Operation(
    "product",
    stock={"mul": lambda image, factor: image * factor},
    record=_ways("mul", _multiplied),
    lower=lambda state, factor: _lower_normalize(state, (0.0,), (1 / factor,)),
    promise=EXACT_BYTES,
    is_value=True,
    examples=_product_examples,
    leaves_range=always,
)
