"""Whether the kernels of this process run in Triton's interpreter, which a variable says when they are loaded."""

from __future__ import annotations

import triton
from triton.runtime.jit import JITFunction


@triton.jit
def _nothing():
    pass


def is_interpreted() -> bool:
    """Whether kernels are interpreted, which pays for operations rather than for pixels, and so likes large tiles."""
    return not isinstance(_nothing, JITFunction)
