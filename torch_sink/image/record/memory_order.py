"""How the pixels of a tensor that stock code would have made lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from torch_sink.image.fallback import executing
from torch_sink.image.ops import Op, replay

# What makes a new tensor, row by row, of one that lies in any other order.
_RENEWING = frozenset(
    ("to_pil_image", "contiguous", *(
        f"{family}.{name}"
        for family in ("v1", "v2")
        for name in ("resize", "float_resize", "resize_to_column", "affine", "rotate", "rotate_expanded", "perspective",
                     "elastic", "elastic_transform")
    ))
)  # fmt: skip


def lies_row_by_row(ops: Sequence[Op], channels: int) -> bool:
    """True where the gray values of the result of some calls surely lie in order; of several channels they are new."""
    if channels == 1 and ops[-1].name in ("v1.crop", "v2.crop"):
        return False  # a view
    for op in reversed(ops):
        if op.name in _RENEWING:
            return True
        if op.name == "v2.quarter_turns" and op.args[0] % 2:
            return False
    return True


def is_channels_last(handle: Any) -> bool:
    """True where the channels of a pixel lie side by side, and pixels row by row: its calls run on a blank image."""
    with executing():
        tensor = replay(Image.new(handle.sink_source.mode, handle.sink_source.size), handle.sink_ops)
    batch = tensor.as_subclass(torch.Tensor).reshape(1, *handle.sink_shape)
    # Of one pixel it cannot be told.
    return batch.is_contiguous(memory_format=torch.channels_last) and batch.numel() != batch.stride(0)
