"""torch's resizes of tensors whose results depend on more than sizes.

Antialiased to one column, the result depends on how pixels lie in memory.
Its loop over the pixels of a row (`aten/src/ATen/native/cpu/UpSampleKernel.cpp`) meets those of a column instead, and
gives all of them the value of the first one. Where the channels of a pixel lie side by side, it loops over these, and
every row gets its own value.

Bilinear without antialiasing, in floats, positions are rounded once or twice. Up to 128 rows and columns together
(`_use_vectorized_kernel_cond_2d` in the same file) it is once; beyond, that depends on torch's release, on its threads
and on the channels, so stock code makes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torchvision.transforms import InterpolationMode

from torch_sink.image.ops import Op
from torch_sink.image.record.memory_order import is_channels_last

_SMOOTH = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC, InterpolationMode.LANCZOS)
# From so many values on, torch's threads make a part of the column each, and repeat the first value of it.
_GRAIN = 32768
_LONGEST_VECTORISED = 128


def resize_op(name: str, handle: Any, size: tuple[int, int], mode: InterpolationMode, antialias: bool) -> Op | None:
    """A resize as it is recorded; None for one that is left to stock code.

    Args:
        name: of the recorded call, "v1.resize" or "v2.float_resize" for instance.
        handle: what is resized, to another size.
        size: (height, width) afterwards, pixels.
        mode: an interpolation that the kernels know.
        antialias: as the caller of stock code says.
    """
    family, (height, width) = name[:2], size
    channels, old_height, _ = handle.sink_shape
    in_integers = family == "v2" and handle.sink_dtype == torch.uint8
    if not antialias and not in_integers and mode == InterpolationMode.BILINEAR:
        return Op(name, (size, mode, antialias)) if height + width <= _LONGEST_VECTORISED else None
    if antialias and mode in _SMOOTH and width == 1:
        rows_of_pixels = family == "v2" and channels == 3 and is_channels_last(handle)
        if in_integers and channels == 3 and height == 1 and not rows_of_pixels:
            return None  # torch refuses it
        if not in_integers and height != old_height and not rows_of_pixels:
            return Op(f"{family}.resize_to_column", (height, mode)) if channels * height < _GRAIN else None
    return Op(name, (size, mode, antialias))
