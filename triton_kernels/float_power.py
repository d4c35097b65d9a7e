"""Powers of float32 values, for gamma: computed in float64 and rounded once.

x = 2^e * m with m in [sqrt(1/2), sqrt(2)); log m = 2 * artanh((m - 1) / (m + 1)); x^y = 2^(y * log2 x). Both series are
those of the textbooks, long enough that what they leave out is less than the rounding of float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_HALF_BITS = tl.constexpr(0x3FE6A09E667F3BCD)
_TWO_OVER_LN_2 = tl.constexpr(2.885390081777927)
_LN_2 = tl.constexpr(0.6931471805599453)
# Beyond these float32 has only 0 and infinity.
_SMALLEST_EXPONENT = tl.constexpr(-200.0)
_LARGEST_EXPONENT = tl.constexpr(200.0)


@triton.jit
def log2_float64(value):
    """log2 of normal float64 numbers above 0."""
    bits = value.to(tl.int64, bitcast=True)
    whole = (bits - _SQRT_HALF_BITS) >> 52
    mantissa = (bits - (whole << 52)).to(tl.float64, bitcast=True)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = tl.full((1, 1), 1.0 / 21.0, tl.float64)
    for term in tl.static_range(10):
        series = series * square + 1.0 / (19 - 2 * term)
    return whole.to(tl.float64) + ratio * series * _TWO_OVER_LN_2


@triton.jit
def exp2_float64(value):
    """2 to the power of float64 numbers in [-200, 200]."""
    whole = tl.floor(value + 0.5)
    rest = (value - whole) * _LN_2
    series = tl.full((1, 1), 1.0, tl.float64)
    for term in tl.static_range(14):
        series = series * rest * (1.0 / (14 - term)) + 1.0
    return series * ((whole.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def power(value, exponent):
    """value ** exponent, float32; the exponent is not negative. Of what is negative only whole powers are numbers."""
    magnitude = tl.abs(value)
    is_zero = magnitude == 0.0
    is_nan = value != value
    log2 = log2_float64(tl.where(is_zero | is_nan, 1.0, magnitude).to(tl.float64)) * exponent.to(tl.float64)
    bounded = tl.minimum(tl.maximum(log2, _SMALLEST_EXPONENT), _LARGEST_EXPONENT)
    result = tl.where(is_zero, 0.0, exp2_float64(bounded).to(tl.float32))
    half = exponent * 0.5
    of_negative = tl.where(half == tl.floor(half), result, -result)
    of_negative = tl.where(exponent == tl.floor(exponent), of_negative, float("nan"))
    result = tl.where(is_nan, value, tl.where(value < 0.0, of_negative, result))
    # For these torch multiplies.
    result = tl.where(exponent == 0.0, 1.0, tl.where(exponent == 1.0, value, result))
    return tl.where(exponent == 2.0, value * value, tl.where(exponent == 3.0, value * value * value, result))
