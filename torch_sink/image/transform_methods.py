"""Stand-ins for methods of torchvision's transform classes: faster samplers, and dicts that are keyed by exact types.

Each sampler makes the same calls on torch's global generator in the same order as the stock one, so results and the
state of the generator afterwards are equal.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from itertools import compress
from types import FunctionType
from typing import Any

import torch
from torchvision import tv_tensors
from torchvision.transforms import functional as F
from torchvision.transforms.v2._transform import Transform, _RandomApplyTransform
from torchvision.transforms.v2._utils import check_type, query_size
from torchvision.transforms.v2.functional import convert_bounding_box_format
from torchvision.transforms.v2.functional._utils import _KERNEL_REGISTRY

from torch_sink.image.core.fallback import count_function_modes
from torch_sink.image.handles.names import stock_type
from torch_sink.image.handles.tensor import HANDLES
from torch_sink.image.steps.draws import Room, as_float32, log_ratio, resized_crop, two_chances, whole


def get_kernel(stock: Callable[..., Any], functional: Any, input_type: Any, **kwargs: Any) -> Any:
    """For `_get_kernel` of `transforms.v2`, whose error lists the types in a registry: torchvision's own."""
    try:
        return stock(functional, input_type, **kwargs)
    except TypeError as error:
        kernels = _KERNEL_REGISTRY[functional]
        own = {kind: None for kind in kernels if not hasattr(kind, "lazy_class")}
        raise TypeError(str(error).replace(str(kernels.keys()), str(own.keys()))) from None


def resized_crop_v1(stock: Callable[..., Any]) -> Any:
    """Stand-in for `transforms.RandomResizedCrop.get_params`."""

    def get_params(img: Any, scale: Any, ratio: Any) -> tuple[int, int, int, int]:
        _, height, width = F.get_dimensions(img)
        return resized_crop(height, width, scale, ratio, log_ratio(tuple(ratio), torch.get_default_dtype()), Room())

    return staticmethod(get_params)


def resized_crop_v2(stock: Callable[..., Any], transform: Any, flat_inputs: list[Any]) -> dict[str, Any]:
    """For `v2.RandomResizedCrop.make_params`."""
    height, width = query_size(flat_inputs)
    logs = transform._log_ratio.tolist()
    top, left, h, w = resized_crop(height, width, transform.scale, transform.ratio, logs, Room())
    return {"top": top, "left": left, "height": h, "width": w}


def iou_crop(stock: Callable[..., Any]) -> Any:
    """Stand-in for `v2.RandomIoUCrop.make_params`, which tries dozens of crops with a dozen tensors each."""

    def make_params(self: Any, flat_inputs: list[Any]) -> dict[str, Any]:
        boxes: Any = next((leaf for leaf in flat_inputs if isinstance(leaf, tv_tensors.BoundingBoxes)), None)
        is_plain = type(boxes) is tv_tensors.BoundingBoxes and boxes.is_cpu and not boxes.requires_grad
        is_plain = is_plain and boxes.shape[1:] == (4,) and boxes.dtype in (torch.float32, torch.int64)
        if not is_plain or torch.get_default_dtype() is not torch.float32 or count_function_modes():
            return stock(self, flat_inputs)
        plain, corners = boxes.as_subclass(torch.Tensor), tv_tensors.BoundingBoxFormat.XYXY
        if boxes.format is not corners:
            plain = convert_bounding_box_format(plain, boxes.format, corners)
        found = plain.tolist()
        if not all(-_LARGEST < left <= right < _LARGEST and -_LARGEST < top <= bottom < _LARGEST
                   for left, top, right, bottom in found):  # fmt: skip
            return stock(self, flat_inputs)
        # What whole numbers make is exact; what real numbers make is rounded to float32.
        rounded: Callable[[float], float] = as_float32 if boxes.dtype is torch.float32 else float
        centers = [(as_float32(box[0] + box[2]) / 2, as_float32(box[1] + box[3]) / 2) for box in found]
        height, width = query_size(flat_inputs)
        while not (least := self.options[whole(len(self.options))]) >= 1.0:
            least = as_float32(least)
            for _ in range(self.trials):
                crop = _tried_crop(self, width, height)
                if crop is None:
                    continue
                left, top, right, bottom = crop
                is_inside = [left < x < right and top < y < bottom for x, y in centers]
                if any(_iou(box, crop, rounded) >= least for box in compress(found, is_inside)):
                    place = {"top": top, "left": left, "height": bottom - top, "width": right - left}
                    return {**place, "is_within_crop_area": torch.tensor(is_inside)}
        return {}

    return make_params


