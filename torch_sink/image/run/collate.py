"""Handles -> a batch, and what a `collate_fn` made of them -> what leaves a worker."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch.utils.data._utils.collate import collate_tensor_fn
from torchvision.tv_tensors import _torch_function_helpers as return_types

from torch_sink.common.containers import values_in
from torch_sink.errors import DecodeError
from torch_sink.image.core import settings, uses
from torch_sink.image.core.arguments import parsed_to
from torch_sink.image.core.fallback import executing
from torch_sink.image.core.ops import recorded
from torch_sink.image.decode.source import FinishedSource
from torch_sink.image.handles.image import LazyPixels
from torch_sink.image.handles.tensor import HANDLES, Handle, LazyTVImage, on_handles, packable
from torch_sink.image.operations.moves import part
from torch_sink.image.operations.values import to_type
from torch_sink.image.program.block import collated_tensor
from torch_sink.image.run.batch import Images, LazyBatch, pack
from torch_sink.image.run.stock import decoded_once, run_on_cpu
from torch_sink.worker.prepare import WorkerCollate


def collate_handles(handles: Sequence[Any]) -> torch.Tensor:
    """Stacks handles, and ordinary tensors among them, to a `LazyBatch`; raises the errors of stock code.

    Where this process's CPU executes at once, it is an ordinary tensor, in shared memory in a worker.
    """
    if not all(map(isinstance, handles, itertools.repeat(torch.Tensor))):
        return collate_tensor_fn(handles)
    if gives_an_image(handles):
        return collate_tensor_fn([item.materialize() if isinstance(item, Handle) else item for item in handles])
    at_once = not settings.is_for_device and settings.makes_pixels_here()
    is_mixed = at_once and not set(map(type, handles)) <= {*HANDLES}
    if is_mixed and not any(isinstance(item, Handle) and item.is_of_file for item in handles):
        return collate_tensor_fn([item.materialize() if isinstance(item, Handle) else item for item in handles])
    items = [packable(item, at_once) for item in handles]
    images = [item.lazy_recording for item in items]
    shape, dtype = images[0].shape, images[0].dtype
    is_stacked = False  # by `torch.stack`, which keeps gradients and promotes dtypes
    may_wait = True  # for a program of several batches: nobody can write to what they are made of
    for position, image in enumerate(images):
        if image.shape != shape:
            raise RuntimeError(
                f"stack expects each tensor to be equal size, but got {list(shape)} at entry 0 and "
                f"{list(image.shape)} at entry {position}"
            )
        source = image.source
        may_wait = may_wait and not isinstance(source, FinishedSource)
        wants_gradient = isinstance(source, FinishedSource) and source.tensor.requires_grad
        is_stacked = is_stacked or wants_gradient or image.dtype != dtype
    if is_stacked:
        return torch.stack([item.materialize() for item in items])
    full_shape = (len(items), *shape)
    if at_once:
        uses.batches += 1
        is_sent = WorkerCollate.is_running  # not a stack that a program makes for one sample
        out = collated_tensor(full_shape, dtype) if is_sent else torch.empty(full_shape, dtype=dtype, device="cpu")
        try:
            run_on_cpu(decoded_once(images), out)
        except DecodeError:
            pass  # the user of the batch decides about damaged images
        else:
            for item in items:
                item.lazy_was_collated = True
            return out
    uses.batches += 1
    active = settings.active  # None for images that outlive the backend
    destination = ("cpu", False) if active is None else (active.device, active.interpreted)
    batch = LazyBatch(Images(images, *destination))
    if not may_wait:
        pack([batch])
    return batch


def gives_an_image(handles: Sequence[Any]) -> bool:
    """True where stock code's stack is a `tv_tensors.Image`: of one, under `set_return_type("TVTensor")`."""
    return LazyTVImage in map(type, handles) and return_types._must_return_subclass()


@recorded(torch.unsqueeze, torch.Tensor.unsqueeze, of="an image")
def _batch_of_one(image: Any, dim: Any = None) -> Any:
    """An image as a batch of one, as in `preprocess(image).unsqueeze(0)`: a view of the image."""
    if type(image) not in HANDLES or not image.is_recording or type(dim) is not int or dim != 0:
        return NotImplemented
    if gives_an_image([image]):
        return NotImplemented
    if settings.makes_pixels_here():
        return image.materialize().as_subclass(torch.Tensor).unsqueeze(0)
    batch = collate_handles([image])
    pack([batch])  # which drops the handle: the batch is a view of it
    return image.lend_to(batch) if type(batch) is LazyBatch else NotImplemented


_recorded_to, _part = on_handles(to_type, keeps_type=True), on_handles(part)


@recorded(torch.Tensor.to, of="an image")
def _to(image: Any, *args: Any, **kwargs: Any) -> Any:
    """Moves one image, for programs that move a list of images of different sizes: made there as a batch of one."""
    result = _recorded_to(image, *args, **kwargs)
    keeps_result = result is not NotImplemented or type(image) not in HANDLES or not image.is_recording
    if keeps_result or settings.makes_pixels_here():
        return result
    device, _, memory_format = parsed_to(*args, **kwargs)
    if device is None or memory_format is not None:
        return NotImplemented
    batch = collate_handles([image])
    if type(batch) is not LazyBatch or (device.type == "cpu" and not batch.images.interpreted):
        return NotImplemented
    return image._stock_type(batch.to(*args, **kwargs)[0])


@recorded(torch.Tensor.cuda, of="an image")
def _cuda(image: Any, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    return _to(image, "cuda" if device is None else torch.device(device), non_blocking=non_blocking, **kwargs)


@recorded(torch.Tensor.pin_memory, of="an image")
def _pin_memory(image: Any, device: Any = None) -> Any:
    return NotImplemented if settings.makes_pixels_here() or not image.is_recording else image


@recorded(torch.Tensor.__getitem__, of="an image")
def _index(image: Any, index: Any) -> Any:
    return _batch_of_one(image, 0) if index is None else _part(image, index)


# --- what leaves a `collate_fn`


def finish_batch(made: Any, makes_pixels: bool = False) -> Any:
    """What a `collate_fn` made, finished while an error still has its place: a thread that sends it would lose it.

    With a device, its batches are packed in one block. Without one, ordinary tensors and images leave a worker,
    whatever `collate_fn` returns: their pixels are made here, in parallel with other workers.
    """
    if makes_pixels or LazyBatch.are_recorded:
        try:
            leaves = _leaves(made)
        except Exception:  # of a user's class that cannot be looked through
            return made
        with executing():
            pack(leaves)
            for leaf in leaves if makes_pixels else []:
                if isinstance(leaf, LazyPixels):
                    leaf.load()
                elif isinstance(leaf, Handle):
                    leaf.materialize()
    return made


def _leaves(batch: Any) -> list[Any]:
    """What containers, a batch object and the objects in it hold; each value once, for some hold themselves."""
    todo: list[tuple[Any, int]] = [(batch, 2)]
    seen: dict[int, Any] = {}
    found = []
    while todo:
        value, depth = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        inside = list(value) if isinstance(value, (set, frozenset, deque)) else values_in(value)
        fields: Any = getattr(value, "__dict__", None)
        is_object = type(fields) is dict and not isinstance(value, (torch.Tensor, Image.Image))
        if inside is None and is_object and depth:
            inside, depth = list(fields.values()), depth - 1
        if inside is None:
            found.append(value)
        else:
            todo += zip(reversed(inside), itertools.repeat(depth))
    return found
