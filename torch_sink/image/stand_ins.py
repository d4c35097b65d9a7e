"""What stands in for functions of torchvision while the backend is on: recorders of operations, and stock code.

A recorder takes a handle and the arguments of the stock function, and returns the new handle, or `NotImplemented` if
unsupported: stock code then finds an ordinary image or tensor, and raises its own errors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

from torch_sink.image.core.fallback import executing, report_fallback
from torch_sink.image.core.ops import Op, Recorder
from torch_sink.image.execute.batch import LazyBatch
from torch_sink.image.execute.collate import collate_handles
from torch_sink.image.handles.image import lazy_image
from torch_sink.image.handles.tensor import HANDLES, LazyTensor, LazyTVImage, run_on_real
from torch_sink.image.operations import RECORDERS, TAKE_PALETTES
from torch_sink.image.stack import EACH_ALONE, LazyStack

Stock = Callable[..., Any]
Make = Callable[[Stock], Stock]

# --- Pillow images


def _not_recorded(image: Any, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented


def through_methods(stock: Stock) -> Stock:
    """For functionals whose stock code calls Pillow methods that `LazyImage` records."""
    return _on_image(_not_recorded, palettes=True, by_methods=True)(stock)


def on_image(place: str) -> Make:
    """For functionals on Pillow images, and for conversions, which also take tensors."""
    return _on_image(RECORDERS[place], place in TAKE_PALETTES)


def resized_crop(place: str) -> Make:
    """For crops that are resized: recorded as a whole where they are usual, else method by method."""
    return _on_image(RECORDERS[place], place in TAKE_PALETTES, by_methods=True)


_MISSING = object()


def _on_image(recorder: Recorder, palettes: bool, by_methods: bool = False) -> Make:
    """What `recorder` does not take goes to stock code: under `by_methods` as a handle, whose methods record."""

    def make(stock: Stock) -> Stock:
        first = next(iter(inspect.signature(stock).parameters))

        @functools.wraps(stock)
        def stand_in(image: Any = _MISSING, /, *args: Any, **kwargs: Any) -> Any:
            if image is _MISSING:
                if first not in kwargs:
                    return stock(**kwargs)  # raises its own error
                image = kwargs.pop(first)
            handle: Any = None
            if isinstance(image, Image.Image):
                handle = lazy_image(image, palettes=palettes)
            elif isinstance(image, HANDLES) and image.is_recording:
                handle = image
            made = NotImplemented if handle is None else recorder(handle, *args, **kwargs)
            if made is not NotImplemented:
                return made
            if not by_methods or not isinstance(image, Image.Image):
                return stock(image, *args, **kwargs)
            if handle is not None:
                return stock(handle, *args, **kwargs)
            with executing():  # told once, not by each method
                return stock(image, *args, **kwargs)

        return stand_in

    return make


def through_tensor(recorder: Recorder) -> Make:
    """For kernels of `transforms.v2` on Pillow images that work on tensors; `recorder` is of the kernel on these."""

    def record(image: Any, *args: Any, **kwargs: Any) -> Any:
        made = recorder(image.as_tensor(Op("pil_to_tensor"), torch.uint8), *args, **kwargs)
        return made if made is NotImplemented else made.as_image()

    return _on_image(record, palettes=False)


# --- tensors

# What the kernels of v1 compute from a `tv_tensors.Image` is a pure tensor, but for these.
_KEEP_TYPE = ("erase",)


def on_tensor(name: str, recorder: Recorder | None, makes_pure: bool = False) -> Make:
    """For tensor functionals and kernels: records on handles, and never hands one to stock code.

    Under `makes_pure`, what is computed from a `tv_tensors.Image` is a pure tensor. `name` is for the fallback report.
    """

    def make(stock: Stock) -> Stock:
        @functools.wraps(stock)
        def stand_in(image: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(image, HANDLES):
                each = type(image) is LazyStack and recorder is not None and name in EACH_ALONE
                made = image.record_each(recorder, *args, **kwargs) if each else NotImplemented
                return stock(image, *args, **kwargs) if made is NotImplemented else made
            is_recording, ops = image.is_recording, image.sink_ops
            if is_recording and recorder is not None:
                made = recorder(image, *args, **kwargs)
                if made is not NotImplemented:
                    is_computed = type(made) is LazyTVImage and (made is not image or made.sink_ops is not ops)
                    return made.as_subclass(torch.Tensor) if makes_pure and is_computed else made
            with executing():
                # Wrong arguments raise here, and are no fallback.
                result = stock(image.materialize(), *args, **kwargs)
            if is_recording:
                arguments = " with these arguments" if recorder is not None else ""
                report_fallback(name, f"no kernel for {image.sink_dtype} tensors{arguments}")
            return result

        return stand_in

    return make


_QUERIES: dict[str, Recorder] = {
    "v1.get_dimensions": lambda handle: list(handle.sink_shape),
    "v1.get_image_size": lambda handle: [handle.sink_shape[2], handle.sink_shape[1]],
    "v1.get_image_num_channels": lambda handle: handle.sink_shape[0],
    "v2.get_dimensions": lambda handle: list(handle.sink_shape),
    "v2.get_num_channels": lambda handle: handle.sink_shape[0],
    "v2.get_size": lambda handle: list(handle.sink_shape[1:]),
}


def tensor_kernel(family: str, name: str) -> Make:
    """The stand-in for a kernel of `transforms`, "v1", or `transforms.v2`, "v2"."""
    place = f"{family}.{name}"
    recorder = _QUERIES.get(place) or RECORDERS.get(place)
    return on_tensor(name, recorder, makes_pure=family == "v1" and name not in _KEEP_TYPE)


def handle_kernel(name: str, function: Stock) -> Make:
    """The kernel of `transforms.v2` for a type that has none there; `function` gets what cannot record."""
    return lambda stock: tensor_kernel("v2", name)(function)


# Their kernels on Pillow images turn them into tensors and back.
_THROUGH_TENSORS = ("elastic", "erase", "gaussian_blur", "permute_channels")


def pillow_kernel(name: str) -> Make:
    """The stand-in for a kernel of `transforms.v2` on Pillow images."""
    if name in _THROUGH_TENSORS:
        return through_tensor(RECORDERS[f"v2.{name}"])
    if name == "resized_crop":
        return resized_crop("pil.resized_crop_v2")
    return on_image(f"pil.{name}") if f"pil.{name}" in RECORDERS else through_methods


def convert_v2(handle: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Records `v2.functional.convert_image_dtype`, a kernel that user code calls by itself."""
    return RECORDERS["v2.to_dtype"](handle, dtype, True)


