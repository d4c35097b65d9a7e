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

from torch_sink.image.core.ops import RECORDERS_OF, Op, TensorArgument, if_it_fits, recorded
from torch_sink.image.handles.lazy import without_memory
from torch_sink.image.handles.names import named_as
from torch_sink.image.handles.tensor import HANDLES, LazyTensor, LazyTVImage

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


BatchOfOne.calls, _Sum.calls = RECORDERS_OF["a view in AugMix"], RECORDERS_OF["a sum in AugMix"]
_VIEWS = torch.Tensor.view, torch.Tensor.reshape


def _sizes_of(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arguments[0]) if len(arguments) == 1 and isinstance(arguments[0], (list, tuple)) else arguments


@recorded(*_VIEWS, of="an image")
@if_it_fits
def _as_batch(image: Any, *sizes: Any) -> Any:
    """The first step, an image as a batch of one."""
    if not _inside.get() or type(image) not in HANDLES or not image.is_recording or image.lazy_dtype != torch.uint8:
        return NotImplemented
    keeps_type = type(image) is LazyTVImage and return_types._must_return_subclass()
    if keeps_type or _sizes_of(sizes) != (1, *image.lazy_shape):
        return NotImplemented
    return BatchOfOne(image.lazy_source, image.lazy_ops, image.lazy_shape, image.lazy_dtype)


@recorded(*_VIEWS, of="a sum in AugMix")
@if_it_fits
def _as_image(total: Any, *sizes: Any) -> Any:
    """The last step but one, the sum as an image."""
    sizes = _sizes_of(sizes)
    if not _inside.get() or not total.is_recording or sizes != tuple(total.lazy_shape)[1:]:
        return NotImplemented
    return _Sum(total.lazy_source, total.lazy_ops, sizes, torch.float32)


@recorded(torch.Tensor.mul, of="a view in AugMix")
@if_it_fits
def _weigh(weight: Any, batch: Any = None) -> Any:
    """A weight, float32 [1, 1, 1, 1], times the image or the result of a chain."""
    if type(batch) is not BatchOfOne or not batch.is_recording or type(weight) is not torch.Tensor:
        return NotImplemented
    if weight.shape != (1, 1, 1, 1) or weight.dtype != torch.float32 or weight.requires_grad:
        return NotImplemented
    value = weight.item()
    if not 0 <= value < math.inf:
        return NotImplemented
    ops = (*batch.lazy_ops, _augmix(((value, ()),), torch.float32))
    return _Sum(batch.lazy_source, ops, (1, *batch.lazy_shape), torch.float32)


@recorded(torch.Tensor.add_, of="a sum in AugMix")
@if_it_fits
def _add(total: Any, other: Any = None) -> Any:
    """Adds the weighted result of a chain to what began as the weighted image, in place."""
    if type(total) is not _Sum or type(other) is not _Sum or total.lazy_source is not other.lazy_source:
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


@recorded(torch.Tensor.to, of="a sum in AugMix")
@if_it_fits
def _to(total: Any, dtype: Any = None) -> Any:
    """The sum in the type of the image: what AugMix returns."""
    if not total.is_recording or total.ndim != 3:
        return NotImplemented
    *image, (_, (terms, _)) = total.lazy_ops
    # What is no byte when it is cut off becomes another one on another machine.
    if dtype != torch.uint8 or 255 * sum(weight for weight, _ in terms) >= 255.9:
        return NotImplemented
    return LazyTensor(total.lazy_source, (*image, _augmix(terms, dtype)), total.lazy_shape, dtype)


def _augmix(terms: tuple[tuple[float, tuple[Op, ...]], ...], dtype: torch.dtype) -> Op:
    return Op("augmix", (terms, dtype))
