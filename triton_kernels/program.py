"""The integers of `rows.py` as compile-time constants, under the same names, for kernels to import."""

from __future__ import annotations

import triton.language as tl

from . import rows

_INTEGERS = {**vars(rows), **rows.Kind.__members__, **rows.Formula.__members__}
globals().update({name: tl.constexpr(int(value)) for name, value in _INTEGERS.items() if name.isupper()})
