"""What stock code calls the types of handles, for the dicts of v2 transforms that are keyed by exact types."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torchvision import tv_tensors

from torch_sink.image.handles.augmix import BatchOfOne
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.handles.tensor import LazyTensor, LazyTVImage

STOCK_TYPES: dict[type, type] = {
    LazyImage: Image.Image,
    LazyTensor: torch.Tensor,
    BatchOfOne: torch.Tensor,
    LazyTVImage: tv_tensors.Image,
}


def get_fill(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Stand-in for `_get_fill`, which looks a fill up by the type of the input."""

    @functools.wraps(stock)
    def _get_fill(fill_dict: Any, inpt_type: type) -> Any:
        return stock(fill_dict, STOCK_TYPES.get(inpt_type, inpt_type))

    return _get_fill


def to_dtype_transform(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Stand-in for `v2.ToDtype.transform`, whose `dtype` may be a dict by the type of the input."""

    @functools.wraps(stock)
    def transform(self: Any, inpt: Any, params: dict[str, Any]) -> Any:
        stock_type = STOCK_TYPES.get(type(inpt))
        if stock_type is not None and isinstance(self.dtype, dict) and stock_type in self.dtype:
            with_handle = copy.copy(self)
            with_handle.dtype = {**self.dtype, type(inpt): self.dtype[stock_type]}
            return stock(with_handle, inpt, params)
        return stock(self, inpt, params)

    return transform
