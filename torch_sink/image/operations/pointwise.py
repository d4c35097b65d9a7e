"""torch's functions of single values: limits, comparisons, choices by a mask, rounding, types.

Where a table of 256 values stands for the bytes of an image, stock code calls the function on that table, so any
function gives its very bits, on floats, masks and whole numbers. Operands are constants, and images that are made of
the same bytes, as `x` and `x > 0.5` are.

Listed are functions whose result depends on the value alone: torch's `exp`, `sigmoid` and free powers have other last
bits where a vector of the processor ends. A function that may turn a small difference into a large one, as a comparison
does, is not recorded on bytes that torch's float kernels have rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchvision.tv_tensors import _torch_function_helpers as return_types

from torch_sink.image.core.arguments import is_constant, is_number, is_tabled
from torch_sink.image.core.fallback import executing
from torch_sink.image.core.lowering import CONVERSIONS, LoweredImage, made_of_bytes, value_planes
from torch_sink.image.core.ops import (
    VALUE_CALLS,
    InPlaceOp,
    Op,
    Operation,
    Recorder,
    always,
    calls_from_bytes,
    replay,
)
from torch_sink.image.core.recording import Recording, record_maybe_in_place
from torch_sink.image.operations.tones import look_up
from torch_sink.triton_kernels.rows import Kind

# --- arguments, hashable, and different where stock code tells them apart, as it does 1, 1.0 and True, or 0.0 and -0.0

# A number is its type and its text; a small tensor its dtype, shape and numbers; an image that is made of the same
# bytes as the recorded one is the calls that make it of that one.
Argument = tuple[Any, ...]
_NUMBERS: dict[str, Any] = {"float": float, "int": int, "bool": "True".__eq__}
_MOST_VALUES = 3  # of a tensor, one a channel


def _number(value: Any) -> Argument | None:
    if type(value) in (bool, int):
        return type(value).__name__, repr(value)
    return ("float", float.__repr__(value)) if isinstance(value, float) else None


def _written(value: Any, shared: int) -> Argument | None:
    """An argument as it is recorded, or None if unsupported; all images among the arguments share the first calls."""
    if type(value) is Recording:
        return "image", value.calls[shared:]
    if value is None or isinstance(value, torch.dtype):
        return "itself", value
    if type(value) is not torch.Tensor:
        return _number(value)
    if not is_constant(value) or value.numel() > _MOST_VALUES or value.shape[1:] not in ((), (1, 1)):
        return None
    numbers = tuple(map(_number, value.flatten().tolist()))
    return None if None in numbers else ("tensor", value.dtype, tuple(value.shape), numbers)


def _given(argument: Argument, image: Any) -> Any:
    """An argument as stock code takes it."""
    kind, *about = argument
    if kind == "image":
        ops, in_place = about[0], any(type(op) is InPlaceOp for op in about[0])  # which keeps the strides
        return replay(image.clone() if in_place else image, ops, in_place)
    if kind == "tensor":
        dtype, shape, numbers = about
        return torch.tensor([_given(each, image) for each in numbers], dtype=dtype, device="cpu").view(shape)
    return _NUMBERS[kind](about[0]) if kind in _NUMBERS else about[0]


def _arguments(
    image: torch.Tensor, given: Sequence[Argument], named: Sequence[tuple[str, Argument]]
) -> tuple[list[Any], dict[str, Any]]:
    return [_given(each, image) for each in given], {key: _given(each, image) for key, each in named}


def _function(name: str) -> Callable[..., torch.Tensor]:
    return getattr(torch, name, None) or getattr(torch.Tensor, name)  # type: ignore[no-any-return]


def _stock(
    image: torch.Tensor, name: str, given: Sequence[Argument], named: Sequence[tuple[str, Argument]], dtype: torch.dtype
) -> torch.Tensor:
    """What a function of torch makes of arguments, some of which are made of `image`; `dtype` is that of the result."""
    args, kwargs = _arguments(image, given, named)
    return _function(name)(*args, **kwargs)


# --- what is recorded

# What a batch can be of: the kernels make float32, and a copy the rest.
_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16),
    *(torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64),
)
# Behind these, values are not further apart than they were.
_STEADY = frozenset(("clamp", "abs", "neg", "negative", "relu", "minimum", "maximum"))
# Names of arguments that say what is computed, and not where the result lies, or with which gradients.
_KEYWORDS = frozenset(("other", "fill_value", "dtype", "decimals"))
# Powers that torch computes as products and roots.
_POWERS = (2, 3, 0.5)
# Calls between two images of the same bytes that change no values.
_KEEPING = ("clone", "contiguous", "pointwise to bytes")


def pointwise(name: str, *args: Any, in_place: bool = False, **kwargs: Any) -> Any:
    """Records the call of a function of torch that makes one value of each, or returns `NotImplemented`."""
    images = [each for each in (*args, *kwargs.values()) if type(each) is Recording]
    if not images or not kwargs.keys() <= _KEYWORDS:
        return NotImplemented
    first, shared = images[0], _count_shared(images)
    before = first.calls[:shared]
    calls = None if shared is None or torch.get_default_dtype() != torch.float32 else calls_from_bytes(before)
    given = tuple(_written(each, shared or 0) for each in args)
    named = tuple((key, _written(each, shared or 0)) for key, each in kwargs.items())
    if calls is None or None in given or any(each is None for _, each in named):
        return NotImplemented
    dtype = _dtype_of_result(first.shape[0], calls, name, given, named)
    is_steady = name in _STEADY or (name == "to" and dtype is not None and dtype.is_floating_point)
    if dtype is None or not (is_steady or not any(op.promise.is_rounded for op in before)):
        return NotImplemented
    op = "pointwise to bytes" if dtype == torch.uint8 else "pointwise", (name, given, named, dtype)
    if in_place:
        fits = first is args[0] and shared == len(first.calls)
        return record_maybe_in_place(first, True, *op) if fits and dtype == first.dtype else NotImplemented
    return Recording(first.source, (*before, Op(*op)), first.shape, dtype)


def _count_shared(images: Sequence[Any]) -> int | None:
    """How many first calls images of one source share; None where the others are no calls on single values."""
    first, *others = images
    of_one = all(each.source is first.source and each.shape == first.shape for each in others)
    if not of_one or (others and return_types._must_return_subclass()):
        return None
    shared = 0
    for calls in zip(*(each.calls for each in images), strict=False):
        if any(op != calls[0] for op in calls):
            break
        shared += 1
    names = [op.name for each in images for op in each.calls[shared:]]
    fits = all((name in VALUE_CALLS and name not in CONVERSIONS) or name in _KEEPING for name in names)
    return shared if fits else None


@functools.lru_cache(maxsize=1024)
def _dtype_of_result(
    channels: int,
    calls: tuple[Op, ...],
    name: str,
    given: tuple[Argument, ...],
    named: tuple[tuple[str, Argument], ...],
) -> torch.dtype | None:
    """The type of what a function makes of the values of each byte; None where it is no such function of them.

    Nor where float32 does not hold the results: kernels make these, and no NaN and infinity.
    """
    values, function = made_of_bytes(channels, calls), _function(name)
    try:
        with executing():
            args, kwargs = _arguments(values, given, named)
            made = function(*args, **kwargs)
            apart = function(*map(_apart, args), **{key: _apart(each) for key, each in kwargs.items()})
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None  # stock code raises, or the arguments are for the shape of the image
    if not isinstance(made, torch.Tensor):
        return None
    as_float = made.float()
    is_held = bool(as_float.isfinite().all()) and bool((as_float.to(made.dtype) == made).all())
    if made.shape != values.shape or made.dtype not in _DTYPES or not is_held or not _are_same_bits(made, apart):
        return None
    # What becomes of other floats than these depends on the processor.
    is_sure = made.dtype != torch.uint8 or name != "to" or bool(((values > -1) & (values < 256)).all())
    return made.dtype if is_sure else None


def _apart(argument: Any) -> Any:
    """A tensor whose values do not lie side by side: torch computes each by itself, not several as one vector."""
    is_large = isinstance(argument, torch.Tensor) and argument.numel() > _MOST_VALUES
    return argument.repeat_interleave(2, -1)[..., ::2] if is_large else argument


def _are_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also of zeros, one of which `minimum` chooses by where they lie."""
    return torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


