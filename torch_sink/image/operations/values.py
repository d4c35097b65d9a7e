"""Conversions of images and types; normalization, and arithmetic with constants.

A sum, a difference or a quotient is a normalization with one step left out, (x - mean) / std, which gives stock code's
very bits. A product is another call: stock code's bits while a table of 256 values stands for the floats, and
behind that a division by the reciprocal, whose last bit may differ where the constant is no power of two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms import functional as F
from torchvision.transforms.v2 import functional as F_v2

from torch_sink.image.core.arguments import (
    has_minus_zero,
    is_constant,
    is_number,
    is_scaled_bytes,
    is_tabled,
)
from torch_sink.image.core.lowering import LoweredImage, float_bits, three
from torch_sink.image.core.ops import EXACT_BYTES, NUMERIC, Op, Operation, Recorder, always, both
from torch_sink.image.core.recording import Recording, record_maybe_in_place
from torch_sink.image.operations.functionals import as_image, stock_of
from torch_sink.image.operations.pointwise import pointwise
from torch_sink.triton_kernels.rows import Kind

# --- from images to tensors and back


def _to_pil_image(image: Recording, mode: str | None = None) -> Any:
    made = as_image(image) if image.mode is None else NotImplemented
    return made if made is not NotImplemented and mode in (None, made.mode) else NotImplemented


def _conversion(name: str, stock: Callable[..., Any], **fields: Any) -> None:
    """Makes the operation of a conversion of Pillow images known."""
    op = Op(name)

    def record(image: Recording) -> Any:
        if image.mode is None:
            return image if name == "to_image" else NotImplemented
        dtype = torch.get_default_dtype() if name == "to_tensor" else torch.uint8
        return image.as_tensor(op, dtype) if dtype in (torch.uint8, torch.float32) else NotImplemented

    Operation(
        name,
        stock={name: stock},
        record={f"functional.{name}": record},
        is_value=True,
        takes_palettes=True,
        **fields,
    )


_conversion("to_tensor", F.to_tensor, result=lambda op: torch.float32)
_conversion("pil_to_tensor", F.pil_to_tensor)
_conversion("to_image", F_v2.to_image)
Operation(
    "to Pillow image",
    stock={"to_pil_image": F.to_pil_image},
    record={"functional.to_pil_image": _to_pil_image},
    result=lambda op: torch.uint8,
)

# --- types


def _convert_dtype(family: str, image: Recording, dtype: torch.dtype = torch.float32) -> Any:
    return _to_type(image, dtype, Op("v1.convert_image_dtype", (dtype,)))


def _to_dtype(family: str, image: Recording, dtype: torch.dtype = torch.float32, scale: bool = False) -> Any:
    return _to_type(image, dtype, Op("v2.to_dtype", (dtype, scale)))


def _to_type(image: Recording, dtype: torch.dtype, op: Op) -> Any:
    if image.dtype == dtype:
        return image
    makes_floats = image.dtype in NUMERIC and dtype in (torch.float32, torch.float16, torch.bfloat16)
    makes_bytes = dtype == torch.uint8 and not op.operation.leaves_range(op) and is_scaled_bytes(image)
    return image.record(op, dtype=dtype) if makes_floats or makes_bytes else NotImplemented


def to_type(image: Recording, dtype: Any = None, non_blocking: Any = False) -> Any:
    """The recorder of `Tensor.to` with a type, without one `NotImplemented`; `run.collate` moves images."""
    if not isinstance(dtype, torch.dtype):
        return NotImplemented
    # What v2 makes of floats in half precision, or of bytes that it does not scale, is the type alone as well.
    made = _to_dtype("v2", image, dtype)
    return pointwise("to", image, dtype) if made is NotImplemented else made


def _type(image: Recording, dtype: Any = None, non_blocking: Any = False) -> Any:
    return torch.empty(0, dtype=image.dtype, device="cpu").type() if dtype is None else to_type(image, dtype)


def _becomes(dtype: torch.dtype) -> Recorder:
    return lambda image: to_type(image, dtype)


def _type_as(image: Recording, other: Any) -> Any:
    is_here = type(other) is Recording or (isinstance(other, torch.Tensor) and other.device.type == "cpu")
    return to_type(image, other.dtype) if type(image) is Recording and is_here else NotImplemented


_TYPES = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "bool": torch.bool}
_TYPES |= {"byte": torch.uint8, "short": torch.int16, "int": torch.int32, "long": torch.int64}


Operation(
    "to dtype",
    stock={"v1.convert_image_dtype": F_tensor.convert_image_dtype, "v2.to_dtype": F_v2.to_dtype_image},
    record={
        "v1.convert_image_dtype": _convert_dtype,
        "v2.to_dtype": _to_dtype,
        torch.Tensor.type: _type,
        torch.Tensor.type_as: _type_as,
        **{getattr(torch.Tensor, name): _becomes(dtype) for name, dtype in _TYPES.items()},
    },
    is_value=True,
    leaves_range=lambda op: op.name == "v2.to_dtype" and not op.args[1],
    result=lambda op: op.args[0],
)

# --- normalization


def _lower_normalize(lowered: LoweredImage, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """NORMALIZE: (three means, three standard deviations), by their bits."""
    lowered.add(Kind.NORMALIZE, *float_bits(*three(mean), *three(std)))


# A smaller std may be zero in the image's dtype, which stock code refuses.
_SMALLEST_STD = 1e-6


def _statistics(values: Any, channels: int) -> tuple[float, ...] | None:
    """The mean or std of a normalization as a tuple of floats, or None if unsupported."""
    if (is_constant(values) or isinstance(values, np.ndarray)) and values.ndim == 1:
        values = values.tolist()
    if not isinstance(values, (list, tuple)) or len(values) not in (1, channels):
        return None
    try:
        numbers = _numbers(*values)
    except TypeError:  # lists, which have no hash
        return None
    return None if numbers is None or (0 in numbers and has_minus_zero(values)) else numbers


@functools.lru_cache(maxsize=256, typed=True)
def _numbers(*values: Any) -> tuple[float, ...] | None:
    return tuple(map(float, values)) if all(map(is_number, values)) else None


_LISTS = (list, tuple)


@functools.lru_cache(maxsize=256, typed=True)
def _usual(family: str, channels: int, *values: Any) -> Op | None:
    """The call for a mean and a std of each channel; None where they are to be looked at more closely."""
    mean, std = values[:channels], values[channels:]
    if len(std) != channels or not all(map(is_number, values)) or 0 in values or min(map(abs, std)) < _SMALLEST_STD:
        return None
    return Op(f"{family}.normalize", (tuple(map(float, mean)), tuple(map(float, std))))


def _normalize(family: str, image: Recording, mean: Any, std: Any, inplace: bool = False) -> Any:
    channels = image.shape[0]
    if image.dtype is torch.float32 and not inplace and type(mean) in _LISTS and type(std) in _LISTS:
        try:
            op = _usual(family, channels, *mean, *std) if len(mean) == channels else None
        except TypeError:  # lists have no hash
            op = None
        if op is not None:
            return image.record(op)
    if family == "v2" and image.dtype == torch.float32 and not inplace:
        # v2's kernel makes three channels of a gray image where there are three statistics.
        is_spread = image.shape[0] == 1 and _statistics(mean, 3) is not None and _statistics(std, 3) is not None
        if is_spread and not len(mean) == len(std) == 1:
            image = image.record(Op("v2.grayscale_to_rgb"), (3, *image.shape[1:]))
    channels = image.shape[0]
    mean, std = _statistics(mean, channels), _statistics(std, channels)
    if mean is None or std is None or not image.dtype.is_floating_point:
        return NotImplemented
    if image.dtype != torch.float32 and not is_tabled(image):
        return NotImplemented
    if min(map(abs, std)) < _SMALLEST_STD:
        return NotImplemented
    return record_maybe_in_place(image, inplace, f"{family}.normalize", (mean, std))


# --- arithmetic

_SMALLEST, _LARGEST = 1e-6, 1e6
_Arithmetic = Callable[[Any, Any, bool], Any]


def _ways(name: str, record: _Arithmetic) -> dict[Any, Recorder]:
    """The recorders of an arithmetic operator of torch, which programs call as a function, a method, or in place."""

    def recorded(image: Recording, constant: Any, in_place: bool) -> Any:
        made = record(image, constant, in_place)
        return pointwise(name, image, constant, in_place=in_place) if made is NotImplemented else made

    def made(image: Recording, constant: Any = None) -> Any:
        return recorded(image, constant, False)

    def made_in_place(image: Recording, constant: Any = None) -> Any:
        return recorded(image, constant, True)

    return {
        getattr(torch, name): made,
        getattr(torch.Tensor, name): made,
        getattr(torch.Tensor, f"{name}_"): made_in_place,
    }


def _shifted(image: Recording, mean: Any, in_place: bool) -> Any:
    image = _as_floats(image, type(mean) is float and not in_place)
    means = _constants(image, mean)
    if means is None:
        return NotImplemented
    return record_maybe_in_place(image, in_place, "v1.normalize", (means, (1.0,)))


def _added(image: Recording, constant: Any, in_place: bool) -> Any:
    is_constant = is_number(constant) or (type(constant) is torch.Tensor and constant.dtype != torch.bool)
    # What 0 is added to is not -0 afterwards; -0 of an integer would be 0.
    is_zero = type(constant) is int and constant == 0
    return _shifted(image, -constant if is_constant and not is_zero else None, in_place)


def _divided(image: Recording, std: Any, in_place: bool) -> Any:
    if is_number(std) and std == 255 and not in_place and _is_bytes(image):
        return _convert_dtype("v1", image)
    image = _as_floats(image, is_number(std) and not in_place)
    stds = _constants(image, std)
    if stds is None or min(map(abs, stds)) < _SMALLEST:
        return NotImplemented
    return record_maybe_in_place(image, in_place, "v1.normalize", ((0.0,), stds))


def _multiplied(image: Recording, factor: Any, in_place: bool) -> Any:
    """Records the product of an image and a constant, in either order."""
    image, factor = (factor, image) if is_number(image) else (image, factor)
    image = _as_floats(image, type(factor) is float and not in_place)
    if not is_number(factor) or abs(factor) < _SMALLEST or _constants(image, factor) is None:
        return NotImplemented
    return record_maybe_in_place(image, in_place, "mul", (float(factor),))


def _subtracted_from(image: Recording, constant: Any = None) -> Any:
    """Records `constant - image`, and for bytes `255 - image` alone, which is an inversion."""
    is_byte = type(image) is Recording and image.dtype == torch.uint8 and type(constant) is int
    if is_byte and constant == 255:
        return image.record(Op("v1.invert"))
    is_shift = is_number(constant) and constant != 0 and not is_byte
    negative = _multiplied(image, -1.0, False) if is_shift else NotImplemented
    made = negative if negative is NotImplemented else _shifted(negative, -constant, False)
    return pointwise("rsub", image, constant) if made is NotImplemented else made


def _is_bytes(image: Any) -> bool:
    return type(image) is Recording and image.dtype == torch.uint8 and torch.get_default_dtype() == torch.float32


def _as_floats(image: Any, becomes_floats: bool) -> Any:
    """The image, converted to floats where it is of bytes: arithmetic with a float, and every quotient, begins so."""
    return _to_dtype("v2", image) if becomes_floats and _is_bytes(image) else image


def _constants(image: Any, constant: Any) -> tuple[float, ...] | None:
    """An operand for float32 values as one float, or one a channel; None where it is too large or unsupported."""
    if type(image) is not Recording or image.dtype != torch.float32:
        return None
    if is_number(constant):
        values = (float(constant),)
    elif type(constant) is torch.Tensor and constant.dtype == torch.float32 and is_constant(constant):
        # A tensor [C, 1, 1], as programs write a mean.
        if constant.shape not in ((image.shape[0], 1, 1), (1, 1, 1)):
            return None
        values = tuple(constant.flatten().tolist())
    else:
        return None
    fits = all(abs(value) <= _LARGEST for value in values) and not has_minus_zero(values)
    return values if fits else None


Operation(
    "normalize",
    stock=stock_of("normalize"),
    record={
        **both("normalize", _normalize),
        **_ways("sub", _shifted),
        **_ways("add", _added),
        **_ways("div", _divided),
        **dict.fromkeys((torch.rsub, torch.Tensor.__rsub__), _subtracted_from),
        torch.Tensor.__rdiv__: lambda image, constant: pointwise("__rdiv__", image, constant),
    },
    lower=_lower_normalize,
    is_value=True,
    leaves_range=always,
)
Operation(
    "product",
    stock={"mul": lambda image, factor: image * factor},
    record=_ways("mul", _multiplied),
    lower=lambda lowered, factor: _lower_normalize(lowered, (0.0,), (1 / factor,)),
    promise=EXACT_BYTES,
    is_value=True,
    leaves_range=always,
)
