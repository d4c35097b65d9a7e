"""Tensors among the arguments of recorded calls: what was drawn for each pixel, such as a displacement field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from torch_sink.image.core.ops import Op


class TensorArgument:
    """A tensor that nobody writes to; equal to itself alone, so that calls can be told apart without reading it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"a {self.tensor.dtype} tensor of shape {list(self.tensor.shape)}"


class PackedArgument(NamedTuple):
    """Where the tensor of a `TensorArgument` lies in the bytes of a batch."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def unpacked(self, blob: torch.Tensor) -> TensorArgument:
        """The argument again; its tensor is a view of `blob`, uint8 [bytes]."""
        end = self.begin + torch.Size(self.shape).numel() * self.dtype.itemsize
        return TensorArgument(blob[self.begin : end].view(self.dtype).view(self.shape))


def tensor_arguments(programs: Iterable[Sequence[Op]]) -> Iterator[TensorArgument]:
    """All of them in the programs of a batch."""
    for ops in programs:
        for op in ops:
            for argument in op.args:
                if type(argument) is TensorArgument:
                    yield argument


def with_packed(ops: Sequence[Op], places: dict[int, PackedArgument]) -> tuple[Op, ...]:
    """The calls with their tensors replaced; `places` by the `id` of the argument."""
    return tuple(Op(op.name, tuple(places.get(id(argument), argument) for argument in op.args)) for op in ops)


def with_unpacked(ops: Sequence[Op], blob: torch.Tensor) -> tuple[Op, ...]:
    """The calls as they were recorded."""
    if not any(type(argument) is PackedArgument for op in ops for argument in op.args):
        return tuple(ops)
    return tuple(
        Op(op.name, tuple(arg.unpacked(blob) if type(arg) is PackedArgument else arg for arg in op.args)) for op in ops
    )
