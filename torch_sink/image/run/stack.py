"""What is recorded on several images at once: on stacks of images, as programs make them after `FiveCrop`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_sink.image.core import settings
from torch_sink.image.core.ops import recorded
from torch_sink.image.core.recording import Recording
from torch_sink.image.handles.tensor import HANDLES
from torch_sink.image.run.batch import Images, LazyBatch
from torch_sink.image.run.collate import collate_handles, gives_an_image

# Functionals that give a stack, bit for bit, what they give each of its images.
EACH_ALONE = frozenset(
    ("normalize", "convert_image_dtype", "to_dtype", "hflip", "vflip", "horizontal_flip", "vertical_flip")
)


# --- functions that record on several images and on stacks


@recorded(torch.stack, of="an image")
def _stack(tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> Any:
    if dim != 0 or kwargs or any(item.ndim != 3 for item in tensors) or gives_an_image(tensors):
        return NotImplemented
    stack = _stack_of(tensors)
    return collate_handles(tensors) if stack is None else stack


@recorded(torch.cat, of="an image")
def _cat_channels(tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    """Records the same gray image three times as `repeat(3, 1, 1)`."""
    if not isinstance(tensors, (list, tuple)) or len(tensors) != 3 or dim not in (0, -3) or kwargs:
        return NotImplemented
    first = tensors[0]
    if not all(type(image) in HANDLES and image.is_recording for image in tensors) or first.shape[0] != 1:
        return NotImplemented
    one, *others = (image.lazy_recording for image in tensors)
    is_same = all(other.source is one.source and other.calls == one.calls for other in others)
    return first.repeat(3, 1, 1) if is_same else NotImplemented


def _stack_of(images: Sequence[Any]) -> LazyBatch | None:
    """A stack of recorded images; None where pixels are made at once, or the images differ or are not all recorded."""
    active = settings.settled()
    if active is None or active.executes_at_once:
        return None
    if not all(type(item) is Recording or (type(item) in HANDLES and item.is_recording) for item in images):
        return None
    parts = [item if type(item) is Recording else item.lazy_recording for item in images]
    if len({(part.shape, part.dtype) for part in parts}) > 1:
        return None
    return LazyBatch(Images(parts, active.device, active.interpreted))


def _joined(items: Any, dim: int, is_new: bool) -> Any:
    """Joins stacks and batches of one along a new first dimension, as `torch.stack`, or along theirs, as `torch.cat`.

    From samples [k, C, H, W] the one makes a batch [N, k, C, H, W], the other a longer stack.
    """
    if dim != 0 or not all(type(item) is LazyBatch and item.is_recording for item in items):
        return NotImplemented
    kinds = {(item.shape if is_new else item.shape[1:], item.dtype) for item in items}
    if len(kinds) != 1 or (not is_new and items[0].ndim != 4):
        return NotImplemented
    images: list[Any] = []
    for item in items:
        of_item = item.images.recordings or [item.lazy_base]
        if of_item[0] is None:
            return NotImplemented
        images += of_item
    stack = _stack_of(images)
    if stack is None:
        return NotImplemented
    return LazyBatch(stack.images, (len(items), *items[0].shape)) if is_new else stack


@recorded(torch.stack, of="a batch")
def _stacked(items: Any, dim: int = 0) -> Any:
    return _joined(items, dim, is_new=True)


@recorded(torch.cat, torch.concat, of="a batch")
def _concatenated(items: Any, dim: int = 0) -> Any:
    return _joined(items, dim, is_new=False)


def _gives_parts(stack: Any) -> bool:
    is_stack = type(stack) is LazyBatch and stack.is_recording and len(stack.lazy_shape) == 4
    return is_stack and bool(stack.images.recordings)


@recorded(torch.Tensor.__getitem__, of="a batch")
def _part(stack: Any, index: Any) -> Any:
    if not _gives_parts(stack) or type(index) is not int or not -len(stack) <= index < len(stack):
        return NotImplemented
    return stack.images.give(index % len(stack))


@recorded(torch.unbind, torch.Tensor.unbind, of="a batch")
def _unbind(stack: Any, dim: int = 0) -> Any:
    return tuple(map(stack.images.give, range(len(stack)))) if _gives_parts(stack) and dim == 0 else NotImplemented


def _has_views(stack: Any) -> bool:
    """Whether views of it are recorded: not of a batch of one, a view of its image, nor of mixed images."""
    is_stack = type(stack) is LazyBatch and stack.is_recording and stack.lazy_base is None
    return is_stack and not (stack.images.placed is not None and stack.images.batch.mixes)


@recorded(torch.Tensor.view, torch.Tensor.reshape, torch.reshape, of="a batch")
def _view(stack: Any, *sizes: Any, **kwargs: Any) -> Any:
    """A view with other leading sizes, such as `view(-1, c, h, w)`."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else sizes
    if not _has_views(stack) or kwargs or not all(type(at) is int for at in sizes):
        return NotImplemented
    try:
        size = tuple(torch.empty(stack.lazy_shape, device="meta").view(sizes).shape)
    except RuntimeError:
        return NotImplemented  # stock code raises
    if size[-3:] != stack.lazy_shape[-3:]:
        return NotImplemented
    return LazyBatch(stack.images, size) if len(size) > 3 else NotImplemented


@recorded(torch.flatten, torch.Tensor.flatten, of="a batch")
def _flatten(stack: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not _has_views(stack) or start_dim != 0 or end_dim % stack.ndim != stack.ndim - 4:
        return NotImplemented
    return _view(stack, -1, *stack.lazy_shape[-3:])
