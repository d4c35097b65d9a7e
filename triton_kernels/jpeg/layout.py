"""The integers of `jpeg_rows.py` as compile-time constants, under the same names, for kernels to import."""

from __future__ import annotations

import triton.language as tl

from .. import jpeg_rows

globals().update({name: tl.constexpr(value) for name, value in vars(jpeg_rows).items() if name.isupper()})
