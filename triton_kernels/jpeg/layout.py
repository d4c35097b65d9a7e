"""The integers of `rows.py` as compile-time constants, under the same names, for kernels to import."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from . import rows

globals().update({name: tl.constexpr(value) for name, value in vars(rows).items() if name.isupper()})


def lane_count(segment_bytes: Any, lane_bits: int) -> Any:
    """Lanes of a segment, at least one, from its bytes before unstuffing; for numbers, arrays or tensors.

    A lane decodes the symbols that start within `lane_bits` bits.
    """
    return 8 * segment_bytes // lane_bits + 1
