"""What each instruction computes: the types of its operands and its result, and a function of arrays of these types.

Instructions that touch memory, or decide where a warp goes, are not here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import arithmetic
from .arithmetic import Array

Modifiers = tuple[str, ...]


class Form(NamedTuple):
    """One instruction on typed arrays.

    Attributes:
        function: of the operands.
        operands: their types, as PTX calls them.
        result: its type.
        has_predicate: the function gives a predicate as well, which may be left unnamed.
    """

    function: Callable[..., Any]
    operands: tuple[str, ...]
    result: str
    has_predicate: bool = False


class UnknownInstruction(Exception):
    """No table says what it does."""


_FORMS: dict[str, Callable[[Modifiers], Form]] = {}


def opcode(*names: str) -> Callable[[Callable[..., Form]], Callable[..., Form]]:
    """Registers how the forms of opcodes are made: from the name, where there are several, and the modifiers."""

    def register(make: Callable[..., Form]) -> Callable[..., Form]:
        for name in names:
            if name in _FORMS:
                raise ValueError(f"{name} is registered twice")
            _FORMS[name] = make if len(names) == 1 else lambda modifiers, name=name: make(name, modifiers)
        return make

    return register


def form_of(name: str) -> Form:
    """The form of an instruction, for instance "mul.wide.s32"."""
    code, *modifiers = name.split(".")
    try:
        form = _FORMS[code](tuple(modifiers))
        for kind in (*form.operands, form.result):
            dtype_of(kind)
        return form
    except (KeyError, ValueError):
        raise UnknownInstruction(f"{name} is not in {__file__}") from None


def dtype_of(kind: str) -> np.dtype:
    """ "s32" -> int32; of what NumPy does not have, the bits."""
    if kind == "pred":
        return np.dtype(bool)
    if kind == "bf16" or "x" in kind:
        return np.dtype(f"u{2 if kind == 'bf16' else 4}")
    return np.dtype(f"{ {'b': 'u', 'u': 'u', 's': 'i', 'f': 'f'}[kind[0]] }{int(kind[1:]) // 8}")


def doubled(kind: str) -> str:
    """ "s32" -> "s64"."""
    return f"{kind[0]}{2 * int(kind[1:])}"


def _only(modifiers: Modifiers, *known: str) -> str:
    """The type, which is the last modifier; what the others ask for must be known, and be what NumPy does."""
    if unknown := set(modifiers[:-1]).difference(known):
        raise KeyError(*unknown)
    return modifiers[-1]


_SUMS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


@opcode("add", "sub")
def _sum(name: str, modifiers: Modifiers) -> Form:
    kind, function = _only(modifiers, "rn"), _SUMS[name]
    if kind == "s16x2":
        return Form(lambda a, b: arithmetic.in_halves(function, a, b), (kind, kind), kind)
    return Form(function, (kind, kind), kind)


@opcode("mul")
def _product(modifiers: Modifiers) -> Form:
    kind = _only(modifiers, "rn", "lo", "hi", "wide")
    if "wide" in modifiers:
        return Form(lambda a, b: _widened(a) * b, (kind, kind), doubled(kind))
    if "hi" in modifiers:
        bits = int(kind[1:])
        return Form(lambda a, b: (_widened(a) * b >> bits).astype(dtype_of(kind)), (kind, kind), kind)
    return Form(operator.mul, (kind, kind), kind)


@opcode("mad")
def _multiply_add(modifiers: Modifiers) -> Form:
    kind = _only(modifiers, "lo", "wide")
    if "wide" in modifiers:
        wide = doubled(kind)
        return Form(lambda a, b, c: _widened(a) * b + c, (kind, kind, wide), wide)
    return Form(lambda a, b, c: a * b + c, (kind, kind, kind), kind)


def _widened(value: Array) -> Array:
    return value.astype(f"{value.dtype.kind}{2 * value.itemsize}")


@opcode("fma")
def _fused(modifiers: Modifiers) -> Form:
    kind = {("rn", "f32"): "f32"}[modifiers]
    return Form(arithmetic.fused_multiply_add, (kind, kind, kind), kind)


@opcode("div")
def _quotient(modifiers: Modifiers) -> Form:
    kind = _only(modifiers, "rn", "ftz")
    divide = operator.truediv if kind[0] == "f" else arithmetic.quotient
    if "ftz" not in modifiers:
        return Form(divide, (kind, kind), kind)
    flush = arithmetic.flushed  # the division of Triton 3.4
    return Form(lambda a, b: flush(divide(flush(a), flush(b))), (kind, kind), kind)


@opcode("rem")
def _remainder(modifiers: Modifiers) -> Form:
    kind = _only(modifiers)
    return Form(lambda a, b: np.where(b == 0, a, np.fmod(a, np.where(b == 0, b.dtype.type(1), b))), (kind, kind), kind)


@opcode("sqrt")
def _root(modifiers: Modifiers) -> Form:
    kind = _only(modifiers, "rn", "ftz")
    if "ftz" not in modifiers:
        return Form(np.sqrt, (kind,), kind)
    return Form(lambda a: arithmetic.flushed(np.sqrt(arithmetic.flushed(a))), (kind,), kind)


@opcode("min", "max")
def _extreme(name: str, modifiers: Modifiers) -> Form:
    kind = _only(modifiers, "NaN")
    if kind[0] != "f":
        return Form({"min": np.minimum, "max": np.maximum}[name], (kind, kind), kind)
    of_numbers = {"min": arithmetic.smaller, "max": arithmetic.larger}[name]
    if "NaN" not in modifiers:
        return Form(of_numbers, (kind, kind), kind)
    return Form(lambda a, b: np.where(np.isnan(a) | np.isnan(b), a + b, of_numbers(a, b)), (kind, kind), kind)


@opcode("neg", "abs")
def _sign(name: str, modifiers: Modifiers) -> Form:
    kind = _only(modifiers)
    return Form({"neg": operator.neg, "abs": np.abs}[name], (kind,), kind)


@opcode("and", "or", "xor")
def _logic(name: str, modifiers: Modifiers) -> Form:
    kind = _only(modifiers)
    return Form({"and": operator.and_, "or": operator.or_, "xor": operator.xor}[name], (kind, kind), kind)


@opcode("not")
def _not(modifiers: Modifiers) -> Form:
    kind = _only(modifiers)
    return Form(operator.invert, (kind,), kind)


@opcode("shl", "shr")
def _shift(name: str, modifiers: Modifiers) -> Form:
    kind = _only(modifiers)
    return Form({"shl": arithmetic.shifted_left, "shr": arithmetic.shifted_right}[name], (kind, "u32"), kind)


@opcode("shf")
def _funnel(modifiers: Modifiers) -> Form:
    """32 bits of the 64 that two words make, the first of them the lower."""
    start = {"l": lambda by: 32 - (by & 31), "r": lambda by: by & 31}[modifiers[0]]
    kind = {("wrap", "b32"): "b32"}[modifiers[1:]]

    def cut(low: Array, high: Array, by: Array) -> Array:
        both = high.astype(np.uint64) << np.uint64(32) | low
        return (both >> start(by).astype(np.uint64)).astype(np.uint32)

    return Form(cut, (kind, kind, "u32"), kind)


@opcode("bfe")
def _extract(modifiers: Modifiers) -> Form:
    kind = {("s32",): "s32", ("u32",): "u32", ("u64",): "u64"}[modifiers]
    return Form(arithmetic.extracted_bits, (kind, "u32", "u32"), kind)


@opcode("prmt")
def _permute(modifiers: Modifiers) -> Form:
    kind = {("b32",): "b32"}[modifiers]
    return Form(arithmetic.permuted_bytes, (kind, kind, kind), kind)


@opcode("popc")
def _count_ones(modifiers: Modifiers) -> Form:
    return Form(lambda a: np.bitwise_count(a).astype(np.uint32), (_only(modifiers),), "u32")


@opcode("selp")
def _select(modifiers: Modifiers) -> Form:
    bits = f"b{_only(modifiers)[1:]}"
    return Form(lambda a, b, which: np.where(which, a, b), (bits, bits, "pred"), bits)


_COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


@opcode("setp")
def _compare(modifiers: Modifiers) -> Form:
    """Of floats: "lt" is false where one is NaN, "ltu" true, "num" and "nan" ask for no more."""
    comparison, kind = modifiers
    compare = _COMPARISONS.get(comparison.removesuffix("u") if kind[0] == "f" else comparison)
    if kind[0] != "f":
        return Form(_COMPARISONS[comparison], (kind, kind), "pred")

    def with_nan(a: Array, b: Array) -> Array:
        none = np.isnan(a) | np.isnan(b)
        if comparison in ("num", "nan"):
            return none if comparison == "nan" else ~none
        return compare(a, b) | none if comparison.endswith("u") else compare(a, b) & ~none

    if compare is None and comparison not in ("num", "nan"):
        raise KeyError(comparison)
    return Form(with_nan, (kind, kind), "pred")


_TO_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@opcode("cvt")
def _convert(modifiers: Modifiers) -> Form:
    *how, to, of = modifiers
    if to == "bf16":
        return Form(arithmetic.to_bfloat16, ({("rn", "f32"): of}[(*how, of)],), to)
    if of == "bf16":
        return Form(lambda a: (a.astype(np.uint32) << 16).view(np.float32), ({((), "f32"): of}[tuple(how), to],), to)
    dtype = dtype_of(to)
    if of[0] != "f":
        _only((*how, to), "rn")
        return Form(lambda a: a.astype(dtype), (of,), to)
    flush = arithmetic.flushed if "ftz" in how else lambda a: a
    round_to = next((_TO_WHOLE[name] for name in how if name in _TO_WHOLE), None)
    _only((*how, to), "ftz", "rn", *_TO_WHOLE)
    if to[0] == "f":
        whole = round_to or (lambda a: a)
        return Form(lambda a: flush(whole(flush(a))).astype(dtype), (of,), to)
    if round_to is None:
        raise KeyError("rounding")
    return Form(lambda a: arithmetic.to_integer(round_to(flush(a)), dtype), (of,), to)


@opcode("shfl")
def _shuffle(modifiers: Modifiers) -> Form:
    _, mode, kind = {"sync": modifiers}[modifiers[0]]
    return Form(
        lambda value, lane, limits, members: arithmetic.shuffled(mode, value, lane, _of_all(limits, members)),
        (kind, "u32", "u32", "u32"),
        kind,
        has_predicate=True,
    )


_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}


@opcode("redux")
def _reduce(modifiers: Modifiers) -> Form:
    _, name, kind = {"sync": modifiers}[modifiers[0]]
    reduction, dtype = _REDUCTIONS[name], dtype_of(kind)

    def of_warp(value: Array, members: Array) -> Array:
        lanes = np.broadcast_to(_of_all(value, members), (len(value), arithmetic.LANES))
        return reduction.reduce(lanes, axis=1, keepdims=True, dtype=dtype)

    return Form(of_warp, (kind, "u32"), kind)


@opcode("vote")
def _ballot(modifiers: Modifiers) -> Form:
    """A bit for each lane."""
    kind = {("sync", "ballot", "b32"): "b32"}[modifiers]

    def of_warp(value: Array, members: Array) -> Array:
        lanes = np.broadcast_to(_of_all(value, members), (len(value), arithmetic.LANES))
        return (lanes.astype(np.uint32) << np.arange(arithmetic.LANES, dtype=np.uint32)).sum(
            1, np.uint32, keepdims=True
        )

    return Form(of_warp, ("pred", "u32"), kind)


def _of_all(value: Array, members: Array) -> Array:
    if (members != 0xFFFFFFFF).any():
        raise UnknownInstruction("only whole warps exchange values here")
    return value
