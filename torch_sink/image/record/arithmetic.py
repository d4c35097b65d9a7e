"""Recording sums, differences, products and quotients of a float image and a constant, as `x * 2 - 1` makes them.

A sum, a difference or a quotient is a normalization with one step left out, (x - mean) / std, which gives stock code's
very bits. A product is a call of its own: stock code's bits while a table of 256 values stands for the floats, and
behind that a division by the reciprocal, whose last bit may differ where the constant is no power of two.
"""

from __future__ import annotations

from typing import Any

import torch
from torchvision.tv_tensors import _torch_function_helpers as return_types

from torch_sink.image.core.arguments import is_number
from torch_sink.image.core.exactness import since_conversion
from torch_sink.image.handles.tensor import HANDLES, LazyTVImage, recorded
from torch_sink.image.lower.lowering import is_tabled
from torch_sink.image.record.tensor_values import changes_in_place, record_maybe_in_place

_SMALLEST, _LARGEST = 1e-6, 1e6


@recorded(torch.Tensor.sub)
@recorded(torch.sub)
def _sub(image: Any, constant: Any = None, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _shifted(image, constant)


@recorded(torch.Tensor.add)
@recorded(torch.add)
def _add(image: Any, constant: Any = None, **kwargs: Any) -> Any:
    return NotImplemented if kwargs or not is_number(constant) else _shifted(image, -constant)


@recorded(torch.Tensor.div)
@recorded(torch.div)
def _div(image: Any, constant: Any = None, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _divided(image, constant)


@recorded(torch.mul)
def multiplied(image: Any, constant: Any = None, **kwargs: Any) -> Any:
    """The image times a constant, or the other way around."""
    if is_number(image):
        image, constant = constant, image
    return NotImplemented if kwargs else _multiplied(image, constant)


@recorded(torch.Tensor.sub_)
def _sub_in_place(image: Any, constant: Any = None, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _shifted(image, constant, in_place=True)


def added_in_place(image: Any, constant: Any = None, **kwargs: Any) -> Any:
    """The image after a constant was added to it in place."""
    return NotImplemented if kwargs or not is_number(constant) else _shifted(image, -constant, in_place=True)


@recorded(torch.Tensor.div_)
def _div_in_place(image: Any, constant: Any = None, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _divided(image, constant, in_place=True)


@recorded(torch.Tensor.mul_)
def _mul_in_place(image: Any, constant: Any = None, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _multiplied(image, constant, in_place=True)


def _shifted(image: Any, mean: Any, *, in_place: bool = False) -> Any:
    if not _records(image, mean, in_place):
        return NotImplemented
    return _typed(image, "v1.normalize", ((float(mean),), (1.0,)), in_place)


def _divided(image: Any, std: Any, *, in_place: bool = False) -> Any:
    if not _records(image, std, in_place) or abs(std) < _SMALLEST:
        return NotImplemented
    return _typed(image, "v1.normalize", ((0.0,), (float(std),)), in_place)


def _multiplied(image: Any, factor: Any, *, in_place: bool = False) -> Any:
    if not _records(image, factor, in_place):
        return NotImplemented
    if abs(factor) < _SMALLEST and not all(map(is_tabled, since_conversion(image))):
        return NotImplemented
    return _typed(image, "mul", (float(factor),), in_place)


def _records(image: Any, constant: Any, in_place: bool) -> bool:
    """True for a handle of float32 values and a number that leaves them far from infinity."""
    if type(image) not in HANDLES or not image.is_recording or image.sink_dtype != torch.float32:
        return False
    fits = is_number(constant) and abs(constant) <= _LARGEST
    return fits and (not in_place or changes_in_place(image))


def _typed(image: Any, name: str, args: tuple[Any, ...], in_place: bool) -> Any:
    """The handle with one more call; of a `tv_tensors.Image`, the type that torchvision's user asked for."""
    result = record_maybe_in_place(image, in_place, name, args)
    if type(image) is LazyTVImage and not return_types._must_return_subclass():
        result = result.as_subclass(torch.Tensor)
    return result
