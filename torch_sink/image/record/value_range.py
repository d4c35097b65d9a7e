"""What is known of the floats that a handle stands for: their range, and whether the kernels make their very bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torch_sink.image.ops import Op, makes_bytes, makes_floats
from torch_sink.image.record.tensor_argument import TensorArgument

_GAMMA = frozenset(("v1.adjust_gamma", "v2.adjust_gamma"))
_CONTRAST = frozenset(("v1.float_contrast", "v2.float_contrast"))
# Powers that torch makes by multiplying, with the same bits everywhere.
_EXACT_POWERS = (0, 1, 2, 3)
# What ends with a cut at 0 and 1.
_CLAMPED = frozenset(
    ("adjust_brightness", "float_contrast", "adjust_saturation", "adjust_sharpness", "autocontrast", "equalize",
     "posterize")
)  # fmt: skip
_WARPS = frozenset(("affine", "rotate", "rotate_expanded", "perspective", "elastic", "elastic_transform"))
# Negative weights of a bicubic filter, as a share of the range of values: more than there can be.
_OVERSHOOT = 0.5
_LARGEST_BYTE_SCALE = 256

Range = tuple[float, float]


def since_conversion(handle: Any) -> tuple[Op, ...]:
    """The call that turned bytes into floats, and those after it."""
    ops = handle.sink_ops
    begin = max(at for at, op in enumerate(ops) if makes_floats(op))
    # Of two conversions to floats in a row the first one met bytes.
    while begin and any(map(makes_floats, ops[:begin])):
        earlier = max(at for at, op in enumerate(ops[:begin]) if makes_floats(op))
        if any(makes_bytes(op) for op in ops[earlier:begin]):
            break
        begin = earlier
    return ops[begin:]


def is_from_bytes(handle: Any) -> bool:
    """True where the type of the handle's floats is the one that bytes were turned into."""
    conversion = since_conversion(handle)[0]
    return (torch.float32 if conversion.name == "to_tensor" else conversion.args[0]) == handle.sink_dtype


def is_exact(handle: Any) -> bool:
    """True while the kernels make stock code's very bits of floats."""
    return not any(map(_is_inexact, _with_branches(since_conversion(handle))))


def _is_inexact(op: Op) -> bool:
    """True for most powers, which torch makes in two ways, by the place in memory, and for a sum of unknown order."""
    return (op.name in _GAMMA and op.args[0] not in _EXACT_POWERS) or (op.name in _CONTRAST and op.args[1] is None)


def _with_branches(ops: Sequence[Op]) -> Iterator[Op]:
    """The calls, and those of the chains that some of them mix."""
    for op in ops:
        yield op
        if op.name == "augmix":
            for _, chain in op.args[0]:
                yield from chain


def fits_int32(handle: Any) -> bool:
    """True where every value, times what floats are multiplied by to become bytes, has a whole part of 32 bits."""
    low, high = value_range(handle)
    return max(-low, high) * _LARGEST_BYTE_SCALE < 2**31


def value_range(handle: Any) -> Range:
    """Bounds of every value."""
    conversion, *following = since_conversion(handle)
    unscaled = conversion.name == "v2.to_dtype" and not conversion.args[1]
    return _after_all(following, (0.0, 255.0) if unscaled else (0.0, 1.0))


def _after(op: Op, bounds: Range) -> Range:
    """Bounds of what a call makes of values in `bounds`."""
    name, (low, high) = op.name.split(".", 1)[-1], bounds
    if name in _CLAMPED:
        return 0.0, 1.0
    if name == "adjust_gamma":
        gamma, gain = op.args
        return _power_of(max(-low, high), gamma, low < 0) if op.name == "v2.adjust_gamma" and gain == 1 else (0.0, 1.0)
    if name == "normalize":
        means, stds = op.args
        ends = [(end - mean) / std for end in bounds for mean, std in _pairs(means, stds)]
        return min(ends), max(ends)
    if name == "invert":
        return 1.0 - high, 1.0 - low
    if name == "augmix":
        mixed = [(weight, *_after_all(chain, bounds)) for weight, chain in op.args[0]]  # weights are not negative
        return sum(low * weight for weight, low, _ in mixed), sum(high * weight for weight, _, high in mixed)
    if name == "solarize":
        return _with((1.0 - high, 1.0 - low), bounds)
    if name == "adjust_hue":
        return _with((0.0, 1.0), bounds)
    if name in ("crop_beyond", "rgb_to_grayscale"):
        return _with((0.0,), bounds)
    if name == "pad":
        return _with(_values(op.args[1]), bounds) if op.args[2] == "constant" else bounds
    if name in ("erase", "erase_pixels"):
        return _with(_values(op.args[4]), bounds)
    if name in _WARPS:
        low, high = _with((0.0, *(op.args[-1] or ())), bounds)
        # With negative weights a fill is worked in by a share that lies beyond [0, 1] as well.
        beyond = 4 * _OVERSHOOT * (high - low) if op.args[-2] == "bicubic" else 0.0
        return low - beyond, high + beyond
    if name in ("float_resize", "resize_to_column") and op.args[1].value in ("bicubic", "lanczos"):
        beyond = _OVERSHOOT * (high - low)
        return low - beyond, high + beyond
    return bounds


def _power_of(magnitude: float, exponent: float, is_signed: bool) -> Range:
    """Bounds of powers of values of at most that magnitude."""
    try:
        largest = max(magnitude**exponent, 1.0)
    except OverflowError:
        largest = math.inf
    return -largest if is_signed else 0.0, largest


def _after_all(ops: Sequence[Op], bounds: Range) -> Range:
    """Bounds of what calls make of values in `bounds`."""
    for op in ops:
        bounds = _after(op, bounds)
    return bounds


def _pairs(first: Sequence[float], second: Sequence[float]) -> list[tuple[float, float]]:
    longer = max(len(first), len(second))
    return [(first[at % len(first)], second[at % len(second)]) for at in range(longer)]


def _values(written: Any) -> Sequence[float]:
    if isinstance(written, TensorArgument):
        return written.tensor.min().item(), written.tensor.max().item()
    return written if isinstance(written, (tuple, list)) else (written,)


def _with(more: Sequence[float], bounds: Range) -> Range:
    return min(*more, *bounds), max(*more, *bounds)
