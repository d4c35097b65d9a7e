"""Loaders, and what lies in the batches that they give."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def batch_tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order, from nested lists, tuples, dicts and dataclasses."""
    if type(batch) in (tuple, list):
        tensors = [member for member in batch if type(member) is Tensor]
        if len(tensors) == len(batch):
            return tensors
    return [leaf for leaf in batch_leaves(batch) if isinstance(leaf, Tensor)]


def batch_leaves(batch: Any) -> list[Any]:
    """Everything in a batch that is no container, in order."""
    found = tree_leaves(batch)
    if not any(map(_is_dataclass, found)):
        return found
    opened = (batch_leaves(list(_fields(leaf).values())) if _is_dataclass(leaf) else [leaf] for leaf in found)
    return [one for leaves in opened for one in leaves]


class UsualShape:
    """The one shape of batches that is compiled or captured: the first, unless another soon proves to be the usual one.

    A run may begin with an odd shape, as one that is resumed before the last batch of an epoch does. So a shape that
    comes twice in a row, before the first has come again, takes its place.
    """

    def __init__(self) -> None:
        self._usual: Any = None
        self._latest: Any = None
        self._settled = False

    def knows(self, shape: Any) -> bool:
        """Whether batches of this shape were the usual ones before."""
        return bool(shape == self._usual)

    def accepts(self, shape: Any) -> bool:
        """Whether a batch has the usual shape; to be asked for every batch."""
        if self._usual is None:
            self._usual = shape
        elif shape == self._usual:
            self._settled = True
        elif not self._settled and shape == self._latest:
            self._usual, self._settled = shape, True
        self._latest = shape
        return bool(shape == self._usual)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A value like this one, with a function applied to the tensors in its containers, dataclasses too."""
    if isinstance(value, Tensor):
        return function(value)
    return tree_map(partial(_map_leaf, function), value, is_leaf=_is_size)


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)  # pytree would make a tuple of it


def _map_leaf(function: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    # Containers of classes that pytree does not know.
    if isinstance(leaf, (list, tuple)):
        return type(leaf)(map_tensors(function, member) for member in leaf)
    if isinstance(leaf, dict):
        mapped: Any = copy.copy(leaf)
        mapped.update({key: map_tensors(function, member) for key, member in leaf.items()})
        return mapped
    if not _is_dataclass(leaf):
        return leaf
    mapped = copy.copy(leaf)
    for name, member in _fields(leaf).items():
        object.__setattr__(mapped, name, map_tensors(function, member))  # frozen ones too
    return mapped


def _is_dataclass(leaf: Any) -> bool:
    return hasattr(type(leaf), "__dataclass_fields__")


def _fields(leaf: Any) -> dict[str, Any]:
    return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}


def batch_shapes(batch: Any) -> tuple[Any, ...]:
    """Shapes, strides, dtypes and devices of a batch's tensors: where they are equal, compiled code can be shared."""
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in batch_tensors(batch))


def batch_constants(batch: Any) -> tuple[Any, ...]:
    """What a captured graph holds of a batch: the shapes and the like, and the numbers."""
    return batch_shapes(batch), tuple(leaf for leaf in batch_leaves(batch) if not isinstance(leaf, Tensor))


def call_with(function: Callable[..., Any], batch: Any) -> Any:
    """A tuple's or list's members are positional arguments, a dict's are named ones; anything else is one argument."""
    if isinstance(batch, dict):
        return function(**batch)
    if isinstance(batch, (tuple, list)):
        return function(*batch)
    return function(batch)


def epoch_length(loader: Any) -> int | None:
    """Steps in an epoch of a loader, or None if nobody knows."""
    try:
        return len(loader)
    except TypeError:
        return None


@contextmanager
def sink_over(dataset: Any, device: torch.device, epoch_size: int = -1) -> Iterator[Any]:
    """The dataset itself if it is a SinkLoader, else a SinkLoader over it, with so many batches in an epoch."""
    from torch_sink.sink import SinkLoader

    if isinstance(dataset, SinkLoader):
        yield dataset
    else:
        target = None if device.type == "meta" else device
        with SinkLoader(dataset, sink_size=epoch_size, device=target) as sink:
            yield sink
