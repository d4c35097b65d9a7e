"""The operations that are recorded, one record each, one file a family.

A record says what a call on an image becomes, its stock code, the kernel work that it is, and what is promised;
CONTRIBUTING.md adds one step by step.
"""

from torch_sink.image.core.ops import OPERATIONS, RECORDERS, TAKE_PALETTES, operations
from torch_sink.image.operations import (  # noqa: F401  they fill the registries
    colors,
    filters,
    mixes,
    moves,
    pointwise,
    resize,
    tones,
    transform,
    values,
    warps,
)

__all__ = ["OPERATIONS", "RECORDERS", "TAKE_PALETTES", "operations"]
