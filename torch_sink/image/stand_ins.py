"""The stand-ins for functions of torchvision while the backend is on: they call a recorder, or else stock code.

A recorder takes a `Recording` and the arguments behind the image, and returns another one, or `NotImplemented` if
unsupported: stock code then finds an ordinary image or tensor, and raises its own errors.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data._utils.collate import collate
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2.functional._utils import _KERNEL_REGISTRY

from torch_sink.common.patches import is_written_in, stock_function
from torch_sink.image.core.fallback import MUTED, count_function_modes, executing, report_fallback
from torch_sink.image.core.first_batch import note_array
from torch_sink.image.core.ops import Recorder, takes
from torch_sink.image.core.recording import Recording
from torch_sink.image.handles.array import ArrayImage
from torch_sink.image.handles.image import LazyImage, lazy_image, record_on_array
from torch_sink.image.handles.names import STOCK_TYPES, stock_type
from torch_sink.image.handles.tensor import HANDLES, Handle, LazyTensor, LazyTVImage
from torch_sink.image.operations import RECORDERS, TAKE_PALETTES
from torch_sink.image.operations.functionals import through_tensor
from torch_sink.image.run.batch import LazyBatch
from torch_sink.image.run.collate import collate_handles
from torch_sink.image.run.stack import EACH_ALONE

Stock = Callable[..., Any]
Make = Callable[[Stock], Stock]


def around(function: Stock) -> Make:
    """Makes a stand-in that calls `function` with the stock function, and with its own arguments behind it."""

    return lambda stock: functools.wraps(stock)(lambda *args, **kwargs: function(stock, *args, **kwargs))


class _Before(functools.partial):  # type: ignore[type-arg]
    """A stand-in that binds to no object. Pickle finds it under the name of the stock function, or that function."""

    def __reduce__(self) -> Any:
        module, name = self.__module__, self.__qualname__  # type: ignore[attr-defined]
        stands_there = getattr(sys.modules.get(module), name, None) is self
        return name if stands_there else (stock_function, (module, name))


def before(function: Stock) -> Make:
    """As `around`, for functions of modules that are called often: the stand-in adds no Python call."""
    return lambda stock: functools.update_wrapper(_Before(function, stock), stock)


def _record_on(
    handle: Any, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Any,
    keeps: Callable[[Recording, Recording], bool] | None = None,
) -> Any:  # fmt: skip
    """The handle of what a recorder makes of a handle and the arguments behind it, or that handle itself.

    `kind` is the type of a new handle: without it, and where `keeps(begun, made)` is true, that of the old one.
    """
    begun: Recording = handle.__dict__["lazy_recording"]
    try:
        made = recorder(begun, *args, **kwargs)
    except TypeError:  # as `made_by`, without a call
        if takes(recorder, begun, *args, **kwargs):
            raise
        return NotImplemented
    if made is begun:
        return handle
    if keeps is not None and type(made) is Recording and keeps(begun, made):
        kind = None
    return handle.handle_of(made, begun, kind)


# --- Pillow images

_MISSING = object()


def on_image(name: str, *, by_methods: bool = False, kind: type | None = None) -> Make:
    """Makes stand-ins for functionals on Pillow images, and for conversions, which also take tensors.

    With `by_methods`, stock code gets a handle, whose methods record, if the recorder of `name` does not take a call.
    `kind` is that of the handles of tensors which the function returns, if it is another one.
    """
    return _on_image(RECORDERS[name], by_methods or name in TAKE_PALETTES, by_methods, kind)


def through_methods(stock: Stock) -> Stock:
    """The stand-in for a functional whose stock code calls Pillow methods that `LazyImage` records."""
    return _on_image(None, palettes=True, by_methods=True)(stock)


def _on_image(
    recorder: Recorder | None, palettes: bool, by_methods: bool = False, kind_of_result: type | None = None
) -> Make:
    def make(stock: Stock) -> Stock:
        first = next(iter(inspect.signature(stock).parameters))

        @functools.wraps(stock)
        def stand_in(image: Any = _MISSING, /, *args: Any, **kwargs: Any) -> Any:
            if image is _MISSING:
                if first not in kwargs:
                    return stock(**kwargs)  # raises its own error
                image = kwargs.pop(first)
            kind, is_pillow = type(image), True
            if kind is LazyImage and image._im is None and (palettes or image._mode != "P"):
                handle: Any = image  # as `lazy_image` says, without a call
            elif kind is Image.Image and MUTED.depth:
                return stock(image, *args, **kwargs)
            elif issubclass(kind, Image.Image):
                if kind is ArrayImage and recorder is not None and not MUTED.depth:
                    made = record_on_array(image, recorder, args, kwargs, kind_of_result)
                    if made is not NotImplemented:
                        return made
                handle = lazy_image(image, palettes=palettes)
            else:
                handle, is_pillow = image if kind in HANDLES and image.is_recording else None, False
            if handle is not None:
                made = NotImplemented
                if recorder is not None:
                    made = _record_on(handle, recorder, args, kwargs, kind_of_result)
                if made is NotImplemented:
                    made = stock(handle if by_methods else image, *args, **kwargs)
                if made is not handle:
                    return made
                # Some return what they get where they have nothing to do; a tensor may become one of another type.
                return image if is_pillow or kind_of_result in (None, kind) else handle.record_as(kind_of_result)
            # The fallback was reported; each method of the image would report it again.
            with executing() if by_methods and is_pillow else nullcontext():
                made = stock(image, *args, **kwargs)
            if kind is np.ndarray and isinstance(made, torch.Tensor):
                note_array(stock, image)
            return made

        return stand_in

    return make


def on_image_as_tensor(name: str) -> Make:
    """As `on_image`, for functionals that turn Pillow images into tensors and back, from their recorder on tensors."""
    return _on_image(through_tensor(RECORDERS[name]), palettes=False)


# Kernels of `transforms.v2` on Pillow images that turn them into tensors and back.
_THROUGH_TENSORS = ("elastic", "erase", "gaussian_blur", "permute_channels")
# Those that take other arguments than torchvision's functional of that name on Pillow images, which they call.
_OTHER_ARGUMENTS = ("affine", "resize", "rotate")


def pillow_kernel(name: str) -> Make:
    """The stand-in for a kernel of `transforms.v2` on Pillow images."""
    if name == "resized_crop":
        return on_image("pil.resized_crop_v2", by_methods=True)
    if name in _THROUGH_TENSORS:
        return on_image_as_tensor(f"v2.{name}")
    is_recorded = f"pil.{name}" in RECORDERS and name not in _OTHER_ARGUMENTS
    return on_image(f"pil.{name}", by_methods=name == "crop") if is_recorded else through_methods


# --- tensors


# Kernels of v1 return a pure tensor of a `tv_tensors.Image`, but for these calls: they convert it by `Tensor.to`, write
# to it, or clone it, as the gray conversion does where it is to make one channel of one. By the recordings before and
# after.
_KEEPS_TYPE: dict[str, Callable[[Recording, Recording], bool]] = {
    "convert_image_dtype": lambda begun, made: begun.dtype.is_floating_point and made.dtype.is_floating_point,
    "erase": lambda begun, made: True,
    "rgb_to_grayscale": lambda begun, made: begun.shape[0] == 1 and made.calls[-1].args[0] == 1,
}


def on_tensor(name: str, recorder: Recorder | None, is_registered: bool = False) -> Make:
    """Makes stand-ins for tensor functionals and kernels, which record on handles and give stock code real tensors.

    The kernels in the registry of `transforms.v2`, which are called through a wrapper, return another
    `tv_tensors.Image` of one, also where nothing changes. All others return a pure tensor, but for `_KEEPS_TYPE`.
    `name` is for the report.
    """

    kind_of_result = None if is_registered else LazyTensor
    keeps = None if is_registered else _KEEPS_TYPE.get(name)

    def make(stock: Stock) -> Stock:
        @functools.wraps(stock)
        def stand_in(image: Any, *args: Any, **kwargs: Any) -> Any:
            if type(image) is torch.Tensor:
                return stock(image, *args, **kwargs)
            if not isinstance(image, Handle):
                each = type(image) is LazyBatch and recorder is not None and name in EACH_ALONE
                made = image.record_each(recorder, *args, **kwargs) if each else NotImplemented
                return stock(image, *args, **kwargs) if made is NotImplemented else made
            # Mostly without a call.
            is_recording = (image.lazy_real is None and image.lazy_base is None) or image.is_recording
            if is_recording and recorder is not None:
                made = _record_on(image, recorder, args, kwargs, kind_of_result, keeps)
                if made is image and is_registered and type(image) is LazyTVImage:
                    return image.as_tv_image()
                if made is not NotImplemented:
                    return made
            dtype = image.dtype
            with executing():
                # Wrong arguments raise here, and are no fallback.
                result = stock(image.materialize(), *args, **kwargs)
            if is_recording:
                made = getattr(result, "dtype", dtype)
                arguments = " with these arguments" if recorder is not None and made == dtype else ""
                becomes = f" that become {made}" if made != dtype else ""
                report_fallback(name, f"no kernel for {dtype} tensors{becomes}{arguments}")
            return result

        return stand_in

    return make


_QUERIES: dict[str, Recorder] = {
    "get_dimensions": lambda image: list(image.shape),
    "get_image_num_channels": lambda image: image.shape[0],
    "get_image_size": lambda image: list(image.size),
    "get_num_channels": lambda image: image.shape[0],
    "get_size": lambda image: list(image.shape[1:]),
}


def tensor_kernel(family: str, name: str) -> Make:
    """The stand-in for a kernel of `transforms`, "v1", or `transforms.v2`, "v2"."""
    recorder = _QUERIES.get(name) or RECORDERS.get(f"{family}.{name}")
    return on_tensor(name, recorder, is_registered=family == "v2")


def handle_kernel(name: str, function: Stock) -> Make:
    """The kernel of `transforms.v2` for a lazy type; what cannot be recorded, `function` does with the real tensor."""
    return lambda stock: tensor_kernel("v2", name)(function)


def to_scaled_dtype(image: Recording, dtype: torch.dtype = torch.float32) -> Any:
    """Records `v2.functional.convert_image_dtype`, a kernel that user code calls by itself."""
    return RECORDERS["v2.to_dtype"](image, dtype, True)


# --- what torchvision's functionals and transforms share


def get_kernel(stock: Callable[..., Any], functional: Any, input_type: Any, **kwargs: Any) -> Any:
    """For `_get_kernel` of `transforms.v2`, whose error lists the types in a registry: torchvision's own."""
    try:
        return stock(functional, input_type, **kwargs)
    except TypeError as error:
        kernels = _KERNEL_REGISTRY[functional]
        own = {kind: None for kind in kernels if not hasattr(kind, "lazy_class")}
        raise TypeError(str(error).replace(str(kernels.keys()), str(own.keys()))) from None


