"""Recording sums, differences, products and quotients of a float image and a constant, as `x * 2 - 1` makes them.

A sum, a difference or a quotient is a normalization with one step left out, (x - mean) / std, which gives stock code's
very bits. A product is a call of its own, which is made while a table of 256 values stands for the floats; behind that
it is a division by the reciprocal where this is exact, for powers of two, and other products fall back.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torchvision.tv_tensors import _torch_function_helpers as return_types

from torch_sink.image.core.arguments import is_number
from torch_sink.image.core.exactness import since_conversion
from torch_sink.image.core.ops import Op
from torch_sink.image.handles.tensor import HANDLES, LazyTVImage, recorded
from torch_sink.image.lower.lowering import is_tabled

_SMALLEST, _LARGEST = 1e-6, 1e6


@recorded(torch.Tensor.sub)
@recorded(torch.sub)
def _sub(image: Any, constant: Any = None, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _normalized(image, constant, is_mean=True)


@recorded(torch.Tensor.add)
@recorded(torch.add)
def _add(image: Any, constant: Any = None, **kwargs: Any) -> Any:
    return NotImplemented if kwargs or not is_number(constant) else _normalized(image, -constant, is_mean=True)


@recorded(torch.Tensor.div)
@recorded(torch.div)
def _div(image: Any, constant: Any = None, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _normalized(image, constant, is_mean=False)


@recorded(torch.mul)
def multiplied(image: Any, constant: Any = None, **kwargs: Any) -> Any:
    """The image times a constant, or the other way around."""
    if is_number(image):
        image, constant = constant, image
    if kwargs or not _records(image, constant):
        return NotImplemented
    if all(map(is_tabled, since_conversion(image))):
        return _typed(image, Op("mul", (float(constant),)))
    return _normalized(image, 1 / constant, is_mean=False) if abs(math.frexp(constant)[0]) == 0.5 else NotImplemented


def _normalized(image: Any, constant: Any, *, is_mean: bool) -> Any:
    if not _records(image, constant) or (not is_mean and abs(constant) < _SMALLEST):
        return NotImplemented
    mean, std = (float(constant), 1.0) if is_mean else (0.0, float(constant))
    return _typed(image, Op("v1.normalize", ((mean,), (std,))))


def _records(image: Any, constant: Any) -> bool:
    """True for a handle of float32 values and a number that leaves them far from infinity."""
    is_float = type(image) in HANDLES and image.is_recording and image.sink_dtype == torch.float32
    return is_float and is_number(constant) and abs(constant) <= _LARGEST


def _typed(image: Any, op: Op) -> Any:
    """The handle with one more call; of a `tv_tensors.Image`, the type that torchvision's user asked for."""
    result = image.record(op)
    if type(image) is LazyTVImage and not return_types._must_return_subclass():
        result = result.as_subclass(torch.Tensor)
    return result
