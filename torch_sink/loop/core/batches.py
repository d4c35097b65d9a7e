"""Loaders, and what lies in the batches that they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_sink.common.containers import leaves, map_leaves

_CONSTANTS = (int, float, complex, str, bytes, type(None))


def tensors_among(leaves: list[Any]) -> list[Tensor]:
    """The tensors among the leaves of a batch, in order."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def batch_tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order, from nested lists, tuples, dicts and dataclasses."""
    return tensors_among(leaves(batch))


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
    """A value like this one, with a function applied to the tensors in its containers."""
    return map_leaves(value, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def batch_shapes(tensors: list[Tensor]) -> tuple[Any, ...]:
    """Shapes, strides, dtypes and devices of a batch's tensors: where they are equal, compiled code can be shared."""
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)


def batch_constants(leaves: list[Any]) -> tuple[Any, ...]:
    """What a captured graph holds of a batch: the shapes and the like, and the numbers; an object equals no other."""
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    shapes = batch_shapes(tensors_among(leaves))
    return shapes, tuple(leaf if isinstance(leaf, _CONSTANTS) else object() for leaf in others)


def call_with(function: Callable[..., Any], batch: Any) -> Any:
    """A tuple's or list's members are positional arguments, a dict's are named ones; anything else is one argument."""
    if isinstance(batch, dict):
        return function(**batch)
    if isinstance(batch, (tuple, list)):
        return function(*batch)
    return function(batch)


def epoch_length(loader: Any, batches: int | None = None) -> int | None:
    """Steps in an epoch of so many batches, or in one pass of what a SinkLoader wraps, or None if it is not known."""
    try:
        return len(loader.loader) if batches is None else batches
    except TypeError:
        return None