# Float32 holds all whole numbers below, and areas of boxes with such coordinates do not overflow.
_LARGEST = 1 << 24


def _tried_crop(crop: Any, width: int, height: int) -> tuple[int, int, int, int] | None:
    """(left, top, right, bottom) of a random part of an image, or None where it has another shape than is wanted."""
    low, span = as_float32(crop.min_scale), as_float32(crop.max_scale - crop.min_scale)
    across, down = (as_float32(low + as_float32(span * chance)) for chance in two_chances())
    w, h = int(as_float32(width * across)), int(as_float32(height * down))
    if not crop.min_aspect_ratio <= w / h <= crop.max_aspect_ratio:
        return None
    across, down = two_chances()
    left, top = int(as_float32((width - w) * across)), int(as_float32((height - h) * down))
    return (left, top, left + w, top + h) if w else None


def _iou(box: Sequence[float], crop: Sequence[int], rounded: Callable[[float], float]) -> float:
    """The intersection of a box and a crop (left, top, right, bottom), divided by their union."""
    wide = max(rounded(min(box[2], crop[2]) - max(box[0], crop[0])), 0)
    high = max(rounded(min(box[3], crop[3]) - max(box[1], crop[1])), 0)
    area = rounded(rounded(box[2] - box[0]) * rounded(box[3] - box[1]))
    common = rounded(wide * high)
    union = rounded(rounded(area + rounded((crop[2] - crop[0]) * (crop[3] - crop[1]))) - common)
    return as_float32(as_float32(common) / as_float32(union))


def augmentation_space(stock: Callable[..., Any]) -> Any:
    """Stand-in for the `_augmentation_space` of v1's automatic augmentations, which draws nothing."""

    def as_arrays(space: dict[str, Any]) -> dict[str, Any]:
        # Reading a number from an array takes a tenth of the time that a tensor takes.
        return {name: (magnitudes.numpy(), signed) for name, (magnitudes, signed) in space.items()}

    made_once = _made_once(lambda kind, *args: stock(None, *args), as_arrays)
    return lambda self, *args: dict(made_once(type(self), *args))


def magnitudes(stock: dict[str, Any]) -> dict[str, Any]:
    """Stand-in for the `_AUGMENTATION_SPACE` of v2's automatic augmentations, which take one number out of a tensor."""
    return {name: (_made_once(make, torch.Tensor.tolist), signed) for name, (make, signed) in stock.items()}


def _made_once(make: Callable[..., Any], convert: Callable[[Any], Any]) -> Callable[..., Any]:
    """`make`, which remembers its converted results for each default dtype, unless a default device is set."""

    @functools.lru_cache(maxsize=4096)
    def kept(dtype: torch.dtype, *args: Any) -> Any:
        made = make(*args)
        return made if made is None else convert(made)

    return lambda *args: make(*args) if count_function_modes() else kept(torch.get_default_dtype(), *args)


def forward(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Stand-in for the `forward` of transforms of v2: where the only input is the handle of a tensor, it is faster."""

    @functools.wraps(stock)
    def stand_in(transform: Any, *inputs: Any) -> Any:
        is_alone = len(inputs) == 1 and type(inputs[0]) in HANDLES
        is_plain = is_alone and type(transform)._needs_transform_list is Transform._needs_transform_list
        if not is_plain or not check_type(inputs[0], transform._transformed_types):
            return stock(transform, *inputs)
        transform.check_inputs(list(inputs))
        if isinstance(transform, _RandomApplyTransform) and torch.rand(1) >= transform.p:
            return inputs[0]
        return transform.transform(inputs[0], transform.make_params(list(inputs)))

    return stand_in


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


# --- dicts that are keyed by exact types


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
