"""LazyStack: recorded images that `torch.stack` put together, as programs do after `FiveCrop` and `TenCrop`.

A stack of k views is a sample [k, C, H, W]; `default_collate` stacks such samples to a batch [N, k, C, H, W]. It runs
as one batch of N * k images, in which the k views of a file share its bytes and its decoding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_sink.errors import DecodeError
from torch_sink.image.core import settings
from torch_sink.image.core.fallback import executing, report_fallback
from torch_sink.image.core.ops import Op
from torch_sink.image.decode.source import Source
from torch_sink.image.handles.lazy import without_memory
from torch_sink.image.handles.names import named_as, stays
from torch_sink.image.handles.tensor import HANDLES, LazyTensor, recorded
from torch_sink.image.program.program import Program, Wanted, survivors
from torch_sink.image.run.batch import LazyBatch
from torch_sink.image.run.collate import collate_handles, lazy_batch


class _Image:
    """An image of a stack, on which recorders record as on handles: what a handle has, without a tensor."""

    __slots__ = ("lazy_dtype", "lazy_ops", "lazy_shape", "lazy_source")
    changes_in_place = False

    def __init__(self, source: Source, ops: tuple[Op, ...], shape: torch.Size, dtype: torch.dtype) -> None:
        self.lazy_source, self.lazy_ops, self.lazy_shape, self.lazy_dtype = source, ops, shape, dtype

    def record(self, op: Op, shape: Any = None, dtype: torch.dtype | None = None, is_view: bool = False) -> _Image:
        return _Image(self.lazy_source, (*self.lazy_ops, op), shape or self.lazy_shape, dtype or self.lazy_dtype)


class _Images:
    """The images that stacks and their views share, as they were recorded or as a batch, and later its values."""

    def __init__(self, handles: list[_Image], batch: LazyBatch | None = None) -> None:
        self.handles, self.batch = handles, batch
        active = settings.settled()
        self._destination, self._interpreted = (active.device, active.interpreted) if active else ("cpu", False)
        self.values: torch.Tensor | None = None  # [images, C, H, W]

    def packed(self) -> LazyBatch:
        """All images as one batch [images, C, H, W]."""
        if self.batch is None:
            self.batch = lazy_batch(self.handles, self._destination, self._interpreted)
        return self.batch

    def real(self) -> torch.Tensor:
        """The values, made once."""
        if self.values is None:
            with executing():
                self.values = self.packed()._made_on_cpu()
        return self.values

    def give(self, at: int) -> LazyTensor:
        """A handle of one image, which shares its memory with the stack, as `stack[at]` does."""
        image = self.handles[at]
        part = LazyTensor(image.lazy_source, image.lazy_ops, image.lazy_shape, image.lazy_dtype)
        part.lazy_base, part.lazy_part = self, at
        return part

    @property
    def is_recording(self) -> bool:
        """False once the values were made."""
        return self.values is None

    def make_view(self, view: LazyTensor) -> None:
        """Makes all values; an image that `give` returned becomes a view of them."""
        view.become_all(self.real()[view.lazy_part])


# Functionals that give a stack, bit for bit, what they give each of its images.
EACH_ALONE = frozenset(
    ("normalize", "convert_image_dtype", "to_dtype", "hflip", "vflip", "horizontal_flip", "vertical_flip")
)


@named_as(torch.Tensor)
class LazyStack(LazyBatch):
    """A stack [k, C, H, W] or [N, k, C, H, W] of images whose values do not exist yet; to programs a `torch.Tensor`.

    Its parts `stack[i]` record, also those that iterating gives; so do `view`, `reshape` and `flatten` to
    [N * k, C, H, W].
    """

    were_made = False  # whether this process has made stacks
    _images: _Images
    _size: tuple[int, ...]
    fields = LazyBatch.fields | {"_images", "_size"}

    @staticmethod
    def __new__(cls: Any, images: _Images, size: tuple[int, ...]) -> Any:  # type: ignore[override]
        LazyStack.were_made = True
        dtype = images.handles[0].lazy_dtype if images.batch is None else images.batch.program.dtype
        stack = without_memory(cls, torch.Size(size), dtype)
        stack._images, stack._size = images, size
        return stack

    def __init__(self, *args: Any) -> None:
        torch.Tensor.__init__(self)

    @property
    def program(self) -> Program:  # type: ignore[override]
        """The program of all images as one batch."""
        return self._images.packed().program

    @property
    def is_recording(self) -> bool:
        """False once the values were made, for the stack itself or for one of its views."""
        return self._images.values is None

    def make(self) -> None:
        """Makes the values of all its views on the CPU, in stock code."""
        if self.is_recording:
            self._refuse_meta()
            report_fallback("batch", "used on the CPU before it was moved to the device", "torch")
        values = self._images.real()
        self.become(values.data if values.shape == self._size else values.view(self._size))

    def pack(self) -> None:
        """Packs the images as a batch and drops the handles, before the stack is sent to another process."""
        if self._images.values is None:
            self._images.packed()
            self._images.handles = []

    def __reduce_ex__(self, protocol: Any) -> Any:
        if stays(protocol) or not self.is_recording:
            return self.materialize().__reduce_ex__(protocol)
        return _unpickled, (self._images.packed(), self._size)

    def record_each(self, recorder: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A stack of what a recorder makes of each image, or `NotImplemented`."""
        handles = self._images.handles if self.is_recording and not kwargs.get("inplace") else []
        made = [recorder(handle, *args, **kwargs) for handle in handles]
        if not made or any(image is NotImplemented for image in made):
            return NotImplemented
        is_same = all(image is handle for image, handle in zip(made, handles, strict=True))
        return self if is_same else LazyStack(_Images(made), (*self._size[:-3], *made[0].lazy_shape))

    def _holding(self, program: Program) -> LazyBatch:
        return _unpickled(LazyBatch(program), self._size)

    def _made_on_cpu(self) -> torch.Tensor:
        return self._images.packed()._made_on_cpu().view(self._size)

    def _execute(self, wanted: Wanted) -> tuple[torch.Tensor, list[int] | None]:
        """Makes the stack; the policy for damaged files applies to whole samples."""
        if not self.is_recording:
            return super()._execute(wanted)
        (count, *rest), batch, out, policy = self._size, self._images.packed(), wanted.out, wanted.on_decode_error
        if len(rest) == 3:
            made = batch._execute(wanted)
            self.broken_files = batch.broken_files
            return made
        torch.empty(self._size, device="meta", memory_format=wanted.memory_format)  # raises if the format does not fit
        flat = None if out is None else out.view(-1, *rest[-3:])
        of_images = "skip" if policy == "replace" else policy
        images, rows = batch._execute(wanted._replace(out=flat, on_decode_error=of_images))
        self.broken_files = batch.broken_files
        if rows is None:
            return images.view(-1, *rest), None
        row_of = {image: row for row, image in enumerate(rows)}
        views = math.prod(rest[:-3])
        samples = [[row_of.get(at * views + view) for view in range(views)] for at in range(count)]
        lost = DecodeError(batch.broken_files[0].path, -1, batch.broken_files[0].reason)
        errors = {at: lost for at, sample in enumerate(samples) if None in sample}
        chosen = survivors(errors, count, 0, policy)[0] or []
        shown = torch.tensor([samples[at] for at in chosen], device=images.device).flatten()
        kept = images[shown].view(-1, *rest)
        return (kept if out is None else out[: len(chosen)].copy_(kept)), chosen


