"""Histograms of whole images, and the tables of 256 values that are made of them.

A record is int32 [7, 256]: the histograms of red, green, blue and luminance, then a table for each channel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pixel_math import blend
from .program import AUTOCONTRAST, CONTRAST, FACTOR, FORMULA, LUMINANCE, PILLOW, TABLES, TENSOR_V1
from .tensor_math import as_byte


@triton.jit
def count_values(histogram_pointer, value, inside, PIXELS: tl.constexpr):
    """Adds the values of one tile to a histogram of 256 bins; pixels that are not `inside` are not counted."""
    flat = tl.reshape(tl.where(inside, value, 256), (PIXELS,))
    counts = tl.histogram(flat, 512)
    bins = tl.arange(0, 512)
    tl.atomic_add(histogram_pointer + bins, counts, mask=(bins < 256) & (counts > 0), sem="relaxed")


@triton.jit
def mean_value(histogram_pointer):
    """Mean, rounded half up: `int(ImageStat.Stat(image).mean[0] + 0.5)`."""
    bins = tl.arange(0, 256)
    counts = tl.load(histogram_pointer + bins).to(tl.int64)
    number = tl.sum(counts, axis=0)
    return ((2 * tl.sum(counts * bins, axis=0) + number) // (2 * number)).to(tl.int32)


@triton.jit
def autocontrast_table(histogram_pointer):
    """int32 [256]: stretches the range of values that occur to [0, 255]; float64, truncated."""
    bins = tl.arange(0, 256)
    counts = tl.load(histogram_pointer + bins)
    low = tl.min(tl.where(counts > 0, bins, 255), axis=0)
    high = tl.max(tl.where(counts > 0, bins, 0), axis=0)
    one = tl.full((1,), 1.0, tl.float64)
    scale = (one * 255.0) / tl.maximum(high - low, 1).to(tl.float64)
    offset = -(low.to(tl.float64) * scale)
    stretched = (bins.to(tl.float64) * scale + offset).to(tl.int32)
    return tl.where(high <= low, bins, tl.minimum(tl.maximum(stretched, 0), 255))


@triton.jit
def tensor_autocontrast_table(histogram_pointer, formula):
    """As `autocontrast_table`, in the float32 arithmetic of the kernels for tensors."""
    bins = tl.arange(0, 256)
    counts = tl.load(histogram_pointer + bins)
    low = tl.min(tl.where(counts > 0, bins, 255), axis=0)
    high = tl.max(tl.where(counts > 0, bins, 0), axis=0)
    above = (bins - low).to(tl.float32)
    spread = tl.zeros_like(above) + tl.maximum(high - low, 1).to(tl.float32)
    if formula == TENSOR_V1:
        # torch divides a number by a tensor as the reciprocal times the number.
        stretched = above * (tl.div_rn(tl.zeros_like(spread) + 1.0, spread) * 255.0)
    else:
        stretched = tl.div_rn(above, spread * (1.0 / 255.0))
    return tl.where(high == low, bins, as_byte(stretched))


@triton.jit
def equalize_table(histogram_pointer):
    """int32 [256]: the cumulative histogram, in steps of the mean count."""
    bins = tl.arange(0, 256)
    counts = tl.load(histogram_pointer + bins)
    last = tl.max(tl.where(counts > 0, bins, 0), axis=0)
    step = (tl.sum(counts, axis=0) - tl.sum(tl.where(bins == last, counts, 0), axis=0)) // 255
    before = tl.cumsum(counts, axis=0) - counts
    table = (tl.maximum(step, 1) // 2 + before) // tl.maximum(step, 1)
    return tl.where(step == 0, bins, tl.minimum(table, 255))


@triton.jit
def contrast_table(histogram_pointer, factor):
    """int32 [256]: each value blended with the mean of the histogram."""
    bins = tl.arange(0, 256)
    return blend(mean_value(histogram_pointer) + tl.zeros_like(bins), bins, factor)


@triton.jit
def tensor_contrast_table(histogram_pointer, factor, rest, formula):
    """As `contrast_table`, with the float32 mean of the kernels for tensors; v2 rounds the blend once."""
    bins = tl.arange(0, 256)
    counts = tl.load(histogram_pointer + bins).to(tl.int64)
    total = tl.zeros_like(bins).to(tl.float32) + tl.sum(counts * bins, axis=0).to(tl.float32)
    mean = tl.div_rn(total, tl.zeros_like(total) + tl.sum(counts, axis=0).to(tl.float32))
    mixed = bins.to(tl.float32) * factor
    if formula == TENSOR_V1:
        mixed = mixed + mean * rest
    else:
        mixed = (mixed.to(tl.float64) + mean.to(tl.float64) * rest.to(tl.float64)).to(tl.float32)
    return as_byte(mixed)


@triton.jit
def write_tables(operation, record, written):
    """Turns the histograms of a record into the tables of one operation, one for each channel, in the record `written`.

    Every program of an image writes the same values, so it does not matter whose are read.
    """
    bins = tl.arange(0, 256)
    code = tl.load(operation)
    formula = tl.load(operation + FORMULA)
    factor = tl.load(operation + FACTOR).to(tl.float32, bitcast=True)
    for channel in range(3):
        counts = record + channel * 256
        if code == CONTRAST:
            if formula == PILLOW:
                table = contrast_table(record + LUMINANCE, factor)
            else:
                # The gray value of a one-channel tensor is its value.
                gray = tl.where(tl.load(operation + 2) == 1, 0, LUMINANCE)
                rest = tl.load(operation + 1).to(tl.float32, bitcast=True)
                table = tensor_contrast_table(record + gray, factor, rest, formula)
        elif code == AUTOCONTRAST:
            table = autocontrast_table(counts) if formula == PILLOW else tensor_autocontrast_table(counts, formula)
        else:
            table = equalize_table(counts)
        tl.store(written + TABLES + channel * 256 + bins, table)
    # Written by all threads of this program, and read by all of them.
    tl.debug_barrier()
