"""Arithmetic that PTX defines otherwise than NumPy. Arrays broadcast: a value that is equal in all lanes is [warps, 1].

What PTX leaves undefined stays so: the bits of a NaN that an operation makes, a quotient by 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray
LANES = 32
_LANE = np.arange(LANES)


def fused_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32 with one rounding.

    The product is exact in float64. The sum is rounded to odd there, so that rounding it once more gives what rounding
    the exact sum would give.
    """
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    of_addend = total - product
    error = (product - (total - of_addend)) + (addend - of_addend)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    outwards = (error > 0) == (total > 0)
    return np.where(inexact, bits + np.where(outwards, 1, -1), bits).view(np.float64).astype(np.float32)


def larger(a: Array, b: Array) -> Array:
    """Of floats: what is a number where the other is none, and 0.0 rather than -0.0."""
    return np.where(a == b, _bitwise(np.bitwise_and, a, b), np.fmax(a, b))


def smaller(a: Array, b: Array) -> Array:
    """Of floats: what is a number where the other is none, and -0.0 rather than 0.0."""
    return np.where(a == b, _bitwise(np.bitwise_or, a, b), np.fmin(a, b))


def _bitwise(function: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    bits = f"u{a.itemsize}"
    return function(a.view(bits), b.view(bits)).view(a.dtype)


def flushed(value: Array) -> Array:
    """Float32 without subnormal numbers (.ftz)."""
    return np.where(np.abs(value) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), value), value)


def to_integer(value: Array, dtype: np.dtype) -> Array:
    """Whole floats -> integers: the nearest there is where it does not fit; NaN as the table of `cvt` says."""
    limits = np.iinfo(dtype)
    of_nan = 0 if value.itemsize < 8 and limits.bits < 64 else 1 << (limits.bits - 1)
    above = value >= 2.0 ** (limits.bits - (dtype.kind == "i"))
    below, is_nan = value < limits.min, np.isnan(value)
    fits = np.where(above | below | is_nan, 0, value).astype(dtype)
    fits = np.where(above, dtype.type(limits.max), np.where(below, dtype.type(limits.min), fits))
    return np.where(is_nan, np.array(of_nan, f"u{dtype.itemsize}").view(dtype), fits)


def to_bfloat16(value: Array) -> Array:
    """Float32 -> the upper half of its bits, rounded to even."""
    bits = value.view(np.uint32)
    return np.where(np.isnan(value), 0x7FFF, (bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)


def quotient(a: Array, b: Array) -> Array:
    """Of integers, cut off."""
    by_zero = b == 0
    divisor = np.where(by_zero, b.dtype.type(1), b)
    cut = (a - np.fmod(a, divisor)) // divisor
    return np.where(by_zero, ~np.zeros_like(cut), cut)


def shifted_left(value: Array, by: Array) -> Array:
    """Of `bits` places or more nothing is left."""
    bits = 8 * value.itemsize
    return np.where(by < bits, value << (by & (bits - 1)).astype(value.dtype), value.dtype.type(0))


def shifted_right(value: Array, by: Array) -> Array:
    """Of `bits` places or more the sign is left."""
    bits = 8 * value.itemsize
    if value.dtype.kind == "i":
        return value >> np.minimum(by, bits - 1).astype(value.dtype)
    return np.where(by < bits, value >> (by & (bits - 1)).astype(value.dtype), value.dtype.type(0))


def extracted_bits(value: Array, begin: Array, length: Array) -> Array:
    """`length` bits of an integer from `begin` on, signed ones of 32 bits; the highest of them is then the sign."""
    wide = value.astype(f"{value.dtype.kind}8")
    beyond = (64 - np.clip(length & 255, 1, 64)).astype(wide.dtype)
    found = wide >> np.minimum(begin & 255, 63).astype(wide.dtype) << beyond >> beyond
    is_nothing = (length & 255 == 0) | (begin & 255 > 63) & (value.dtype.kind == "u")
    return np.where(is_nothing, 0, found).astype(value.dtype)


def permuted_bytes(a: Array, b: Array, selector: Array) -> Array:
    """Each nibble of the selector chooses one of the eight bytes, or with its highest bit eight times its sign."""
    pool = b.astype(np.uint64) << np.uint64(32) | a
    result = np.zeros(np.broadcast_shapes(pool.shape, selector.shape), np.uint32)
    for byte in range(4):
        nibble = selector >> np.uint32(4 * byte) & 15
        chosen = (pool >> (nibble & 7).astype(np.uint64) * 8 & 255).astype(np.uint32)
        chosen = np.where(nibble & 8 != 0, np.where(chosen & 128 != 0, 255, 0), chosen)
        result |= chosen.astype(np.uint32) << np.uint32(8 * byte)
    return result


def in_halves(function: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    """A function of 16-bit integers on both halves of 32 bits."""
    low = function(a, b) & 0xFFFF
    high = function(a >> 16, b >> 16) & 0xFFFF
    return (low | high << 16).astype(np.uint32)


def shuffled(mode: str, value: Array, lane: Array, limits: Array) -> tuple[Array, Array]:
    """Each lane takes the value of another: (values, whether that lane was in range).

    Args:
        mode: "up", "down", "bfly" or "idx".
        value: [warps, 32 or 1].
        lane: which, or how far away.
        limits: in bits 0 ... 4 the last lane that counts, in bits 8 ... 12 those that part a warp.
    """
    value = np.broadcast_to(value, (len(value), LANES))
    lane, last, parts = lane.astype(np.int64) & 31, limits.astype(np.int64) & 31, limits.astype(np.int64) >> 8 & 31
    first, end = _LANE & parts, (_LANE & parts) | (last & ~parts)
    source = {"up": _LANE - lane, "down": _LANE + lane, "bfly": _LANE ^ lane, "idx": first | (lane & ~parts)}[mode]
    in_range = source >= end if mode == "up" else source <= end
    source = np.broadcast_to(np.where(in_range, source, _LANE), value.shape)
    return np.take_along_axis(value, source, axis=1), np.broadcast_to(in_range, value.shape)
