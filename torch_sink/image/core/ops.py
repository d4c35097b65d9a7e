"""Recorded calls, and the operations that they are calls of.

Three words, one meaning each: an `Op` is one recorded call, a name and arguments. An `Operation` is the kind of such
calls, all that the package knows of them; `operations/` holds them, one file a family. An atom is a piece of kernel
work, several of which may make up a call (`core/lowering.py`).

Replaying the recorded calls in order, in stock code, is the definition of what a `Recording` stands for; the kernels
have to give the same values.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Stock = Callable[..., Any]
Lower = Callable[..., None]
# Takes a `Recording` and the other arguments of the stock function that it stands in for, and returns another one, or
# `NotImplemented` if unsupported: the caller falls back.
Recorder = Callable[..., Any]

# Types of tensors that kernels compute with, and those that they write: float16 and bfloat16 can only be the last
# result. Masks and other integers can only be moved, or mapped value by value.
NUMERIC = (torch.uint8, torch.float32)
PIXELS = (*NUMERIC, torch.float16, torch.bfloat16)


class Op(NamedTuple):
    """One recorded call.

    Attributes:
        name: a key of `OPERATIONS`.
        args: everything but the image, hashable.
    """

    name: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.args))})"

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.name]

    @property
    def promise(self) -> Promise:
        """How close the kernels come to this call."""
        if self.name.startswith("pil."):
            return EXACT  # Pillow computes in integers, or rounds the same way everywhere
        promise = self.operation.promise
        return promise(self) if callable(promise) else promise


class InPlaceOp(Op):
    """A recorded call in place: stock code writes its result to the tensor itself, which so keeps its strides."""

    __slots__ = ()


class ViewOp(Op):
    """A recorded call whose result shares memory with its input in stock code."""

    __slots__ = ()


class Promise(NamedTuple):
    """How close the kernels come to stock code.

    Attributes:
        largest: largest difference of two bytes.
        equal_share: smallest share of bytes that are equal, 0 to 1.
        floats: largest difference of two float32 values in [0, 1].
        is_rounded: bytes go through torch's float kernels, whose last bits depend on the processor. A call that would
            turn such a difference into a large one, a threshold for instance, falls back to stock torchvision.
    """

    largest: float = 0.0
    equal_share: float = 1.0
    floats: float = 0.0
    is_rounded: bool = False


# A difference of float32 values, and one where torch may round the position that a value is taken from differently.
CLOSE, MOVED = 4e-6, 1e-4
# Computed in integers, or one value at a time.
EXACT = Promise()
EXACT_BYTES = Promise(floats=CLOSE)
# The mean of gray values is a float32 sum in torch, and hues are floats.
BLENDED = Promise(1, 0.999, CLOSE)
ROUNDED = Promise(1, 0.99, CLOSE, is_rounded=True)
# The nearest pixel of a position between two may be either.
NEAREST = Promise(math.inf, 0.99, MOVED)


@dataclass(frozen=True, eq=False)
class Operation:
    """All that the package knows of one kind of recorded call.

    Attributes:
        name: of the operation, for messages.
        stock: {name of the recorded call: stock function}. Names begin with whose code it is: "pil." for calls on
            Pillow images, "v1." and "v2." for the kernels of `transforms` and `transforms.v2` on tensors. The function
            takes the image, and the arguments of the recorded call.
        record: {what it stands in for: recorder}. "pil.pad" is torchvision's functional on Pillow images, "v1.pad" and
            "v2.pad" are its kernels on tensors, "Image.crop" is Pillow's own method, and a function is torch's.
            Recorders for "v1." and "v2." get "v1" or "v2" as their first argument.
        lower: turns its calls into kernel work: {name: function}, or one function for all names. It takes the
            `LoweredImage`, and the arguments of the recorded call. Calls that a table of 256 values holds need none.
        promise: how close the kernels come to it on tensors, or a function of the call that says so.
        takes_palettes: it only moves pixels, which may be the numbers of colors in a palette.
        is_value: it makes one value of each, behind a conversion to a tensor: a table of 256 values holds it.
        moves: on floats it moves pixels and writes no new values, so that it may come before a table of values.
        changes_layout: a function of the call, an `Op`, as those below: True if it may make a tensor that is not
            contiguous of one that is.
        clamps: True if its floats lie in [0, 1].
        leaves_range: True if its floats may lie outside of [0, 1].
        overshoots: True if its floats may leave [0, 1] by what a bicubic filter adds.
        loses_info: True if a Pillow image loses its `info`.
        result: the type of tensor that the call makes where it decides that, else None.
    """

    name: str
    stock: Mapping[str, Stock]
    record: Mapping[Any, Recorder] = field(default_factory=dict)
    lower: Lower | Mapping[str, Lower] | None = None
    promise: Promise | Callable[[Op], Promise] = EXACT
    takes_palettes: bool = False
    is_value: bool = False
    moves: bool = False
    changes_layout: Callable[[Op], bool] = lambda op: False
    clamps: Callable[[Op], bool] = lambda op: False
    leaves_range: Callable[[Op], bool] = lambda op: False
    overshoots: Callable[[Op], bool] = lambda op: False
    loses_info: Callable[[Op], bool] = lambda op: False
    result: Callable[[Op], torch.dtype | None] = lambda op: None

    def __post_init__(self) -> None:
        """Makes the operation known by the names of its calls, and its recorders by what they stand in for."""
        for name, stock in self.stock.items():
            if name in OPERATIONS:
                raise ValueError(f"operation {name!r} is defined twice")
            OPERATIONS[name], STOCK[name] = self, stock
        if self.lower is not None:
            LOWER.update(dict.fromkeys(self.stock, self.lower) if callable(self.lower) else self.lower)
        if self.is_value:
            VALUE_CALLS.update(self.stock)
        else:
            PIXEL_CALLS.update(LOWER.keys() & self.stock.keys())
        for name, recorder in self.record.items():
            has_family = isinstance(name, str) and name.startswith(("v1.", "v2."))
            recorded(name, of="an operation")(functools.partial(recorder, name[:2]) if has_family else recorder)
        TAKE_PALETTES.update(self.record if self.takes_palettes else ())


# {name of a recorded call: its operation}, {its name: the stock function}, {its name: what lowers it to atoms}.
OPERATIONS: dict[str, Operation] = {}
STOCK: dict[str, Stock] = {}
LOWER: dict[str, Lower] = {}
# Names of the calls of operations with `is_value`, and of the others that are lowered to atoms.
VALUE_CALLS: set[str] = set()
PIXEL_CALLS: set[str] = set()
# All that is recorded. Of operations: {what a recorder stands in for, as in `Operation.record`: the recorder}. Of each
# class of lazy tensors: {function of torch: the recorder}.
RECORDERS: dict[Any, Recorder] = {}
RECORDERS_OF: dict[str, dict[Any, Recorder]] = {"an operation": RECORDERS, "an image": {}, "a batch": {}}
# Those of operations that take palette images.
TAKE_PALETTES: set[Any] = set()


def recorded(*names: Any, of: str) -> Callable[[Recorder], Recorder]:
    """Registers a recorder in the table of `RECORDERS_OF` with that name.

    Raises:
        ValueError: one of the calls has a recorder.
    """
    table = RECORDERS_OF[of]

    def register(recorder: Recorder) -> Recorder:
        for name in names:
            if name in table:
                raise ValueError(f"{name} of {of} is recorded twice")
            table[name] = recorder
        return recorder

    return register


def made_by(recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
    """What a recorder makes; `NotImplemented` where it takes no such arguments: stock code then says what is wrong."""
    try:
        return recorder(*args, **kwargs)
    except TypeError:
        if takes(recorder, *args, **kwargs):
            raise
        return NotImplemented


def takes(recorder: Recorder, *args: Any, **kwargs: Any) -> bool:
    """Whether a recorder has parameters for these arguments."""
    try:
        inspect.signature(recorder).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def always(op: Op) -> bool:
    """The value of a field of `Operation` that is true of every call."""
    return True


def operations() -> list[Operation]:
    """All operations, once each."""
    return list(dict.fromkeys(OPERATIONS.values()))


def both(name: str, recorder: Recorder) -> dict[Any, Recorder]:
    """A recorder for the kernels of `transforms` and of `transforms.v2` of one name."""
    return {f"v1.{name}": recorder, f"v2.{name}": recorder}


def makes_floats(op: Op) -> bool:
    """True for a call that always gives a tensor of floats."""
    return op.operation.result(op) not in (None, torch.uint8)


def makes_bytes(op: Op) -> bool:
    """True for a call on tensors that always gives a uint8 tensor or a Pillow image."""
    return op.operation.result(op) == torch.uint8


def calls_from_bytes(ops: Sequence[Op]) -> tuple[Op, ...] | None:
    """The calls that make one value of each byte, those since the image was last one of bytes, without mere moves.

    None where some among them need more than the byte: a table of 256 values cannot hold these.
    """
    end_of_bytes = max((at for at, op in enumerate(ops) if makes_bytes(op)), default=-1) + 1
    begin = next((at for at in range(end_of_bytes, len(ops)) if makes_floats(ops[at])), len(ops))
    calls = tuple(op for op in ops[begin:] if not op.operation.moves)
    return calls if all(op.operation.is_value for op in calls) else None


def count_before_values(ops: Sequence[Op]) -> int:
    """How many calls come before the last ones, which make one value of each."""
    count = len(ops)
    while count and ops[count - 1].name in VALUE_CALLS:
        count -= 1
    return count


def replay(image: Any, ops: Sequence[Op], in_place: bool = False) -> Any:
    """Runs recorded calls in stock code.

    Args:
        image: a plain Pillow image or tensor; never written to.
        ops: calls, in order.
        in_place: an `InPlaceOp` does so here too, on what an earlier call made; the values are the same.
    """
    for op in ops:
        made = STOCK[op.name](image, *op.args)
        image = image.copy_(made) if in_place and type(op) is InPlaceOp else made
    return image


# --- tensors among the arguments of calls: what was drawn for each pixel, such as a displacement field


class TensorArgument:
    """A tensor among the arguments of a call, never written to; equal to itself alone, so that comparing is cheap."""

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


def with_packed(ops: Sequence[Op], packed: dict[int, PackedArgument]) -> tuple[Op, ...]:
    """The calls with their tensors replaced; `packed` is {`id` of a `TensorArgument`: what replaces it}."""
    return tuple(Op(op.name, tuple(packed.get(id(argument), argument) for argument in op.args)) for op in ops)


def with_unpacked(ops: Sequence[Op], blob: torch.Tensor) -> tuple[Op, ...]:
    """The calls as they were recorded."""
    if not any(type(argument) is PackedArgument for op in ops for argument in op.args):
        return tuple(ops)
    return tuple(
        Op(op.name, tuple(arg.unpacked(blob) if type(arg) is PackedArgument else arg for arg in op.args)) for op in ops
    )
