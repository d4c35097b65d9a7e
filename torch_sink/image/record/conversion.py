"""Stand-ins that record: from Pillow images to tensors and back.

Each takes the arguments of the stock function it stands in for. On anything that cannot be recorded it calls the
stock function, which makes the handle's pixels itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image

from torch_sink.image.core.exactness import is_scaled_bytes
from torch_sink.image.core.ops import Op
from torch_sink.image.handles.image import LazyImage, lazy_image
from torch_sink.image.handles.tensor import HANDLES, LazyTensor, LazyTVImage
from torch_sink.image.sources.source import FinishedSource

Recorder = Callable[..., Any]


def _conversion(name: str, kind: type, dtype: Callable[[], torch.dtype]) -> Callable[[Recorder], Recorder]:
    def make(stock: Recorder) -> Recorder:
        @functools.wraps(stock)
        def stand_in(pic: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(pic, Image.Image) and not args and not kwargs:
                handle = lazy_image(pic, palettes=True)
                wanted = dtype()
                if handle is not None and wanted in (torch.uint8, torch.float32):
                    width, height = handle.size
                    shape = (3 if handle.mode == "RGB" else 1, height, width)
                    return kind(handle.sink_source, (*handle.sink_ops, Op(name)), shape, wanted)
            return stock(pic, *args, **kwargs)

        return stand_in

    return make


to_tensor = _conversion("to_tensor", LazyTensor, torch.get_default_dtype)
pil_to_tensor = _conversion("pil_to_tensor", LazyTensor, lambda: torch.uint8)


def to_image(stock: Recorder) -> Recorder:
    """Stand-in for `v2.functional.to_image`, which also takes tensors."""
    from_pil = _conversion("to_image", LazyTVImage, lambda: torch.uint8)(stock)

    @functools.wraps(stock)
    def stand_in(inpt: Any) -> Any:
        if isinstance(inpt, HANDLES) and inpt.is_recording:
            return inpt.record_as(LazyTVImage)
        return from_pil(inpt)

    return stand_in


def to_pil_image(stock: Recorder) -> Recorder:
    """Stand-in for `functional.to_pil_image`."""

    @functools.wraps(stock)
    def stand_in(pic: Any, mode: str | None = None) -> Any:
        if isinstance(pic, HANDLES) and pic.is_recording:
            image = _as_image(pic)
            if image is not None and mode in (None, image.mode):
                return image
        return stock(pic, mode)

    return stand_in


def _as_image(handle: Any) -> LazyImage | None:
    """The Pillow image with the values of a recording handle, or None where they are no bytes."""
    channels, height, width = handle.sink_shape
    if isinstance(handle.sink_source, FinishedSource):
        return None
    is_bytes = handle.sink_dtype == torch.uint8
    if not is_bytes and not (handle.sink_dtype == torch.float32 and is_scaled_bytes(handle)):
        return None
    mode = "RGB" if channels == 3 else "L"
    return LazyImage(handle.sink_source, (*handle.sink_ops, Op("to_pil_image")), (width, height), mode)


def through_tensor(recorder: Recorder) -> Callable[[Recorder], Recorder]:
    """For kernels of `transforms.v2` that turn a Pillow image into a tensor, work on that, and turn it back.

    Args:
        recorder: of the kernel on tensors.
    """

    def make(stock: Recorder) -> Recorder:
        @functools.wraps(stock)
        def stand_in(image: Any, *args: Any, **kwargs: Any) -> Any:
            handle = lazy_image(image)
            if handle is not None:
                width, height = handle.size
                shape = (3 if handle.mode == "RGB" else 1, height, width)
                tensor = LazyTensor(handle.sink_source, (*handle.sink_ops, Op("pil_to_tensor")), shape, torch.uint8)
                result = recorder(tensor, *args, **kwargs)
                if result is not NotImplemented:
                    return _as_image(result)
            return stock(image, *args, **kwargs)

        return stand_in

    return make
