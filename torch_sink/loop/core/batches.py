"""The tensors in batches, and how many batches an epoch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_sink.common.containers import leaves, map_leaves
from torch_sink.common.integrations import without_length_warning

_CONSTANTS = (int, float, complex, str, bytes, type(None))


def tensors_among(leaves: list[Any]) -> list[Tensor]:
    """The tensors among the leaves of a batch, in order."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def batch_tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch in order, including those in nested lists, tuples, dicts and dataclasses."""
    return tensors_among(leaves(batch))


class UsualShape:
    """The shape of batches that is compiled or captured: that of the first batch, or one that soon replaces it.

    A run may begin with an odd shape, such as that of an epoch's short last batch after a resume, and an epoch may be
    of another shape than the one before, as in progressive resizing. So another shape becomes the usual one if it comes
    twice in a row before that one has come again, since the first batch or since the latest call of `unsettle`.
    """

    def __init__(self) -> None:
        self._usual: Any = None
        self._latest: Any = None
        self._settled = False

    def unsettle(self) -> None:
        """An epoch or an evaluation begins, whose batches may have another shape."""
        self._latest, self._settled = None, False

    def settle(self) -> None:
        """A batch of the usual shape has come."""
        self._settled = True

    def knows(self, shape: Any) -> bool:
        """Whether this has been the usual shape before the current batch."""
        return bool(shape == self._usual)

    def accepts(self, shape: Any) -> bool:
        """Whether a batch has the usual shape; has to be called for every batch."""
        if self._usual is None:
            self._usual = shape
        elif shape == self._usual:
            self._settled = True
        elif not self._settled and shape == self._latest:
            self._usual, self._settled = shape, True
        self._latest = shape
        return bool(shape == self._usual)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Applies a function to every tensor of a value in nested containers."""
    return map_leaves(value, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def batch_shapes(tensors: list[Tensor]) -> tuple[Any, ...]:
    """Shapes, strides, dtypes and devices of a batch's tensors: batches that agree in them share compiled code."""
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)


def batch_constants(leaves: list[Any]) -> tuple[Any, ...]:
    """The constants that a captured graph holds of a batch: `batch_shapes`, numbers and strings.

    An object of another type stands for itself, equal to no other, so a batch with one is never the usual one.
    """
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    shapes = batch_shapes(tensors_among(leaves))
    return shapes, tuple(leaf if isinstance(leaf, _CONSTANTS) else object() for leaf in others)


def call_with(function: Callable[..., Any], batch: Any) -> Any:
    """Calls a function with a batch: a tuple or list as `*batch`, a dict as `**batch`, anything else as `batch`."""
    if isinstance(batch, dict):
        return function(**batch)
    if isinstance(batch, (tuple, list)):
        return function(*batch)
    return function(batch)


def epoch_length(loader: Any, batches: int | None = None) -> int | None:
    """The number of steps in an epoch: `batches`, else the length of a SinkLoader's loader; None if it has none."""
    if batches is not None:
        return batches
    try:
        with without_length_warning(loader.loader):  # the program has not asked for the length
            return len(loader.loader)
    except (TypeError, NotImplementedError):
        return None