def log_usage(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    """Stand-in for `_log_api_usage_once`, which finds out at every call that it does nothing for a function twice.

    It is no `functools.cache`, of which `torch.compile` warns, and no set, which that of torch 2.8 does not know.
    """
    logged: dict[FunctionType, bool] = {}

    def log(user: Any) -> None:
        if type(user) is not FunctionType:  # what a program put in a functional's place; it may have no hash
            stock(user)
        elif user not in logged:
            stock(user)
            logged[user] = True

    return log


def _key_of(values: dict[Any, Any], kind: type) -> Any:
    """The key under which stock code finds the value of a type; programs write keys as `type(image)` too."""
    wanted = stock_type(kind)
    return wanted if wanted in values else next((key for key in values if stock_type(key) is wanted), wanted)


def get_fill(stock: Callable[..., Any], fills: Any, inpt_type: type) -> Any:
    """For `_get_fill`, which looks a fill up by the type of the input."""
    return stock(fills, _key_of(fills, inpt_type))


def to_dtype(stock: Callable[..., Any], transform: Any, inpt: Any, params: dict[str, Any]) -> Any:
    """For `v2.ToDtype.transform`, whose `dtype` may be a dict by the type of the input."""
    dtypes, kind = transform.dtype, type(inpt)
    if isinstance(dtypes, dict) and (key := _key_of(dtypes, kind)) is not kind and key in dtypes:
        transform = copy.copy(transform)
        transform.dtype = {**dtypes, kind: dtypes[key]}
    return stock(transform, inpt, params)


# --- tables of automatic augmentations, from which one number is taken at a time


def augmentation_space(owner: type, stock: Any) -> Any:
    """The `_augmentation_space` of one of v1's automatic augmentations, made once: stock code makes ten tensors a call.

    It holds arrays, from which a number is read in a tenth of the time. Subclasses, which may compute with tensors, get
    stock code's.
    """
    if not is_written_in(sys.modules[owner.__module__], stock):
        return stock

    @functools.lru_cache(maxsize=4096)
    def made_once(dtype: torch.dtype, *args: Any) -> dict[str, Any]:
        return {name: (_read_only(values), signed) for name, (values, signed) in stock(None, *args).items()}

    @functools.wraps(stock)
    def stand_in(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or type(self) is not owner or count_function_modes():  # of a default device, for instance
            return stock(self, *args, **kwargs)
        return dict(made_once(torch.get_default_dtype(), *args))

    return stand_in


def _read_only(tensor: torch.Tensor) -> np.ndarray:
    array = tensor.numpy()
    array.flags.writeable = False
    return array


def magnitudes(owner: type, stock: dict[str, Any]) -> dict[str, Any]:
    """The `_AUGMENTATION_SPACE` of one of v2's automatic augmentations: each call gets a copy of what was made once."""

    def copied(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.lru_cache(maxsize=4096)
        def made_once(dtype: torch.dtype, *args: Any) -> Any:
            return make(*args)

        def copy(*args: Any) -> Any:
            made = make(*args) if count_function_modes() else made_once(torch.get_default_dtype(), *args)
            return made if made is None else made.clone()

        return copy if is_written_in(sys.modules[owner.__module__], make) else make

    return {name: (copied(make), signed) for name, (make, signed) in stock.items()}


# --- batches


def mix(stock: Stock, transform: Any, inpt: Any, params: dict[str, Any]) -> Any:
    """For the `transform` of `MixUp` and `CutMix`: records on a batch that does not exist yet."""
    if type(inpt) is LazyBatch and inpt.ndim == 4 and inpt.is_recording and inpt is not params["labels"]:
        transform._check_image_or_video(inpt, batch_size=params["batch_size"])
        made = RECORDERS[stock.__qualname__](inpt, params)
        if made is not NotImplemented:
            return made
    return stock(transform, inpt, params)


def collate_as_stock(batch: Any, *, collate_fn_map: dict[Any, Stock]) -> Any:
    """For handles in a map of collate functions: what the map has for the stock class, found as torch finds it."""
    found = collate_fn_map.get(STOCK_TYPES[type(batch[0])])
    if found is not None:
        return found(batch, collate_fn_map=collate_fn_map)
    others = {kind: function for kind, function in collate_fn_map.items() if kind not in HANDLES}
    return collate(batch, collate_fn_map=others)


def collate_tensors(stock: Stock, batch: Any, **kwargs: Any) -> Any:
    kinds = set(map(type, batch))
    if not kinds.isdisjoint(HANDLES):
        return collate_handles(batch)
    return torch.stack(batch) if kinds == {LazyBatch} else stock(batch, **kwargs)


# --- types


def wrap(stock: Stock, wrappee: Any, *, like: Any, **kwargs: Any) -> Any:
    """For `tv_tensors.wrap`."""
    if type(like) is not LazyTVImage:
        return stock(wrappee, like=like, **kwargs)
    if type(wrappee) is LazyTensor and wrappee.is_recording:
        return wrappee.as_tv_image()
    return wrappee.as_subclass(tv_tensors.Image)


def new_image(stock: Stock, cls: Any, data: Any, **kwargs: Any) -> Any:
    """For `tv_tensors.Image.__new__`: of a Pillow image or a handle it makes a handle, in place of a view."""
    if cls is tv_tensors.Image and type(data) is not torch.Tensor and not any(kwargs.values()):
        if isinstance(data, Image.Image):
            data = v2.functional.pil_to_tensor(data)
        if isinstance(data, Handle) and data.is_recording:
            return data.as_tv_image()
    return stock(cls, data, **kwargs)


def new_mask(stock: Stock, cls: Any, data: Any, **kwargs: Any) -> Any:
    """For `tv_tensors.Mask.__new__`: there is no handle for masks, and the report should say so."""
    if isinstance(data, Image.Image):
        data = v2.functional.pil_to_tensor(data)
    if isinstance(data, Handle) and data.is_recording:
        report_fallback("tv_tensors.Mask", "a mask is made from its image at once, and what moves it is stock code")
        with executing():
            data = data.materialize()
    return stock(cls, data, **kwargs)


# --- timm

_ENHANCERS = {
    "Color": "pil.adjust_saturation",
    "Contrast": "pil.adjust_contrast",
    "Brightness": "pil.adjust_brightness",
    "Sharpness": "pil.adjust_sharpness",
}


def image_enhance(stock: ModuleType) -> ModuleType:
    """`PIL.ImageEnhance` as timm's augmentations call it on handles; what is no handle goes to Pillow."""

    def enhancer(kind: str, name: str) -> Stock:
        def enhance(image: Any, factor: Any) -> Any:
            return getattr(stock, kind)(image).enhance(factor)

        return lambda image: SimpleNamespace(enhance=functools.partial(_call_of_module, enhance, name, image))

    return _with(stock, {kind: enhancer(kind, name) for kind, name in _ENHANCERS.items()})


def image_ops(stock: ModuleType) -> ModuleType:
    """`PIL.ImageOps` likewise; its other functions that the kernels know call methods that `LazyImage` records."""
    names = ("autocontrast", "equalize")
    return _with(
        stock, {name: functools.partial(_call_of_module, getattr(stock, name), f"pil.{name}") for name in names}
    )


def _call_of_module(stock: Stock, name: str, image: Any, *args: Any, **kwargs: Any) -> Any:
    """Records a call of a module of Pillow on a handle that is no palette image; any other call goes to `stock`."""
    records = type(image) is LazyImage and image.is_recording and image.mode != "P"
    made = image.record(RECORDERS[name], *args, **kwargs) if records else NotImplemented
    return stock(image, *args, **kwargs) if made is NotImplemented else made


def _with(module: ModuleType, replaced: dict[str, Any]) -> ModuleType:
    """A module with some of its functions replaced."""
    made = ModuleType(module.__name__)
    vars(made).update({**vars(module), **replaced})
    return made
