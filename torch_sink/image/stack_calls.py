"""What records on several images, and on stacks of them: `torch.stack`, `torch.cat`, parts, other shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_sink.image.core import state as backend_state
from torch_sink.image.execute.batch import RECORDED_ON_BATCHES, LazyBatch
from torch_sink.image.execute.collate import collate_handles
from torch_sink.image.handles.tensor import HANDLES, LazyTensor, recorded
from torch_sink.image.stack import LazyStack


@recorded(torch.stack)
def _stack(tensors: Sequence[Any], dim: int = 0, *, out: torch.Tensor | None = None) -> Any:
    if dim != 0 or any(item.ndim != 3 for item in tensors):
        return NotImplemented
    if out is not None:
        return out.copy_(collate_handles(tensors))
    stack = _stack_of(tensors)
    return collate_handles(tensors) if stack is None else stack


@recorded(torch.cat)
def _cat_channels(tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    """Three times the same gray image, as `repeat(3, 1, 1)` makes it."""
    if not isinstance(tensors, (list, tuple)) or len(tensors) != 3 or dim not in (0, -3) or kwargs:
        return NotImplemented
    first = tensors[0]
    if not all(type(image) in HANDLES and image.is_recording for image in tensors) or first.sink_shape[0] != 1:
        return NotImplemented
    same = all(image.sink_source is first.sink_source and image.sink_ops == first.sink_ops for image in tensors)
    return first.repeat(3, 1, 1) if same else NotImplemented


def _stack_of(images: Sequence[Any]) -> LazyStack | None:
    """A stack of recorded images, or None where they are made at once, or are not all recorded and alike."""
    active = backend_state.settled()
    if active is None or active.executes_at_once:
        return None
    kind = {(item.shape, item.dtype) for item in images}
    if len(kind) > 1 or not all(type(item) in HANDLES and item.is_recording for item in images):
        return None
    copies = [LazyTensor(item.sink_source, item.sink_ops, item.sink_shape, item.sink_dtype) for item in images]
    return LazyStack(copies, (len(copies),))


def _parts(items: Sequence[Any]) -> list[tuple[tuple[int, ...], Sequence[Any]]] | None:
    """The leading sizes and the handles of stacks and batches of one; None where some have none, or no more."""
    found: list[tuple[tuple[int, ...], Sequence[Any]]] = []
    for item in items:
        if not isinstance(item, LazyBatch) or not item.is_recording:
            return None
        if isinstance(item, LazyStack) and item._images.handles:
            found.append((item._lead, item._images.handles))
        elif item._viewed is not None:
            found.append(((1,), [item._viewed]))
        else:
            return None
    return found if len({(item.shape[1:], item.dtype) for item in items}) == 1 else None


def _joined(parts: Sequence[tuple[tuple[int, ...], Sequence[Any]]], lead: tuple[int, ...]) -> Any:
    stack = _stack_of([image for _, images in parts for image in images])
    return NotImplemented if stack is None else LazyStack(stack._images, lead)


def _stack_of_stacks(stacks: Any, dim: int = 0, **kwargs: Any) -> Any:
    """`torch.stack` of samples [k, C, H, W]: a batch [N, k, C, H, W]."""
    parts = _parts(stacks) if dim == 0 and not kwargs else None
    if parts is None or len({lead for lead, _ in parts}) > 1:
        return NotImplemented
    return _joined(parts, (len(parts), *parts[0][0]))


def _cat(stacks: Any, dim: int = 0, **kwargs: Any) -> Any:
    """`torch.cat` of stacks [k, C, H, W] and batches of one."""
    parts = _parts(stacks) if dim == 0 and not kwargs else None
    if parts is None or any(len(lead) > 1 for lead, _ in parts):
        return NotImplemented
    return _joined(parts, (sum(len(images) for _, images in parts),))


def _part(stack: Any, index: Any) -> Any:
    if not _gives_parts(stack) or type(index) is not int or not -len(stack) <= index < len(stack):
        return NotImplemented
    return stack._images.give(index % len(stack))


def _unbind(stack: Any, dim: int = 0) -> Any:
    return tuple(map(stack._images.give, range(len(stack)))) if _gives_parts(stack) and dim == 0 else NotImplemented


def _gives_parts(stack: Any) -> bool:
    is_stack = isinstance(stack, LazyStack) and stack.is_recording and len(stack._lead) == 1
    return is_stack and bool(stack._images.handles)


def _view(stack: Any, *sizes: Any, **kwargs: Any) -> Any:
    """The leading sizes as others, as `view(-1, c, h, w)` makes one of them."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else sizes
    if not isinstance(stack, LazyStack) or not stack.is_recording or kwargs or not all(type(at) is int for at in sizes):
        return NotImplemented
    try:
        size = tuple(torch.empty(stack._size, device="meta").view(sizes).shape)
    except RuntimeError:
        return NotImplemented  # and raises there
    if size[-3:] != stack._size[-3:]:
        return NotImplemented
    if len(size) > 3:
        return LazyStack(stack._images, size[:-3])
    return stack._images.give(0) if stack._images.handles else NotImplemented


def _flatten(stack: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not isinstance(stack, LazyStack) or start_dim != 0 or end_dim % stack.ndim != len(stack._lead) - 1:
        return NotImplemented
    return _view(stack, -1, *stack._size[-3:])


RECORDED_ON_BATCHES.update(
    {
        torch.stack: _stack_of_stacks,
        torch.cat: _cat,
        torch.concat: _cat,
        torch.Tensor.__getitem__: _part,
        torch.Tensor.unbind: _unbind,
        torch.unbind: _unbind,
        torch.Tensor.view: _view,
        torch.Tensor.reshape: _view,
        torch.reshape: _view,
        torch.flatten: _flatten,
        torch.Tensor.flatten: _flatten,
    }
)
