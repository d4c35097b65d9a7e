"""The integers of `rows.py` as compile-time constants; what lanes, windows and tiles are.

A lane of a segment decodes the symbols that start within its `lane_bits` bits.

A window is the rectangle of whole MCUs that a box of pixels needs: the box, and the chroma samples next to it that
upsampling reads. Inverse transforms run for its blocks only. What they give lies in planes of one byte a sample: the
luma plane of the window row by row, then those of Cb and Cr, each as large as its blocks.

A program makes a tile, a rectangle: of the inverse transform, blocks of one plane, counted plane by plane and row by
row; of the pixels, those that the box touches of a grid in the window, row by row. Tiles are numbered through all
windows.
"""

from __future__ import annotations

import triton.language as tl

from . import rows

globals().update({name: tl.constexpr(value) for name, value in vars(rows).items() if name.isupper()})
