"""Recording on float32 tensors: which recorder each functional has. How one works is said in `tensor.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch_sink.image.record import float_color as color
from torch_sink.image.record import float_geometry as geometry
from torch_sink.image.record import tensor_warp as warp

Recorder = Callable[..., Any]


def _of_both(family: str) -> dict[str, Recorder]:
    return {
        **color.recorders(family),
        "crop": functools.partial(geometry.crop, family),
        "pad": functools.partial(geometry.pad, family),
    }


V1_FLOAT_RECORDERS: dict[str, Recorder] = {
    **_of_both("v1"),
    "resize": geometry.resize_v1,
    "affine": warp.affine_v1,
    "rotate": warp.rotate_v1,
    "perspective": warp.perspective_v1,
    "elastic_transform": warp.elastic_v1,
}

V2_FLOAT_RECORDERS: dict[str, Recorder] = {
    **_of_both("v2"),
    "grayscale_to_rgb": color.grayscale_to_rgb,
    "permute_channels": color.permute_channels,
    "center_crop": geometry.center_crop,
    "resize": geometry.resize_v2,
    "resized_crop": geometry.resized_crop,
    "affine": warp.affine_v2,
    "rotate": warp.rotate_v2,
    "perspective": warp.perspective_v2,
    "elastic": warp.elastic_v2,
}
