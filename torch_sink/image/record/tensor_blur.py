"""Recording on tensors: Gaussian blur. How a recorder works is said in `tensor.py`."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_sink.image.core.arguments import is_number
from torch_sink.image.core.ops import Op


def gaussian_blur(family: str, handle: Any, kernel_size: Any, sigma: Any = None) -> Any:
    """Not recorded: a kernel that reaches further than the image is large, which stock code refuses."""
    _, height, width = handle.sink_shape
    if family == "v2" and isinstance(kernel_size, int):
        kernel_size = (kernel_size, kernel_size)
    if handle.sink_dtype not in (torch.uint8, torch.float32):
        return NotImplemented
    if not _is_pair(kernel_size, lambda size: type(size) is int and size % 2 == 1):
        return NotImplemented
    if sigma is None and family == "v2":
        sigma = [size * 0.15 + 0.35 for size in kernel_size]
    if is_number(sigma):
        sigma = (float(sigma), float(sigma))
    elif isinstance(sigma, (list, tuple)) and len(sigma) == 1:
        sigma = (sigma[0], sigma[0])
    if not _is_pair(sigma, lambda value: is_number(value) and 0 < value < math.inf):
        return NotImplemented
    if kernel_size[0] // 2 >= width or kernel_size[1] // 2 >= height:
        return NotImplemented
    return handle.record(Op(f"{family}.gaussian_blur", (tuple(kernel_size), tuple(sigma))))


def _is_pair(values: Any, accepts: Any) -> bool:
    return isinstance(values, (list, tuple)) and len(values) == 2 and all(map(accepts, values))
