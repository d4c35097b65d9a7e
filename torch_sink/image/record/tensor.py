"""Stand-ins that record: functionals on tensors; `family` is "v1" or "v2", whose kernels differ.

Each recorder takes the arguments of the stock function it stands in for, and returns the new handle, or
`NotImplemented` on anything that cannot be recorded: the stock function is then called with an ordinary tensor, and
raises its own errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_sink.image.core.arguments import with_numbers
from torch_sink.image.core.fallback import executing, report_fallback
from torch_sink.image.handles.tensor import HANDLES, LazyTVImage
from torch_sink.image.record import tensor_blur as blur
from torch_sink.image.record import tensor_color as color
from torch_sink.image.record import tensor_geometry as geometry
from torch_sink.image.record import tensor_values as values
from torch_sink.image.record import tensor_warp as warp
from torch_sink.image.record.floats import V1_FLOAT_RECORDERS, V2_FLOAT_RECORDERS

Recorder = Callable[..., Any]


def _as_pure(recorder: Recorder) -> Recorder:
    """For kernels that compute: what the kernels of v1 compute from a `tv_tensors.Image` is a pure tensor."""

    def record(handle: Any, *args: Any, **kwargs: Any) -> Any:
        result = recorder(handle, *args, **kwargs)
        computed = type(result) is LazyTVImage and result is not handle
        return result.as_subclass(torch.Tensor) if computed else result

    return record


def _on_bytes(recorder: Recorder) -> Recorder:
    """For recorders that do not look at the type: records on uint8 tensors alone."""

    def record(handle: Any, *args: Any, **kwargs: Any) -> Any:
        return recorder(handle, *args, **kwargs) if handle.sink_dtype == torch.uint8 else NotImplemented

    return record


_V1_COMPUTING: dict[str, Recorder] = {
    "normalize": functools.partial(values.normalize, "v1"),
    "convert_image_dtype": values.convert_dtype,
    "hflip": functools.partial(geometry.flip, "v1.hflip"),
    "vflip": functools.partial(geometry.flip, "v1.vflip"),
    "crop": functools.partial(geometry.crop, "v1"),
    "pad": functools.partial(geometry.pad, "v1"),
    "resize": geometry.resize_v1,
    **color.color_recorders("v1"),
    "gaussian_blur": functools.partial(blur.gaussian_blur, "v1"),
    "affine": _on_bytes(warp.affine_v1),
    "rotate": _on_bytes(warp.rotate_v1),
    "perspective": _on_bytes(warp.perspective_v1),
    "elastic_transform": _on_bytes(warp.elastic_v1),
    "adjust_gamma": functools.partial(color.gamma, "v1"),
    "rgb_to_grayscale": functools.partial(color.grayscale, "v1"),
}


def _by_dtype(recorders: dict[str, Recorder], on_floats: dict[str, Recorder]) -> dict[str, Recorder]:
    """Calls on float32 handles go to `on_floats` where it has a recorder for them, all others to `recorders`."""

    def either(name: str) -> Recorder:
        on_others, on_float32 = recorders.get(name), on_floats.get(name)
        if on_float32 is None:
            return recorders[name]

        def record(handle: Any, *args: Any, **kwargs: Any) -> Any:
            if handle.sink_dtype == torch.float32:
                return on_float32(handle, *args, **kwargs)
            return NotImplemented if on_others is None else on_others(handle, *args, **kwargs)

        return record

    return {name: either(name) for name in {**recorders, **on_floats}}


_BY_FACTOR = ("adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_sharpness")


def _with_numbers_as_factors(recorders: dict[str, Recorder]) -> dict[str, Recorder]:
    return {name: with_numbers(each) if name in _BY_FACTOR else each for name, each in recorders.items()}


_V1_BY_DTYPE = _by_dtype(_V1_COMPUTING, V1_FLOAT_RECORDERS)
V1_TENSOR_RECORDERS: dict[str, Recorder] = {
    **{name: _as_pure(recorder) for name, recorder in _with_numbers_as_factors(_V1_BY_DTYPE).items()},
    "erase": functools.partial(geometry.erase, "v1"),
}

_V2_RECORDERS: dict[str, Recorder] = {
    "normalize": functools.partial(values.normalize, "v2"),
    "to_dtype": values.to_dtype_v2,
    "horizontal_flip": functools.partial(geometry.flip, "v2.horizontal_flip"),
    "vertical_flip": functools.partial(geometry.flip, "v2.vertical_flip"),
    "crop": functools.partial(geometry.crop, "v2"),
    "center_crop": geometry.center_crop,
    "pad": functools.partial(geometry.pad, "v2"),
    "erase": functools.partial(geometry.erase, "v2"),
    **color.color_recorders("v2"),
    "gaussian_blur": functools.partial(blur.gaussian_blur, "v2"),
    "affine": _on_bytes(warp.affine_v2),
    "rotate": _on_bytes(warp.rotate_v2),
    "perspective": _on_bytes(warp.perspective_v2),
    "elastic": _on_bytes(warp.elastic_v2),
    "adjust_gamma": functools.partial(color.gamma, "v2"),
    "rgb_to_grayscale": functools.partial(color.grayscale, "v2"),
    "grayscale_to_rgb": color.grayscale_to_rgb,
    "permute_channels": color.permute_channels,
    "five_crop": geometry.five_crop,
    "ten_crop": geometry.ten_crop,
    "resize": geometry.resize_v2,
    "resized_crop": geometry.resized_crop,
    "get_dimensions": lambda handle: list(handle.sink_shape),
    "get_num_channels": lambda handle: handle.sink_shape[0],
    "get_size": lambda handle: list(handle.sink_shape[1:]),
}

V2_TENSOR_RECORDERS = _with_numbers_as_factors(_by_dtype(_V2_RECORDERS, V2_FLOAT_RECORDERS))


def on_tensor(name: str, recorder: Recorder | None) -> Callable[[Recorder], Recorder]:
    """A stand-in for a tensor functional or kernel: records on handles, and never hands one to stock code."""

    def make(stock: Recorder) -> Recorder:
        @functools.wraps(stock)
        def stand_in(image: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(image, HANDLES):
                return stock(image, *args, **kwargs)
            is_recording = image.is_recording
            if is_recording and recorder is not None:
                result = recorder(image, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            with executing():
                tensor = image.materialize()
            result = stock(tensor, *args, **kwargs)  # wrong arguments raise here, and are no fallback
            if is_recording:
                arguments = " with these arguments" if recorder is not None else ""
                report_fallback(name, f"no kernel for {image.sink_dtype} tensors{arguments}")
            return result

        return stand_in

    return make
