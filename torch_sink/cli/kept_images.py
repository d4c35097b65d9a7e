"""What `explain` says of the images that a dataset keeps in memory."""

from __future__ import annotations

import gc
from types import CoroutineType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from PIL import Image

from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.handles.kept import has_no_pixels
from torch_sink.image.handles.tensor import HANDLES

# Types whose objects lead to everything in the process.
_NOT_ENTERED = (type, ModuleType, GeneratorType, CoroutineType, FrameType, torch.Tensor)


def said_of_images_in(dataset: object) -> str:
    """For readers: how many images a dataset keeps in memory, and as what; "" where there are none."""
    images = images_in(dataset)
    files = sum(map(is_file, filter(has_no_pixels, images)))
    as_files = f"; {files} of them as files, which the GPU decodes for each batch" if files else ""
    return f"{len(images)} images are kept in memory by the dataset: decoded once{as_files}" if images else ""


def is_file(image: Any) -> bool:
    """Whether an image whose pixels do not exist yet is one of a file that a program did not decode."""
    return isinstance(getattr(getattr(image, "lazy_recording", None), "source", None), EncodedSource)


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
