"""Weights of one axis of torch's antialiased resize of floats: `_compute_indices_min_size_weights_aa`, float32."""

from __future__ import annotations

import triton
import triton.language as tl

from ..arithmetic import fused
from ..program import BICUBIC, FILTER, FIRST_AT, IN_SIZE, OUT_SIZE, TAPS, WEIGHTS_AT


@triton.jit
def tap_weight(tap, center, first, count, inverse, KIND):
    """The weight of one tap before all are divided by their sum; float32 with torch's roundings."""
    distance = (first + tap).to(tl.float32) - center
    x = tl.abs(((distance.to(tl.float64) + 0.5) * inverse.to(tl.float64)).to(tl.float32))
    weight = tl.where(x < 1.0, 1.0 - x, 0.0)
    if KIND == BICUBIC:
        near = fused(fused(x, 1.5, -2.5) * x, x, 1.0)
        far = fused(fused(x - 5.0, x, 8.0), x, -4.0) * -0.5
        weight = tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))
    return tl.where(tap < count, weight, 0.0)


@triton.jit
def write_float_weights(row, tables, BLOCK: tl.constexpr):
    """Writes the first source position of each output position, and the weights [taps, output positions]."""
    in_size = tl.load(row + IN_SIZE)
    out_size = tl.load(row + OUT_SIZE)
    taps = tl.load(row + TAPS)
    kind = tl.load(row + FILTER)
    scale = tl.div_rn(in_size.to(tl.float32), out_size.to(tl.float32))
    stretch = tl.maximum(scale, 1.0)
    support = tl.where(kind == BICUBIC, 2.0, 1.0) * stretch
    inverse = tl.div_rn(stretch * 0.0 + 1.0, stretch)
    for begin in range(0, out_size, BLOCK):
        position = begin + tl.arange(0, BLOCK)
        here = position < out_size
        center = ((position.to(tl.float64) + 0.5) * scale.to(tl.float64)).to(tl.float32)
        first = tl.maximum(((center - support).to(tl.float64) + 0.5).to(tl.int32), 0)
        count = tl.minimum(((center + support).to(tl.float64) + 0.5).to(tl.int32), in_size) - first
        total = tl.zeros_like(center)
        for tap in range(taps):
            total += tap_weight(tap, center, first, count, inverse, kind)
        total = tl.where(total == 0.0, 1.0, total)
        tl.store(tables + tl.load(row + FIRST_AT) + position, first, mask=here)
        for tap in range(taps):
            weight = tl.div_rn(tap_weight(tap, center, first, count, inverse, kind), total)
            at = tables + tl.load(row + WEIGHTS_AT) + tap * out_size + position
            tl.store(at, weight.to(tl.int32, bitcast=True), mask=here)