def _powered(image: Recording, exponent: Any, in_place: bool = False) -> Any:
    is_known = type(exponent) in (int, float) and exponent in _POWERS
    return pointwise("pow", image, exponent, in_place=in_place) if is_known else NotImplemented


def _chosen(mask: Any, image: Recording, other: Any) -> Any:
    return pointwise("where", mask, image, other) if is_mask(mask) else NotImplemented


def fill_where(image: Recording, mask: Any, value: Any, in_place: bool = False) -> Any:
    """Records what writes one value where a mask is true."""
    return pointwise("masked_fill", image, mask, value, in_place=in_place) if is_mask(mask) else NotImplemented


def is_mask(value: Any) -> bool:
    """True for a recorded tensor of truth values."""
    return type(value) is Recording and value.dtype == torch.bool


def _ways(name: str) -> dict[Any, Recorder]:
    """The recorders of a function of torch, which programs call as a function, a method, an operator, or in place."""

    def made(*args: Any, **kwargs: Any) -> Any:
        return pointwise(name, *args, **kwargs)

    def made_in_place(*args: Any, **kwargs: Any) -> Any:
        return pointwise(name, *args, in_place=True, **kwargs)

    owners, sign = (torch, torch.Tensor), _OPERATORS.get(name)
    found = [getattr(owner, name, None) for owner in owners] + [getattr(torch.Tensor, f"__{sign}__", None)]
    in_place = [getattr(torch.Tensor, each, None) for each in (f"{name}_", f"__i{sign}__")]
    return {
        **{each: made for each in found if each is not None},
        **{each: made_in_place for each in in_place if each is not None},
    }


