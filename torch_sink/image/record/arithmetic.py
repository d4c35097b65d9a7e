"""Recording sums, differences, products and quotients of a float image and a constant, as `x * 2 - 1` makes them.

Each is a normalization with one step left out, (x - mean) / std, which gives stock code's very bits: a product as a
division by the reciprocal where that is exact, for powers of two; other products fall back.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torchvision.tv_tensors import _torch_function_helpers as return_types

from torch_sink.image.lazy_tensor import HANDLES, LazyTVImage, recorded
from torch_sink.image.ops import Op
from torch_sink.image.record.arguments import is_number

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
    if kwargs or not is_number(constant) or abs(math.frexp(constant)[0]) != 0.5:
        return NotImplemented
    return _normalized(image, 1 / constant, is_mean=False)


def _normalized(image: Any, constant: Any, *, is_mean: bool) -> Any:
    if type(image) not in HANDLES or not image.is_recording or image.sink_dtype != torch.float32:
        return NotImplemented
    if not is_number(constant) or not abs(constant) <= _LARGEST or (not is_mean and abs(constant) < _SMALLEST):
        return NotImplemented
    mean, std = (float(constant), 1.0) if is_mean else (0.0, float(constant))
    result = image.record(Op("v1.normalize", ((mean,), (std,))))
    # Of a `tv_tensors.Image` torchvision returns the type that its user asked for.
    if type(image) is LazyTVImage and not return_types._must_return_subclass():
        result = result.as_subclass(torch.Tensor)
    return result
