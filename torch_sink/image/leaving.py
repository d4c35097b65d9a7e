"""What leaves a data worker on a machine without a device: ordinary tensors and images, whatever `collate_fn` does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from torch_sink.image.core.fallback import executing
from torch_sink.image.handles.file import LazyJpegImageFile
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.handles.tensor import HANDLES
from torch_sink.image.stack import LazyStack

_IMAGES = (LazyImage, LazyJpegImageFile)
_LEAVES = (torch.Tensor, np.ndarray, str, bytes, int, float, complex, type(None), type)
# How deep handles are looked for inside objects that are no containers: a batch object, and what it consists of.
_DEPTH = 2


class MadeInWorker:
    """A worker's `collate_fn`, which finishes what the user's one returns; the thread that sends it would lose errors.

    Without a device it makes the pixels, beside other workers and not in the training process; with one it packs
    stacks.
    """

    def __init__(self, collate: Callable[[Any], Any], makes_pixels: bool) -> None:
        self.collate, self.makes_pixels = collate, makes_pixels

    def __getattr__(self, name: str) -> Any:
        if name == "collate":
            raise AttributeError(name)  # while it is being unpickled
        return getattr(self.collate, name)

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        if self.makes_pixels:
            with executing():
                for handle in _handles_in(batch, (*HANDLES, *_IMAGES)):
                    handle.load() if type(handle) in _IMAGES else handle.materialize()
        elif LazyStack.were_made:
            for stack in _handles_in(batch, (LazyStack,)):
                stack.pack()
        return batch


def _handles_in(batch: Any, kinds: tuple[type, ...]) -> Iterator[Any]:
    """The handles in nested containers and objects, each of them once."""
    todo, seen = [(batch, _DEPTH)], set()
    while todo:
        value, depth = todo.pop()
        if id(value) in seen:
            continue
        if type(value) in kinds:
            seen.add(id(value))
            yield value
        elif not isinstance(value, _LEAVES):
            seen.add(id(value))
            todo += _parts(value, depth)


def _parts(value: Any, depth: int) -> list[tuple[Any, int]]:
    if isinstance(value, Mapping):
        return [(part, depth) for part in value.values()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [(part, depth) for part in value]
    fields = getattr(value, "__dict__", None)
    return [(part, depth - 1) for part in fields.values()] if depth and type(fields) is dict else []
