"""Statistics of whole images: one program per image and channel measures it, and makes the table of an operation.

They are a separate launch between the stage that writes the image and the one that reads the table, so that no program
waits for another one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launching import Launcher
from ..pixels import clamp, cut, fused, gray_value, load_float
from ..program import (
    AUTOCONTRAST,
    BLEND_MEAN,
    CONTRAST,
    CONTRAST_REST,
    FACTOR,
    FORMULA,
    GRAY_CHANNELS,
    HEIGHT,
    JOB_COLUMNS,
    MEASURED_CHANNEL,
    MEASURED_JOB,
    OPERATION_COLUMNS,
    PILLOW,
    STATISTIC,
    STATISTIC_COLUMNS,
    TABLE,
    TARGET,
    TARGET_CHANNEL,
    TENSOR_V1,
    WIDTH,
)


@triton.jit
def gray_of(image, step, at, inside, channels, formula, top):
    """Loads gray values, those of a one-channel image unchanged; 0 outside the image."""
    red = tl.load(image + at, mask=inside, other=0).to(tl.float32)
    green = tl.load(image + step + at, mask=inside, other=0).to(tl.float32)
    blue = tl.load(image + 2 * step + at, mask=inside, other=0).to(tl.float32)
    gray = gray_value(red, green, blue, formula, top, True)
    if formula != PILLOW:
        gray = tl.where(channels == 1, red, gray)
    return tl.where(inside, gray, 0.0)


@triton.jit
def contrast_table(total, pixels, bins, operation, formula):
    """Makes the table of contrast: each value, blended with the mean of the gray values."""
    value = bins.to(tl.float32)
    factor = load_float(operation, FACTOR)
    # Pillow rounds half up: `int(ImageStat.Stat(image).mean[0] + 0.5)`.
    mean = ((2 * total + pixels) // (2 * pixels)).to(tl.float32) + value * 0.0
    made = mean + factor * (value - mean)
    if formula != PILLOW:
        mean = tl.div_rn(total.to(tl.float32) + value * 0.0, pixels.to(tl.float32) + value * 0.0)
        rest = load_float(operation, CONTRAST_REST)
        made = value * factor
        made = made + mean * rest if formula == TENSOR_V1 else fused(mean, rest, made)
    return cut(made, 255.0)


@triton.jit
def autocontrast_table(counts, bins, formula):
    """Makes the table of autocontrast, which stretches values to [0, 255], in float64 as Pillow or float32 as torch."""
    low = tl.min(tl.where(counts > 0, bins, 255), axis=0)
    high = tl.max(tl.where(counts > 0, bins, 0), axis=0)
    spread = tl.maximum(high - low, 1)
    if formula == PILLOW:
        scale = tl.full((1,), 255.0, tl.float64) / spread.to(tl.float64)
        stretched = (bins.to(tl.float64) * scale - low.to(tl.float64) * scale).to(tl.int32)
        made = clamp(stretched, 0, 255).to(tl.float32)
    else:
        above = (bins - low).to(tl.float32)
        wide = tl.zeros_like(above) + spread.to(tl.float32)
        if formula == TENSOR_V1:
            # torch divides a number by a tensor as the number times the reciprocal.
            made = cut(above * (tl.div_rn(tl.zeros_like(wide) + 1.0, wide) * 255.0), 255.0)
        else:
            made = cut(tl.div_rn(above, wide * (1.0 / 255.0)), 255.0)
    return tl.where(high <= low, bins.to(tl.float32), made)


@triton.jit
def equalize_table(counts, bins):
    """Makes the table of equalize from the cumulative histogram."""
    last = tl.max(tl.where(counts > 0, bins, 0), axis=0)
    step = (tl.sum(counts, axis=0) - tl.sum(tl.where(bins == last, counts, 0), axis=0)) // 255
    before = tl.cumsum(counts, axis=0) - counts
    table = (tl.maximum(step, 1) // 2 + before) // tl.maximum(step, 1)
    return tl.where(step == 0, bins, tl.minimum(table, 255)).to(tl.float32)


@triton.jit
def statistics_kernel(workspace, jobs, operations, tables, statistics, BLOCK: tl.constexpr):
    """Makes the table of one operation for one channel, or the mean that it blends with.

    Args:
        workspace: uint8 [bytes], with the images to measure.
        jobs: int64 [jobs, JOB_COLUMNS].
        operations: int32 [rows, OPERATION_COLUMNS].
        tables: int32 [entries], written.
        statistics: int32 [programs, STATISTIC_COLUMNS].
    """
    row = statistics + tl.program_id(0) * STATISTIC_COLUMNS
    job = jobs + tl.load(row + MEASURED_JOB).to(tl.int64) * JOB_COLUMNS
    operation = operations + tl.load(row + STATISTIC) * OPERATION_COLUMNS
    channel = tl.load(row + MEASURED_CHANNEL)
    origin = tl.load(job + TARGET)
    step = tl.load(job + TARGET_CHANNEL)
    pixels = (tl.load(job + HEIGHT) * tl.load(job + WIDTH)).to(tl.int32)
    code = tl.load(operation)
    formula = tl.load(operation + FORMULA)
    channels = tl.load(operation + GRAY_CHANNELS)
    table = tables + tl.load(operation + TABLE + channel)
    bins = tl.arange(0, 256)
    if code == BLEND_MEAN:
        sums = tl.zeros((BLOCK,), tl.float64)
        for begin in range(0, pixels, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            floats = workspace.to(tl.pointer_type(tl.float32)) + origin
            sums += gray_of(floats, step, at, at < pixels, channels, formula, 1.0).to(tl.float64)
        mean = (tl.sum(sums, axis=0) / pixels.to(tl.float64)).to(tl.float32)
        tl.store(table, mean.to(tl.int32, bitcast=True))
    else:
        if code == CONTRAST:
            total = tl.zeros((), tl.int64)
            for begin in range(0, pixels, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                gray = gray_of(workspace + origin, step, at, at < pixels, channels, formula, 255.0)
                total += tl.sum(gray.to(tl.int32), axis=0).to(tl.int64)
            made = contrast_table(total, pixels, bins, operation, formula)
        else:
            plane = workspace + origin + channel * step
            counts = tl.zeros((256,), tl.int32)
            for begin in range(0, pixels, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                counts += tl.histogram(tl.load(plane + at, mask=at < pixels, other=0).to(tl.int32), 256)
            # Positions outside the image were counted as 0.
            counts -= tl.where(bins == 0, (pixels + BLOCK - 1) // BLOCK * BLOCK - pixels, 0)
            made = autocontrast_table(counts, bins, formula) if code == AUTOCONTRAST else equalize_table(counts, bins)
        tl.store(table + bins, made.to(tl.int32, bitcast=True))


# With 2048 pixels at a time, some releases of Triton spill registers for some GPUs.
STATISTICS_BLOCK = 1024
STATISTICS_WARPS = 8
run_statistics = Launcher(statistics_kernel, STATISTICS_WARPS)