# --- batches


def mix(recorder: Recorder) -> Make:
    """For the `transform` of `MixUp` and `CutMix`: records on a batch that does not exist yet."""

    def make(stock: Stock) -> Stock:
        @functools.wraps(stock)
        def transform(self: Any, inpt: Any, params: dict[str, Any]) -> Any:
            if isinstance(inpt, LazyBatch) and inpt.ndim == 4 and inpt.is_recording and inpt is not params["labels"]:
                self._check_image_or_video(inpt, batch_size=params["batch_size"])
                made = recorder(inpt, params)
                if made is not NotImplemented:
                    return made
            return stock(self, inpt, params)

        return transform

    return make


def collate_tensors(stock: Stock) -> Stock:
    @functools.wraps(stock)
    def collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> Any:
        if any(isinstance(item, HANDLES) for item in batch):
            return collate_handles(batch)
        if all(isinstance(item, LazyStack) for item in batch):
            return torch.stack(batch)
        return stock(batch, collate_fn_map=collate_fn_map)

    return collate_tensors


# --- types


def wrap(stock: Stock) -> Stock:
    """Stand-in for `tv_tensors.wrap`."""

    @functools.wraps(stock)
    def wrap(wrappee: Any, *, like: Any, **kwargs: Any) -> Any:
        if isinstance(like, LazyTVImage) and type(wrappee) is LazyTensor and wrappee.is_recording:
            return wrappee.as_tv_image()
        if isinstance(like, LazyTVImage):
            return wrappee.as_subclass(tv_tensors.Image)
        return stock(wrappee, like=like, **kwargs)

    return wrap


