"""DC prediction: a DC coefficient is stored as the difference to that of the block before, of the same component.

The prediction begins at 0 in each segment. So the coefficients are prefix sums, of each component of each segment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .layout import (
    COMPONENTS,
    IMAGE_COLUMNS,
    SEGMENT_BLOCKS,
    SEGMENT_COLUMNS,
    SEGMENT_FIRST_BLOCK,
    SEGMENT_IMAGE,
    UNITS,
)


@triton.jit
def dc_kernel(segments, images, coefficients, BLOCK: tl.constexpr):
    """Turns the differences of one component of one segment into coefficients, a program each.

    Args:
        segments: int32 [segments, SEGMENT_COLUMNS].
        images: int32 [images, IMAGE_COLUMNS].
        coefficients: int16 [blocks, 64], changed in place. Sums are kept to 16 bits, as libjpeg keeps them.
    """
    segment = segments + tl.program_id(0) * SEGMENT_COLUMNS
    component = tl.program_id(1)
    image = images + tl.load(segment + SEGMENT_IMAGE) * IMAGE_COLUMNS
    components = tl.load(image + COMPONENTS)
    if component < components:
        units = tl.load(image + UNITS)
        luma = units - components + 1
        first_unit = tl.where(component == 0, 0, luma + component - 1)
        of_mcu = tl.where(component == 0, luma, 1)
        # Segments hold whole MCUs.
        blocks = tl.load(segment + SEGMENT_BLOCKS) // units * of_mcu
        first = coefficients + tl.load(segment + SEGMENT_FIRST_BLOCK).to(tl.int64) * 64
        before = tl.zeros((), tl.int32)
        for begin in range(0, blocks, BLOCK):
            number = begin + tl.arange(0, BLOCK)
            block = number // of_mcu * units + first_unit + number % of_mcu
            at = first + block.to(tl.int64) * 64
            difference = tl.load(at, mask=number < blocks, other=0).to(tl.int32)
            tl.store(at, (before + tl.cumsum(difference, axis=0)).to(tl.int16), mask=number < blocks)
            before += tl.sum(difference, axis=0)