def _unpickled(batch: LazyBatch, size: tuple[int, ...]) -> LazyStack:
    return LazyStack(_Images([], batch), size)


# --- functions that record on several images and on stacks


@recorded(torch.stack)
def _stack(tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> Any:
    if dim != 0 or kwargs or any(item.ndim != 3 for item in tensors):
        return NotImplemented
    stack = _stack_of(tensors)
    return collate_handles(tensors) if stack is None else stack


@recorded(torch.cat)
def _cat_channels(tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    """Records the same gray image three times as `repeat(3, 1, 1)`."""
    if not isinstance(tensors, (list, tuple)) or len(tensors) != 3 or dim not in (0, -3) or kwargs:
        return NotImplemented
    first = tensors[0]
    if not all(type(image) in HANDLES and image.is_recording for image in tensors) or first.lazy_shape[0] != 1:
        return NotImplemented
    same = all(image.lazy_source is first.lazy_source and image.lazy_ops == first.lazy_ops for image in tensors)
    return first.repeat(3, 1, 1) if same else NotImplemented


def _stack_of(images: Sequence[Any]) -> LazyStack | None:
    """A stack of recorded images; None where pixels are made at once, or the images differ or are not all recorded."""
    active = settings.settled()
    if active is None or active.executes_at_once:
        return None
    if not all(type(item) is _Image or (type(item) in HANDLES and item.is_recording) for item in images):
        return None
    if len({(item.lazy_shape, item.lazy_dtype) for item in images}) > 1:
        return None
    parts = [_Image(item.lazy_source, item.lazy_ops, item.lazy_shape, item.lazy_dtype) for item in images]
    return LazyStack(_Images(parts), (len(parts), *parts[0].lazy_shape))


def _joined(items: Any, dim: int = 0, *, is_new: bool, **kwargs: Any) -> Any:
    """Joins stacks and batches of one along a new first dimension, as `torch.stack`, or along theirs, as `torch.cat`.

    From samples [k, C, H, W] the one makes a batch [N, k, C, H, W], the other a longer stack.
    """
    if dim != 0 or kwargs or not all(isinstance(item, LazyBatch) and item.is_recording for item in items):
        return NotImplemented
    kinds = {(item.shape if is_new else item.shape[1:], item.dtype) for item in items}
    if len(kinds) != 1 or (not is_new and items[0].ndim != 4):
        return NotImplemented
    handles: list[Any] = []
    for item in items:
        of_item = item._images.handles if isinstance(item, LazyStack) else [item.lazy_base]
        if not of_item or of_item[0] is None:
            return NotImplemented
        handles += of_item
    stack = _stack_of(handles)
    if stack is None:
        return NotImplemented
    return LazyStack(stack._images, (len(items), *items[0].shape)) if is_new else stack


def _gives_parts(stack: Any) -> bool:
    is_stack = isinstance(stack, LazyStack) and stack.is_recording and len(stack._size) == 4
    return is_stack and bool(stack._images.handles)


def _part(stack: Any, index: Any) -> Any:
    if not _gives_parts(stack) or type(index) is not int or not -len(stack) <= index < len(stack):
        return NotImplemented
    return stack._images.give(index % len(stack))


def _unbind(stack: Any, dim: int = 0) -> Any:
    return tuple(map(stack._images.give, range(len(stack)))) if _gives_parts(stack) and dim == 0 else NotImplemented


def _view(stack: Any, *sizes: Any, **kwargs: Any) -> Any:
    """A view with other leading sizes, such as `view(-1, c, h, w)`."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else sizes
    if not isinstance(stack, LazyStack) or not stack.is_recording or kwargs or not all(type(at) is int for at in sizes):
        return NotImplemented
    try:
        size = tuple(torch.empty(stack._size, device="meta").view(sizes).shape)
    except RuntimeError:
        return NotImplemented  # stock code raises
    if size[-3:] != stack._size[-3:]:
        return NotImplemented
    return LazyStack(stack._images, size) if len(size) > 3 else NotImplemented


def _flatten(stack: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not isinstance(stack, LazyStack) or start_dim != 0 or end_dim % stack.ndim != stack.ndim - 4:
        return NotImplemented
    return _view(stack, -1, *stack._size[-3:])


LazyBatch.calls.update(
    {
        torch.stack: functools.partial(_joined, is_new=True),
        torch.cat: functools.partial(_joined, is_new=False),
        torch.concat: functools.partial(_joined, is_new=False),
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
