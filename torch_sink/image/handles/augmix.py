"""Recording AugMix: torchvision's own code runs, draws included, on handles that can be weighted and added up.

`AugMix.forward` views an image [C, H, W] as a batch of one, sends it through chains of functionals, adds the results up
in float32 as weights times values, and converts the sum back to bytes. The handles here follow it through these steps;
what comes out is the handle of the image with one call recorded. A step that cannot be followed, such as a functional
without a kernel, makes the real tensor as everywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torchvision.tv_tensors import _torch_function_helpers as return_types

from torch_sink.image.core.ops import Op, TensorArgument
from torch_sink.image.handles.lazy import without_memory
from torch_sink.image.handles.names import named_as
from torch_sink.image.handles.tensor import HANDLES, RECORDED, LazyTensor, LazyTVImage, recorded

# True inside `AugMix.forward`; elsewhere a view shares memory with its image, which these handles do not.
_inside: ContextVar[bool] = ContextVar("inside AugMix", default=False)


def forward(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """For `AugMix.forward` of `transforms` and of `transforms.v2`."""
    token = _inside.set(True)
    try:
        return stock(*args, **kwargs)
    finally:
        _inside.reset(token)


@named_as(torch.Tensor)
class BatchOfOne(LazyTensor):
    """A handle viewed as [1, C, H, W]; it records as the image [C, H, W] that `lazy_shape` speaks of."""

    is_branch_of_augmix = True

    @staticmethod
    def __new__(cls: Any, source: Any, ops: tuple[Op, ...], shape: Sequence[int], dtype: torch.dtype) -> Any:
        handle = without_memory(cls, torch.Size((1, *shape)), dtype)
        handle.__dict__.update(lazy_source=source, lazy_ops=ops, lazy_shape=torch.Size(shape), lazy_dtype=dtype)
        return handle

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size((1, *self.lazy_shape)) if self.is_recording else super().shape

    @staticmethod
    def _stock_type(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)


@named_as(torch.Tensor)
class _Sum(LazyTensor):
    """float32 [1, C, H, W] or [C, H, W]: results of chains times their weights; "augmix" is its last call."""

    def _stock_type(self, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return tensor.view(self.lazy_shape)


@recorded(torch.Tensor.view)
@recorded(torch.Tensor.reshape)
def _view(handle: Any, *sizes: Any, **kwargs: Any) -> Any:
    """The first step, an image as a batch of one; and the last but one, the sum as an image."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else sizes
    if not _inside.get() or not handle.is_recording or kwargs:
        return NotImplemented
    if type(handle) is _Sum and sizes == tuple(handle.lazy_shape)[1:]:
        return _Sum(handle.lazy_source, handle.lazy_ops, sizes, torch.float32)
    keeps_type = type(handle) is LazyTVImage and return_types._must_return_subclass()
    is_image = type(handle) in HANDLES and handle.lazy_dtype == torch.uint8 and not keeps_type
    if not is_image or sizes != (1, *handle.lazy_shape):
        return NotImplemented
    return BatchOfOne(handle.lazy_source, handle.lazy_ops, handle.lazy_shape, handle.lazy_dtype)


_multiply, _add_constant, _convert = (RECORDED[each] for each in (torch.Tensor.mul, torch.Tensor.add_, torch.Tensor.to))


@recorded(torch.Tensor.mul)
def _weigh(weight: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A weight, float32 [1, 1, 1, 1], times the image or the result of a chain."""
    if type(batch) is not BatchOfOne:
        return _multiply(weight, batch, *args, **kwargs)
    if not batch.is_recording or type(weight) is not torch.Tensor:
        return NotImplemented
    if weight.shape != (1, 1, 1, 1) or weight.dtype != torch.float32 or weight.requires_grad:
        return NotImplemented
    value = weight.item()
    if not 0 <= value < math.inf:
        return NotImplemented
    ops = (*batch.lazy_ops, _augmix(((value, ()),), torch.float32))
    return _Sum(batch.lazy_source, ops, (1, *batch.lazy_shape), torch.float32)


@recorded(torch.Tensor.add_)
def _add(total: Any, other: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Adds the weighted result of a chain to what began as the weighted image, in place."""
    if type(total) is not _Sum:
        return _add_constant(total, other, *args, **kwargs)
    if type(other) is not _Sum or args or kwargs or total.lazy_source is not other.lazy_source:
        return NotImplemented
    *image, (_, (terms, _)) = total.lazy_ops
    *result, (_, (added, _)) = other.lazy_ops
    if not (total.is_recording and other.is_recording) or result[: len(image)] != image or len(added) > 1:
        return NotImplemented
    chain = tuple(result[len(image) :])
    if any(type(argument) is TensorArgument for op in chain for argument in op.args):
        return NotImplemented  # only among a call's own arguments are they packed with the batch
    ops = (*image, _augmix((*terms, (added[0][0], chain)), torch.float32))
    total.__dict__["lazy_ops"] = ops
    return total


@recorded(torch.Tensor.to)
def _to(total: Any, *args: Any, **kwargs: Any) -> Any:
    """The sum in the type of the image: what AugMix returns."""
    if type(total) is not _Sum:
        return _convert(total, *args, **kwargs)
    dtype = kwargs.get("dtype")
    if not total.is_recording or args or len(kwargs) != 1 or total.ndim != 3:
        return NotImplemented
    *image, (_, (terms, _)) = total.lazy_ops
    # What is no byte when it is cut off becomes another one on another machine.
    if dtype != torch.uint8 or 255 * sum(weight for weight, _ in terms) >= 255.9:
        return NotImplemented
    return LazyTensor(total.lazy_source, (*image, _augmix(terms, dtype)), total.lazy_shape, dtype)


def _augmix(terms: tuple[tuple[float, tuple[Op, ...]], ...], dtype: torch.dtype) -> Op:
    return Op("augmix", (terms, dtype))