def new_image(stock: Stock) -> Stock:
    """Stand-in for `tv_tensors.Image.__new__`: of a Pillow image or a handle it makes a handle, in place of a view."""

    @functools.wraps(stock)
    def new(cls: Any, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool | None = None) -> Any:
        if cls is tv_tensors.Image and dtype is None and device is None and not requires_grad:
            if isinstance(data, Image.Image):
                data = v2.functional.pil_to_tensor(data)
            if isinstance(data, HANDLES) and data.is_recording:
                return data.as_tv_image()
        return stock(cls, data, dtype=dtype, device=device, requires_grad=requires_grad)

    return new


def new_mask(stock: Stock) -> Stock:
    """Stand-in for `tv_tensors.Mask.__new__`: there is no handle for masks, and the report should say so."""

    @functools.wraps(stock)
    def new(cls: Any, data: Any, **kwargs: Any) -> Any:
        if isinstance(data, Image.Image):
            data = v2.functional.pil_to_tensor(data)
        if isinstance(data, HANDLES) and data.is_recording:
            report_fallback("tv_tensors.Mask", "a mask is made from its image at once, and what moves it is stock code")
            with executing():
                data = data.materialize()
        return stock(cls, data, **kwargs)

    return new


def parameter(stock: Stock) -> Stock:
    """Stand-in for `Parameter.__new__`, which wants tensors whose `detach` returns their own type."""

    @functools.wraps(stock)
    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        args = cls, data, requires_grad
        return run_on_real(stock, args, {}) if isinstance(data, HANDLES) else stock(*args)

    return new


# --- timm

_ENHANCERS = {
    "Color": "pil.adjust_saturation",
    "Contrast": "pil.adjust_contrast",
    "Brightness": "pil.adjust_brightness",
    "Sharpness": "pil.adjust_sharpness",
}
_TIMM_OPS = ("autocontrast", "equalize")


class ModuleStandIn:
    """A module with some of its functions replaced."""

    def __init__(self, stock: Any, replaced: dict[str, Any]) -> None:
        self.__dict__.update(replaced)
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class _Enhancer:
    """One of `ImageEnhance`'s classes, on a handle."""

    def __init__(self, stock: Callable[[Any], Any], recorder: Recorder, image: Any) -> None:
        self._stock, self._recorder, self._image = stock, recorder, image

    def enhance(self, factor: Any) -> Any:
        made = self._recorder(self._image, factor) if _records(self._image) else NotImplemented
        return self._stock(self._image).enhance(factor) if made is NotImplemented else made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock(self._image), name)


def _records(image: Any) -> bool:
    """True for a handle whose pixels are colors, and not numbers of colors."""
    return getattr(image, "is_recording", False) and image.mode != "P"


def _enhancer(stock: Callable[[Any], Any], recorder: Recorder) -> Callable[[Any], Any]:
    return lambda image: _Enhancer(stock, recorder, image) if _records(image) else stock(image)


def _function(stock: Stock, recorder: Recorder) -> Stock:
    def operation(image: Any, *args: Any, **kwargs: Any) -> Any:
        made = recorder(image, *args, **kwargs) if _records(image) else NotImplemented
        return stock(image, *args, **kwargs) if made is NotImplemented else made

    return operation


def image_enhance(stock: Any) -> ModuleStandIn:
    """`PIL.ImageEnhance` as timm's augmentations call it on handles; what is no handle goes to Pillow."""
    return ModuleStandIn(
        stock, {kind: _enhancer(getattr(stock, kind), RECORDERS[place]) for kind, place in _ENHANCERS.items()}
    )


def image_ops(stock: Any) -> ModuleStandIn:
    """`PIL.ImageOps` likewise; its other functions that the kernels know call methods that `LazyImage` records."""
    return ModuleStandIn(stock, {name: _function(getattr(stock, name), RECORDERS[f"pil.{name}"]) for name in _TIMM_OPS})
