"""Images that a dataset keeps in memory: a list of thumbnails, or a dict that fills up.

Stock code has their pixels, and decodes none of them again. So here they are decoded once: when a pass over the dataset
begins, which is before its workers start, or else in the process that uses them for a second sample.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import weakref
from types import CoroutineType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from PIL import Image

from torch_sink.errors import DecodeError
from torch_sink.image.core import settings, uses
from torch_sink.image.core.fallback import executing, ledger
from torch_sink.image.core.ops import VALUE_CALLS, replay
from torch_sink.image.decode.source import EncodedSource, PixelSource, is_worth_keeping
from torch_sink.image.handles.file import LazyJpegImageFile
from torch_sink.image.handles.image import LazyImage, LazyPixels
from torch_sink.image.handles.tensor import HANDLES

# Types whose objects lead to everything in the process.
_NOT_ENTERED = (type, ModuleType, GeneratorType, CoroutineType, FrameType, torch.Tensor)

# By id, loaders of which a pass has begun; and those without workers that keep no images after a pass.
_begun: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_keep_none: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def keep_images_of(loader: Any) -> None:
    """Makes the pixels of the images in a DataLoader's dataset that wait for them, when a pass begins.

    A file that was neither used nor loaded is left alone: its `draft` may still be called. A dataset without images is
    not searched at every pass: the annotations of a large one take seconds.
    """
    is_first_pass = id(loader) not in _begun
    _begun[id(loader)] = loader
    if not uses.were_opened or id(loader) in _keep_none:
        return
    # Whether there are any: a look at all objects of the process costs less than a search.
    are_none = {LazyImage, LazyJpegImageFile, *HANDLES}.isdisjoint(map(type, gc.get_objects()))
    waiting = [] if are_none else [image for image in images_in(loader.dataset) if _waits(image)]
    if not (waiting or is_first_pass or loader.num_workers):
        _keep_none[id(loader)] = loader
    for image in waiting:
        if type(image) in HANDLES:
            _keep_tensor(image)
        else:
            image.keep_pixels()
    uses.were_opened = bool(waiting)
    if waiting:  # glibc holds on to the memory of the files while pixels lie among them
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def said_of_images_in(dataset: object) -> str:
    """For readers: how many images a dataset keeps in memory, and as what; "" where there are none."""
    images = images_in(dataset)
    files = sum(isinstance(getattr(image, "lazy_source", None), EncodedSource) for image in images if _waits(image))
    as_files = f"; {files} of them as files, which the GPU decodes for each batch" if files else ""
    return f"{len(images)} images are kept in memory by the dataset: decoded once{as_files}" if images else ""


def _waits(image: Any) -> bool:
    if type(image) in HANDLES:
        return bool(image.is_recording)
    return isinstance(image, LazyPixels) and image.waits


def images_in(dataset: object) -> list[Any]:
    """The Pillow images that an object holds, at any depth, and the tensors whose values do not exist yet."""
    found: list[Any] = []
    todo: list[Any] = [dataset]
    seen: set[int] = set()
    while todo:
        held, todo = gc.get_referents(*todo), []
        for value in filter(gc.is_tracked, held):  # numbers, texts, and tuples of them hold nothing
            if id(value) in seen:
                continue
            seen.add(id(value))
            kind = type(value)
            if kind in HANDLES or issubclass(kind, Image.Image):
                found.append(value)
            elif kind is FunctionType:
                todo += value.__closure__ or ()
            elif not issubclass(kind, _NOT_ENTERED):
                todo.append(value)
    return found


def _keep_tensor(handle: Any) -> None:
    """Makes the values; where a device makes them, the image that they are made of."""
    source, ops = handle.lazy_source, handle.lazy_ops
    if not isinstance(source, (EncodedSource, PixelSource)):
        return
    with contextlib.suppress(DecodeError), executing():
        if settings.makes_pixels_here():
            handle.materialize()
            ledger.note_kept()
            return
        of_pixels = tuple(op for op in ops if op.name not in VALUE_CALLS)
        is_alone = handle.lazy_base is None and not handle.lazy_views
        has_its_size = ops[: len(of_pixels)] == of_pixels
        is_done = isinstance(source, PixelSource) and not of_pixels
        if is_alone and has_its_size and not is_done and is_worth_keeping(source, handle.lazy_shape.numel()):
            kept = PixelSource(replay(source.decode(), of_pixels), source.path)
            handle.__dict__.update({"lazy_source": kept, "lazy_ops": ops[len(of_pixels) :]})
            ledger.note_kept()
