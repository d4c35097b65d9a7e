"""Images that a dataset keeps in memory: a list of thumbnails, or a dict that fills up.

Stock code has their pixels, and decodes none of them again. So here they are decoded once. Without a device, the first
call that is recorded on an image decodes it. With one, an image that is used for a second sample keeps its pixels, if
they take less memory than its file. And what the program holds when a pass over a DataLoader begins is decoded before
its workers start, so that they share the pixels.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from types import CoroutineType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from PIL import Image

from torch_sink.errors import DecodeError
from torch_sink.image.core import settings, uses
from torch_sink.image.core.fallback import executing, ledger
from torch_sink.image.core.ops import VALUE_CALLS, replay
from torch_sink.image.decode.source import EncodedSource, PixelSource, is_worth_keeping
from torch_sink.image.handles.image import LazyPixels
from torch_sink.image.handles.tensor import HANDLES

# Types whose objects lead to everything in the process.
_NOT_ENTERED = (type, ModuleType, GeneratorType, CoroutineType, FrameType, torch.Tensor)


def keep_held_images() -> None:
    """Makes the pixels of the images that the program holds when a pass over a DataLoader begins.

    A file that was neither used nor loaded is left alone: its `draft` may still be called.
    """
    kept = ledger.kept
    for image in filter(_waits, uses.held()):
        if type(image) in HANDLES:
            _keep_tensor(image)
        else:
            image.keep_pixels()
    if ledger.kept > kept:  # glibc holds on to the memory of the files while pixels lie among them
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
