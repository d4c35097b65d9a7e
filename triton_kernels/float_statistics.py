"""Statistics of whole float32 images: the mean of the gray values, extremes, and histograms.

Sums are of integers, so that a result does not depend on the order in which programs add to it; but for a mean whose
last bit matters, which `float_sum.py` adds up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .float_math import blend, clamp, gray_of, load_float
from .float_program import AUTOCONTRAST, CONTRAST, LARGEST, LARGEST_NEGATED, NAN_BITS, SUM, SUM_SCALE, TABLES
from .float_sum import write_sum_in_order
from .histogram import count_values, equalize_table


@triton.jit
def ordered(value):
    """float32 -> int32 that compares as the floats do, NaN above all; back it is the same function on the bits."""
    bits = tl.where(value == value, value.to(tl.int32, bitcast=True), NAN_BITS)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered(number):
    """int32 of `ordered` -> float32."""
    return (number ^ ((number >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def as_byte(value):
    """float32 -> int32 in [0, 255], as `to_dtype(torch.uint8, scale=True)`, modulo 256 outside of [0, 1]."""
    return (value * 255.999).to(tl.int32) & 255


@triton.jit
def note_extremes(record, value, inside, CHANNEL: tl.constexpr):
    """Notes the largest and the smallest value of one channel of one tile."""
    lowest = tl.full((1, 1), -(2**31), tl.int32)
    tl.atomic_max(record + LARGEST + CHANNEL, tl.max(tl.where(inside, ordered(value), lowest)))
    tl.atomic_max(record + LARGEST_NEGATED + CHANNEL, tl.max(tl.where(inside, ordered(-value), lowest)))


@triton.jit
def gather_statistic(operation, record, gray_sum, image, step, tiles, red, green, blue, inside, PIXELS: tl.constexpr):
    """Adds one tile to what the operation that follows needs to know of the whole image.

    The tile is written already, to the float32 planes of an image, `step` numbers apart, that has so many tiles.
    """
    code = tl.load(operation)
    if code == CONTRAST:
        if tl.load(operation + 6) == 0:
            gray = gray_of(red, green, blue, tl.load(operation + 4))
            fixed = tl.where(inside & (gray == gray), gray.to(tl.float64) * SUM_SCALE, 0.0).to(tl.int64)
            tl.atomic_add(gray_sum, tl.sum(fixed), sem="relaxed")
            # Integers know no NaN; where the sum in order would be kept, there is 0 otherwise.
            tl.store(record + SUM, NAN_BITS, mask=tl.max((inside & (gray != gray)).to(tl.int32)) > 0)
        else:
            write_sum_in_order(operation, record, image, step, tiles)
    elif code == AUTOCONTRAST:
        note_extremes(record, red, inside, 0)
        note_extremes(record, green, inside, 1)
        note_extremes(record, blue, inside, 2)
    else:
        # A loop, because several counts in a row need more registers than there are.
        for plane in range(3):
            value = tl.where(plane == 0, red, tl.where(plane == 1, green, blue))
            count_values(record + plane * 256, as_byte(value), inside, PIXELS)


@triton.jit
def write_equalize_tables(record):
    """Turns the histograms of a record into tables. Every program of an image writes the same values."""
    bins = tl.arange(0, 256)
    for channel in range(3):
        tl.store(record + TABLES + channel * 256 + bins, equalize_table(record + channel * 256))
    # Written by all threads of this program, and read by all of them.
    tl.debug_barrier()


@triton.jit
def stretch(value, record, IS_V2, CHANNEL: tl.constexpr):
    """`autocontrast` of one channel: v1 multiplies by one over the range of values, v2 divides by the range."""
    high = from_ordered(tl.load(record + LARGEST + CHANNEL))
    low = -from_ordered(tl.load(record + LARGEST_NEGATED + CHANNEL))
    spread = high - low
    factor = tl.div_rn(spread * 0.0 + 1.0, tl.where(spread == 0.0, 1.0, spread))
    # v1 looks whether the factor is finite, so that NaN in one place does not make NaN of the others.
    flat = (spread == 0.0) | ((IS_V2 == 0) & ((factor > 3.4028235e38) | (factor != factor)))
    from_low = value - tl.where(flat, 0.0, low)
    divided = tl.div_rn(from_low, tl.where(flat, 1.0, spread) + tl.zeros_like(from_low))
    return clamp(tl.where(IS_V2 != 0, divided, from_low * tl.where(flat, 1.0, factor)), 0.0, 1.0)


@triton.jit
def mean_gray(operation, record, gray_sum):
    """The mean of the gray values; where it was added up in torch's order, divided as torch does it."""
    pixels = tl.load(operation + 5)
    in_any_order = (tl.load(gray_sum).to(tl.float64) / SUM_SCALE / pixels.to(tl.float64)).to(tl.float32)
    total = tl.load(record + SUM).to(tl.float32, bitcast=True)  # in any order: 0 or NaN
    return tl.where(tl.load(operation + 6) == 0, in_any_order + total, tl.div_rn(total, pixels.to(tl.float32)))


@triton.jit
def apply_statistic(code, operation, record, gray_sum, red, green, blue):
    """An operation that depends on a statistic of the stage's input."""
    if code == CONTRAST:
        mean = mean_gray(operation, record, gray_sum) + tl.zeros_like(red)
        ratio = load_float(operation, 1)
        rest = load_float(operation, 2)
        is_v2 = tl.load(operation + 3) != 0
        red = blend(red, mean, ratio, rest, is_v2)
        green = blend(green, mean, ratio, rest, is_v2)
        blue = blend(blue, mean, ratio, rest, is_v2)
    elif code == AUTOCONTRAST:
        is_v2 = tl.load(operation + 1)
        red = stretch(red, record, is_v2, 0)
        green = stretch(green, record, is_v2, 1)
        blue = stretch(blue, record, is_v2, 2)
    else:
        red = tl.load(record + TABLES + as_byte(red)).to(tl.float32) * (1.0 / 255.0)
        green = tl.load(record + TABLES + 256 + as_byte(green)).to(tl.float32) * (1.0 / 255.0)
        blue = tl.load(record + TABLES + 512 + as_byte(blue)).to(tl.float32) * (1.0 / 255.0)
    return red, green, blue
