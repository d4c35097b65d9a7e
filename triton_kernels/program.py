"""The integers of `rows.py` as compile-time constants, under the same names, for kernels to import."""

from __future__ import annotations

import triton.language as tl

from . import rows

globals().update({name: tl.constexpr(value) for name, value in vars(rows).items() if name.isupper()})
