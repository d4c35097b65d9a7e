"""Recording on tensors: colour. How a recorder works is said in `record_tensor.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_sink.image.ops import Op
from torch_sink.image.record_arguments import is_number

Recorder = Callable[..., Any]


def colour_recorders(family: str) -> dict[str, Recorder]:
    """Colour operations whose result on uint8 tensors is, value for value, that on a Pillow image."""

    def recorder(name: str, accepts: Callable[..., bool]) -> Recorder:
        def record(handle: Any, *args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            if handle.sink_dtype != torch.uint8 or not accepts(*values):
                return NotImplemented
            return handle.record(Op(f"{family}.{name}", values))

        return record

    return {
        "adjust_brightness": recorder("adjust_brightness", lambda factor: is_number(factor) and factor >= 0),
        "invert": recorder("invert", lambda: True),
        "posterize": recorder("posterize", lambda bits: type(bits) is int and 1 <= bits <= 8),
        "solarize": recorder("solarize", lambda threshold: is_number(threshold) and threshold <= 255),
        "equalize": recorder("equalize", lambda: True),
    }
