"""The statistic of whole float32 images: the mean of their gray values.

The sum is one of integers, so the result does not depend on the order in which programs add to it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .float_math import blend, gray_of, load_float
from .float_program import SUM_SCALE


@triton.jit
def add_gray_values(operation, gray_sum, red, green, blue, inside):
    """Adds the gray values of one tile to what the contrast that follows needs to know of the whole image."""
    gray = gray_of(red, green, blue, tl.load(operation + 4))
    fixed = tl.where(inside, gray.to(tl.float64) * SUM_SCALE, 0.0).to(tl.int64)
    tl.atomic_add(gray_sum, tl.sum(fixed), sem="relaxed")


@triton.jit
def apply_contrast(operation, gray_sum, red, green, blue):
    """Blends each pixel with the mean of the gray values of the stage's input."""
    pixels = tl.load(operation + 5)
    mean = (tl.load(gray_sum).to(tl.float64) / SUM_SCALE / pixels.to(tl.float64)).to(tl.float32) + tl.zeros_like(red)
    ratio = load_float(operation, 1)
    rest = load_float(operation, 2)
    is_v2 = tl.load(operation + 3) != 0
    red = blend(red, mean, ratio, rest, is_v2)
    green = blend(green, mean, ratio, rest, is_v2)
    blue = blend(blue, mean, ratio, rest, is_v2)
    return red, green, blue
