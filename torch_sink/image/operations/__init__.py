"""The operations that are recorded: what a call on a handle becomes, one record each, one file a family."""

from torch_sink.image.core.ops import OPERATIONS, RECORDERS, TAKE_PALETTES, operations
from torch_sink.image.operations import (
    colors,
    erase,
    filters,
    mixes,
    moves,
    resize,
    tensor_methods,
    tones,
    values,
    warps,
)

__all__ = [
    "OPERATIONS",
    "RECORDERS",
    "TAKE_PALETTES",
    "colors",
    "erase",
    "filters",
    "mixes",
    "moves",
    "operations",
    "resize",
    "tensor_methods",
    "tones",
    "values",
    "warps",
]
