"""The inside of a batch: its leaves, the lazy ones among them, and samples that were skipped or replaced."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

LEAF_TYPES = (torch.Tensor, str, bytes, PackedSequence)  # the last is a tuple that moves to a device as a whole


def is_lazy(leaf: Any) -> bool:
    """Whether `leaf` still has to be decoded and transformed (it is a Tensor subclass, so ask this first)."""
    return hasattr(type(leaf), "__torch_sink_execute__")


def is_flat(batch: Any) -> bool:
    """Whether `batch` is a list or tuple of nothing but ordinary tensors: the usual one, found without a walk."""
    if type(batch) is not list and type(batch) is not tuple:
        return False
    for leaf in batch:  # noqa: SIM110 - a generator would cost more than all of this
        if type(leaf) is not torch.Tensor:
            return False
    return True


def is_plain(leaf: Any) -> bool:
    """Whether `leaf` is nothing but dense values: no sparse, nested or quantized tensor, and no subclass."""
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_quantized)


def is_transparent(batch: Any) -> bool:
    """Whether `batch` is made of ordinary and lazy tensors and plain values, in containers that hold nothing else."""
    if batch is None or isinstance(batch, (int, float, complex, str, bytes)):
        return True
    if isinstance(batch, torch.Tensor):
        return is_plain(batch) or is_lazy(batch)
    if type(batch) in (list, tuple) or hasattr(batch, "_fields"):
        return all(is_transparent(value) for value in batch)
    if dataclasses.is_dataclass(batch) and hasattr(batch, "__dict__") and not isinstance(batch, type):
        batch = vars(batch)
    return type(batch) is dict and all(is_transparent(value) for value in batch.values())


def map_leaves(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Rebuilds `batch` with `function` applied to every leaf; containers keep their type.

    Containers are mappings, lists, tuples (named ones too) and dataclass instances; everything else is a leaf. A
    container of which no leaf changed is returned itself, so a batch that needs nothing done is not copied.
    """
    container = _opened(batch)
    if container is None:
        return function(batch)
    values, build = container
    new = [map_leaves(value, function) for value in values]
    unchanged = all(ours is theirs for ours, theirs in zip(new, values, strict=True))
    return batch if unchanged else build(new)


def leaves(batch: Any) -> list[Any]:
    """The leaves of `batch` in the order in which `map_leaves` meets them."""
    container = _opened(batch)
    return [batch] if container is None else [leaf for value in container[0] for leaf in leaves(value)]


def _opened(batch: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """What a container holds, and what makes one like it of other values; None for a leaf."""
    if isinstance(batch, LEAF_TYPES):
        return None
    if isinstance(batch, Mapping):
        return list(batch.values()), lambda new: _new_mapping(batch, new)
    if isinstance(batch, (list, tuple)):
        return list(batch), lambda new: _new_sequence(batch, new)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch)]
        return [getattr(batch, name) for name in fields], lambda new: _new_dataclass(batch, fields, new)
    return None


def _new_mapping(batch: Mapping[Any, Any], values: list[Any]) -> Any:
    pairs = dict(zip(batch.keys(), values, strict=True))
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return pairs  # of a read-only view, say, it is not known how a new one is made
    clone = copy.copy(batch)
    clone.update(pairs)
    return clone


def _new_sequence(batch: Any, values: list[Any]) -> Any:
    if hasattr(batch, "_fields"):
        return type(batch)(*values)
    if type(batch) is list or not isinstance(batch, list):
        return type(batch)(values)
    clone = copy.copy(batch)
    clone[:] = values
    return clone


def _new_dataclass(batch: Any, fields: list[str], values: list[Any]) -> Any:
    clone = copy.copy(batch)
    for name, value in zip(fields, values, strict=True):
        object.__setattr__(clone, name, value)  # frozen ones too: the clone is not shared yet
    return clone


def tensor_bytes(batch: Any) -> int:
    """Bytes of the tensors in `batch`; shape and dtype do not execute lazy ones, and nested ones have no shape."""
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    return sum((one.shape.numel() if is_lazy(one) else one.numel()) * one.dtype.itemsize for one in tensors)


def agree_on_positions(shown: Sequence[list[int] | None], batch_size: int, policy: str) -> list[int] | None:
    """The original positions that the rows of the whole batch show, when lazy leaves lost different samples.

    `shown` has for each lazy leaf the positions that its rows show, or None for all of them in order; `batch_size` is
    that before anything was lost. None when nothing was.
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


def select_rows(shown: list[int] | None, wanted: list[int]) -> list[int]:
    """Row of a lazy leaf's tensor for each wanted position; `shown` is what its rows show (None: all in order)."""
    if shown is None:
        return wanted
    row_of = {position: row for row, position in reversed(list(enumerate(shown)))}
    return [row_of[position] for position in wanted]


def select_samples(value: Any, positions: list[int], batch_size: int, is_done: Callable[[Any], bool]) -> Any:
    """Indexes everything in `value` that is laid out by sample: tensors `[N, ...]` and lists or tuples of length N.

    A list or tuple that holds a finished leaf, or only tensors of N rows, is structure and not a list of samples.
    `is_done` tells whether a leaf was indexed already.
    """
    if isinstance(value, torch.Tensor):
        if is_done(value) or value.ndim == 0 or value.shape[0] != batch_size:
            return value
        return value.index_select(0, torch.tensor(positions, dtype=torch.long, device=value.device))
    plain = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
    if plain and len(value) == batch_size and not _is_structure(value, batch_size, is_done):
        return type(value)(value[i] for i in positions)
    container = _opened(value)
    if container is None:
        return value
    return container[1]([select_samples(child, positions, batch_size, is_done) for child in container[0]])


def _is_structure(value: Sequence[Any], batch_size: int, is_done: Callable[[Any], bool]) -> bool:
    inside = leaves(value)
    if any(is_done(leaf) for leaf in inside):
        return True
    rows = [isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == batch_size for leaf in inside]
    return bool(rows) and all(rows)