# Functions of which torch knows the operator by another name.
_OPERATORS = {
    **{"eq": "eq", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "invert"},
    **{"floor_divide": "floordiv", "pow": "pow"},
}
_NAMES = (
    *("abs", "neg", "negative", "sign", "square", "sqrt", "floor", "ceil", "round", "trunc", "relu"),
    *("gt", "ge", "lt", "le", "eq", "ne", "greater", "greater_equal", "less", "less_equal", "not_equal"),
    *("logical_and", "logical_or", "logical_xor", "logical_not"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "floor_divide"),
    *("minimum", "maximum", "isnan", "isinf", "isfinite"),
    *("zeros_like", "ones_like", "full_like"),
)


def _is_clamped(op: Op) -> bool:
    name, given, _, dtype = op.args
    return name == "clamp" and dtype == torch.float32 and all(map(_is_unit, given[1:]))


def _is_unit(bound: Argument) -> bool:
    return bound[0] in _NUMBERS and 0 <= _given(bound, None) <= 1


Operation(
    "function of single values",
    stock={"pointwise": _stock},
    record={
        **{function: recorder for name in _NAMES for function, recorder in _ways(name).items()},
        **dict.fromkeys((torch.pow, torch.Tensor.pow, torch.Tensor.__pow__), lambda x, exponent: _powered(x, exponent)),
        **dict.fromkeys((torch.Tensor.pow_, torch.Tensor.__ipow__), lambda x, exponent: _powered(x, exponent, True)),
        torch.where: lambda condition, input, other: _chosen(condition, input, other),
        torch.Tensor.where: lambda image, condition, other: _chosen(condition, image, other),
        **dict.fromkeys(
            (torch.masked_fill, torch.Tensor.masked_fill), lambda x, mask, value: fill_where(x, mask, value)
        ),
        torch.Tensor.masked_fill_: lambda x, mask, value: fill_where(x, mask, value, in_place=True),
    },
    is_value=True,
    clamps=_is_clamped,
    leaves_range=always,
    result=lambda op: op.args[3],  # type: ignore[no-any-return]
)


def _lower_to_bytes(lowered: LoweredImage, *args: Any) -> None:
    look_up(lowered, *value_planes(lowered.channels, (*lowered.value_ops, Op("pointwise", args))))
    lowered.value_ops[:] = [Op("pil_to_tensor")]
    lowered.is_uint8 = True


Operation(
    "function of single values that makes bytes",
    stock={"pointwise to bytes": _stock},
    lower=_lower_to_bytes,
    result=lambda op: torch.uint8,
)

# --- limits


def _limited(image: Recording, low: Any, high: Any, in_place: bool) -> Any:
    made = pointwise("clamp", image, low, high, in_place=in_place)
    is_recorded = made is not NotImplemented or not (type(image) is Recording and image.dtype == torch.float32)
    if is_recorded or not (is_number(low) and is_number(high) and (low, high) == (0, 1)) or is_tabled(image):
        return made
    return record_maybe_in_place(image, in_place, "clamp", ())


def _limits(in_place: bool) -> dict[str, Recorder]:
    def clamp(image: Recording, min: Any = None, max: Any = None) -> Any:
        return _limited(image, min, max, in_place)

    def clamp_min(image: Recording, min: Any) -> Any:
        return _limited(image, min, None, in_place)

    def clamp_max(image: Recording, max: Any) -> Any:
        return _limited(image, None, max, in_place)

    named = {"clamp": clamp, "clip": clamp, "clamp_min": clamp_min, "clamp_max": clamp_max}
    return {f"{name}_" if in_place else name: recorder for name, recorder in named.items()}


# Where no table stands for floats, the kernels cut off what leaves [0, 1].
Operation(
    "clamp",
    stock={"clamp": lambda image: torch.clamp(image, 0, 1)},
    record={
        getattr(owner, name): recorder
        for owner in (torch, torch.Tensor)
        for in_place in (False, True)
        for name, recorder in _limits(in_place).items()
    },
    lower=lambda lowered: lowered.add(Kind.BRIGHTNESS, factor=1.0),
    clamps=always,
)
