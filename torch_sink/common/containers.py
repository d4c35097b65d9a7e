"""Nested batches: their leaves, lazy ones among them, and the rows that stay when samples are skipped or replaced."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

LEAF_TYPES = (torch.Tensor, str, bytes, PackedSequence)  # the last is a tuple that moves to a device as a whole


def is_lazy(leaf: Any) -> bool:
    """Whether `leaf` is a lazy batch; it is a Tensor subclass, so check this before `isinstance(leaf, Tensor)`."""
    return hasattr(type(leaf), "__torch_sink_execute__")


def is_flat(batch: Any) -> bool:
    """Whether `batch` is a list or tuple of ordinary tensors only: the usual case, found without recursion."""
    if type(batch) is not list and type(batch) is not tuple:
        return False
    for leaf in batch:  # noqa: SIM110 - a generator costs more than the loop
        if type(leaf) is not torch.Tensor:
            return False
    return True


def is_plain(leaf: Any) -> bool:
    """Whether `leaf` is an ordinary dense tensor or parameter: not sparse, nested, quantized or of a subclass."""
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_quantized)


def is_transparent(batch: Any) -> bool:
    """Whether every part of `batch` is visible to `map_leaves`: dense tensors, lazy batches and plain values.

    Lists, tuples, dicts and dataclasses of these count too; an object of another class may keep hidden references.
    """
    if batch is None or isinstance(batch, (int, float, complex, str, bytes)):
        return True
    if isinstance(batch, torch.Tensor):
        return is_plain(batch) or is_lazy(batch)
    if type(batch) in (list, tuple) or hasattr(batch, "_fields"):
        return all(is_transparent(value) for value in batch)
    if dataclasses.is_dataclass(batch) and hasattr(batch, "__dict__") and not isinstance(batch, type):
        batch = vars(batch)
    return type(batch) is dict and all(is_transparent(value) for value in batch.values())


class Flat(NamedTuple):
    """A batch as its leaves, in order, and the containers that they lay in."""

    leaves: list[Any]
    containers: Any  # (container, what it held, the containers inside) for each; None in the place of a leaf

    def batch(self) -> Any:
        """The leaves in their containers. A container of which no leaf has changed is there itself, not copied."""
        return _filled(self.containers, iter(self.leaves))


def flatten(batch: Any) -> Flat:
    """Looks once through the containers of a batch: mappings, lists, tuples (named ones too), dataclass instances.

    Everything else is a leaf.
    """
    if is_flat(batch):
        return Flat(list(batch), (batch, batch, [None] * len(batch)))
    found: list[Any] = []
    return Flat(found, _look_through(batch, found))


def _look_through(value: Any, found: list[Any]) -> Any:
    values = values_in(value)
    if values is None:
        found.append(value)
        return None
    return value, values, [_look_through(one, found) for one in values]


def _filled(containers: Any, new: Iterator[Any]) -> Any:
    if containers is None:
        return next(new)
    container, held, inside = containers
    values = [_filled(one, new) for one in inside]
    return container if all(map(operator.is_, values, held)) else _rebuilt(container, values)


def map_leaves(batch: Any, function: Callable[[Any], Any]) -> Any:
    """`batch` with `function` applied to every leaf; containers keep their type."""
    flat = flatten(batch)
    # Not by `_replace`, through which the compiler of torch 2.8 does not look.
    return Flat([function(leaf) for leaf in flat.leaves], flat.containers).batch()


def leaves(batch: Any) -> list[Any]:
    """The leaves of `batch`, in order."""
    return flatten(batch).leaves


def values_in(batch: Any) -> list[Any] | None:
    """The values that a container holds, in order; None for a leaf."""
    if isinstance(batch, LEAF_TYPES):
        return None
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, (list, tuple)):
        return list(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return None


def _rebuilt(batch: Any, values: list[Any]) -> Any:
    """A container of the type and keys of `batch` that holds `values`."""
    if isinstance(batch, tuple):
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if type(batch) is list:
        return values
    if type(batch) is dict or (isinstance(batch, Mapping) and not isinstance(batch, MutableMapping)):
        return dict(zip(batch, values, strict=True))  # an immutable mapping of another type cannot be rebuilt
    clone = copy.copy(batch)
    if isinstance(batch, list):
        clone[:] = values
    elif isinstance(batch, Mapping):
        for key, value in zip(batch, values, strict=True):
            clone[key] = value  # not update(): Hugging Face's ModelOutput refuses it
    else:
        for field, value in zip(dataclasses.fields(batch), values, strict=True):
            object.__setattr__(clone, field.name, value)  # also sets fields of frozen dataclasses
    return clone


def tensor_bytes(leaves: Sequence[Any]) -> int:
    """Bytes of the tensors among `leaves`, without executing lazy batches."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    # A nested tensor has no shape, and numel() would execute a lazy batch.
    return sum((one.shape.numel() if is_lazy(one) else one.numel()) * one.dtype.itemsize for one in tensors)


# --- batches with skipped or replaced samples


def agree_on_positions(shown: Sequence[list[int] | None], batch_size: int, policy: str) -> list[int] | None:
    """Chooses the samples that every part of a batch keeps, when its lazy leaves lost different ones.

    Args:
        shown: for each lazy leaf, the original position of the sample in each of its rows; None if it lost no sample.
        batch_size: number of samples before any was lost.
        policy: "skip" or "replace".

    Returns:
        The original position for each row of the batch; None if no sample was lost.
    """
    lost = [positions for positions in shown if positions is not None]
    if not lost:
        return None
    if len(shown) == 1:
        return lost[0]
    if policy == "skip":
        return sorted(set(range(batch_size)).intersection(*lost))
    good = [i for i in range(batch_size) if all(positions[i] == i for positions in lost)]
    return [] if not good else [next((g for g in good if g >= i), good[0]) for i in range(batch_size)]


def select_samples(value: Any, kept: Mapping[int, list[int] | None], done: Mapping[int, int]) -> Any:
    """Keeps some samples in every part of `value` that holds a batch: tensors `[N, ...]`, lists and tuples of length N.

    A list or tuple is taken for a container of batches, not for a list of samples, if it holds a finished leaf, only
    tensors of as many rows as batches have, or such tensors and lists of as many samples. What stands beside finished
    leaves, in the same container or deeper, belongs to these.

    Args:
        value: batches in any containers.
        kept: {N, the number of samples of some batches: the positions of those that stay; None for all}.
        done: {`id` of a leaf that has been indexed already: its N before}.
    """

    def has_rows(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] in kept

    def is_batch(part: Any) -> bool:
        return has_rows(part) or (isinstance(part, (list, tuple)) and len(part) in kept)

    if isinstance(value, torch.Tensor):
        positions = kept[value.shape[0]] if has_rows(value) and id(value) not in done else None
        if positions is None:
            return value
        return value.index_select(0, torch.tensor(positions, dtype=torch.long, device=value.device))
    parts = leaves(value)
    sizes = {done[id(part)] for part in parts if id(part) in done}
    if sizes:
        kept = {size: kept[size] for size in sizes}
    is_list = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
    is_structure = bool(sizes) or (bool(parts) and all(map(has_rows, parts)))
    is_structure = is_structure or (is_list and any(map(has_rows, value)) and all(map(is_batch, value)))
    if is_list and len(value) in kept and not is_structure:
        positions = kept[len(value)]
        return value if positions is None else type(value)(value[i] for i in positions)
    inside = values_in(value)
    if inside is None:
        return value
    return _rebuilt(value, [select_samples(child, kept, done) for child in inside])
