"""Steps: methods of torchvision's transforms that a data worker calls most, written again to take less time.

torchvision's classes run as they are, but for one method of ten of them. A step makes the same draws from torch's
generator in the same order as the method that it replaces: results and the generator's state are equal. It stands for
the source that it was written from: in another release of torchvision, and where a program has replaced the method, the
method itself runs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from types import CodeType
from typing import Any, NamedTuple

import torch
from torchvision import tv_tensors
from torchvision.transforms import _functional_pil as F_pil
from torchvision.transforms import functional as F
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2._transform import Transform, _RandomApplyTransform
from torchvision.transforms.v2._utils import check_type, query_size
from torchvision.transforms.v2.functional import convert_bounding_box_format

from torch_sink.image.core.fallback import count_dispatch_modes, count_function_modes
from torch_sink.image.handles.array import ORDINARY
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.handles.tensor import HANDLES

# Takes what the method takes. Returns its result; or `NotImplemented`, before anything was drawn: the method runs.
Run = Callable[..., Any]


class Step(NamedTuple):
    """What replaces a method of one of torchvision's classes.

    Attributes:
        owner: the class.
        name: of the method.
        sources: `hash_of` the method, and of others that the step replaces as well, in each release that differs.
        others: these.
        run: draws.
    """

    owner: type
    name: str
    sources: tuple[str, ...]
    others: tuple[Callable[..., Any], ...]
    run: Run

    def knows(self) -> bool:
        """Whether the class has the method, here and now, that the step was written from."""
        method = vars(self.owner)[self.name]
        function = getattr(method, "__func__", method)
        is_ours = inspect.isfunction(function) and function in _stand_ins
        return is_ours or hash_of(function, *self.others) in self.sources

    def make(self, stock: Callable[..., Any]) -> Any:
        """The method's stand-in."""
        run = self.run

        @functools.wraps(stock)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            # Compilers follow torchvision's code, modes see its calls, and of another default dtype it draws others.
            if torch.compiler.is_compiling() or kwargs or torch._C._is_tracing():
                return stock(*args, **kwargs)
            if torch.get_default_dtype() is not torch.float32 or count_function_modes() or count_dispatch_modes():
                return stock(*args, **kwargs)
            made = run(*args)
            return stock(*args) if made is NotImplemented else made

        _stand_ins.add(stand_in)
        is_static = isinstance(inspect.getattr_static(self.owner, self.name), staticmethod)
        return staticmethod(stand_in) if is_static else stand_in


STEPS: list[Step] = []
_stand_ins: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def step(owner: type, name: str, sources: str, *others: Callable[..., Any]) -> Callable[[Run], Run]:
    """Registers a step; the arguments are the fields of `Step`, with blanks between several hashes."""

    def register(run: Run) -> Run:
        STEPS.append(Step(owner, name, tuple(sources.split()), others, run))
        return run

    return register


def hash_of(*functions: Callable[..., Any]) -> str:
    """A hash of the source of functions, of none that they wrap; "" where there is none."""
    return _hash_of(*(getattr(function, "__code__", None) for function in functions))


@functools.cache
def _hash_of(*codes: CodeType | None) -> str:
    try:
        source = "\n".join(map(inspect.getsource, codes))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def rows() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """Rows of the table of stand-ins: the steps that know their methods."""
    yield from ((each.owner, each.name, each.make) for each in STEPS if each.knows())


# --- numbers from torch's global generator


class _Room(threading.local):
    """Tensors that each thread draws numbers into, since a new one costs more than a draw."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self.whole = torch.empty(1, dtype=torch.int64, device="cpu")
            self.wholes = torch.empty(2, dtype=torch.int64, device="cpu")
            self.real = torch.empty(1, dtype=torch.float32, device="cpu")
            self.reals = torch.empty(2, dtype=torch.float32, device="cpu")


_room = _Room()


def _whole(end: int) -> int:
    """A whole number in [0, end)."""
    return _room.whole.random_(0, end).item()  # type: ignore[return-value]


def two_wholes(end: int, other: int) -> Sequence[int]:
    """A whole number in [0, end), then one in [0, other); one call draws both where these are equal."""
    return _room.wholes.random_(0, end).tolist() if end == other else (_whole(end), _whole(other))


def _real(low: float, high: float) -> float:
    """A float32 in [low, high)."""
    return _room.real.uniform_(low, high).item()


def _beyond(p: Any) -> float | None:
    """A new float32 in [0, 1) less a probability, as torch compares them; None, undrawn, if `p` is none."""
    if type(p) not in (float, int) or not 0 <= p <= 1:
        return None
    return _room.real.uniform_().item() - _as_drawn(p)


def _two_chances() -> list[float]:
    """Two float32 in [0, 1), as `torch.rand(2)` draws them."""
    return _room.reals.uniform_().tolist()


def _as_float32(value: float) -> float:
    """A number rounded to float32."""
    return ctypes.c_float(value).value


@functools.lru_cache(maxsize=256)
def _as_drawn(probability: float) -> float:
    """A probability as torch compares it to a float32."""
    return torch.tensor(probability, dtype=torch.float32, device="cpu").item()


# --- transforms


@step(v1.RandomHorizontalFlip, "forward", "69161e0a55233522")
def _flip_v1(flip: Any, image: Any) -> Any:
    beyond = _beyond(flip.p)
    if beyond is None:
        return NotImplemented
    return F.hflip(image) if beyond < 0 else image


@step(v1.RandomApply, "forward", "4cf91b5ad6e8d9b0")
def _apply_v1(several: Any, image: Any) -> Any:
    beyond = _beyond(several.p)
    if beyond is None:
        return NotImplemented
    if beyond > 0:
        return image
    for transform in several.transforms:
        image = transform(image)
    return image


@step(v1.RandomGrayscale, "forward", "9df34e627ad5c3af")
def _grayscale_v1(grayscale: Any, image: Any) -> Any:
    channels = F.get_dimensions(image)[0]
    beyond = _beyond(grayscale.p)
    if beyond is None:
        return NotImplemented
    return F.rgb_to_grayscale(image, num_output_channels=channels) if beyond < 0 else image


@functools.lru_cache(maxsize=64)
def _log_ratio(ratio: tuple[float, ...]) -> Sequence[float]:
    """The logarithms of the smallest and the largest ratio, in float32."""
    return torch.log(torch.tensor(ratio, dtype=torch.float32, device="cpu")).tolist()  # type: ignore[no-any-return]


@step(v1.RandomResizedCrop, "get_params", "f32795f0e582b207")
def _resized_crop_v1(image: Any, scale: Any, ratio: Any) -> Any:
    width, height = image.size if type(image) in _PILLOW else F.get_dimensions(image)[:0:-1]
    low, high = _log_ratio(tuple(ratio))
    area, real, whole = height * width, _room.real, _room.whole
    for _ in range(10):
        target_area = area * real.uniform_(scale[0], scale[1]).item()
        aspect_ratio = real.uniform_(low, high).exp_().item()
        w = round(math.sqrt(target_area * aspect_ratio))
        h = round(math.sqrt(target_area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            return whole.random_(0, height - h + 1).item(), whole.random_(0, width - w + 1).item(), h, w  # type: ignore[return-value]
    in_ratio = float(width) / float(height)
    w, h = width, height
    if in_ratio < min(ratio):
        h = round(w / min(ratio))
    elif in_ratio > max(ratio):
        w = round(h * max(ratio))
    return (height - h) // 2, (width - w) // 2, h, w


@step(v2.RandomCrop, "make_params", "140f0acd667ab880")
def _crop_v2(crop: Any, flat_inputs: list[Any]) -> Any:
    height, width = query_size(flat_inputs)
    left, right, top, bottom = crop.padding or (0, 0, 0, 0)
    room = height + top + bottom - crop.size[0], width + left + right - crop.size[1]
    if min(room) < 0:  # to be padded, or an error
        return NotImplemented
    place = {"top": _whole(room[0] + 1) if room[0] else 0, "left": _whole(room[1] + 1) if room[1] else 0}
    padding = [left, top, right, bottom]
    size = {"height": crop.size[0], "width": crop.size[1]}
    return {"needs_crop": any(room), **place, **size, "needs_pad": any(padding), "padding": padding}


def _is_stocks(transform: Any, kind: Any, params: Callable[..., Any]) -> bool:
    """Whether a transform draws as its class in torchvision does, and no subclass and no program says how."""
    return type(transform) is kind and kind.get_params is params and "get_params" not in vars(transform)


_PILLOW: set[type] = {*ORDINARY, LazyImage}
_corner, _pad, _crop = v1.RandomCrop.get_params, F.pad, F.crop


@step(v1.RandomCrop, "forward", "889edae0e9f766e4", _corner, _pad, _crop)
def _crop_v1(crop: Any, image: Any) -> Any:
    """Of a Pillow image that is large enough, without the checks of `pad` and `crop`, which hold here."""
    is_known = type(image) in _PILLOW and F.pad is _pad and F.crop is _crop and _is_stocks(crop, v1.RandomCrop, _corner)
    rows, columns = crop.size
    if not is_known or crop.pad_if_needed or not type(rows) is type(columns) is int:
        return NotImplemented
    padded = image if crop.padding is None else F_pil.pad(image, crop.padding, crop.fill, crop.padding_mode)
    width, height = padded.size
    if not (0 < rows <= height and 0 < columns <= width):
        return NotImplemented
    top = left = 0
    if (rows, columns) != (height, width):
        top, left = two_wholes(height - rows + 1, width - columns + 1)
    return F_pil.crop(padded, top, left, rows, columns)


_jitter_params = v1.ColorJitter.get_params


@step(v1.ColorJitter, "forward", "0671acccd305d685", _jitter_params)
def _jitter_v1(jitter: Any, image: Any) -> Any:
    """With an order of plain numbers: stock code compares tensors."""
    if not _is_stocks(jitter, v1.ColorJitter, _jitter_params):
        return NotImplemented
    limits = jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue
    order = torch.randperm(4).tolist()
    factors = [None if limit is None else _real(limit[0], limit[1]) for limit in limits]
    adjust = F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue
    for at in order:
        if (factor := factors[at]) is not None:
            image = adjust[at](image, factor)
    return image


# Inputs of a transform of v2 that are an image alone, which stock code looks for in containers.
_IMAGES: set[type] = {*HANDLES, *ORDINARY, LazyImage}


def _is_image(transform: Any, inputs: tuple[Any, ...]) -> bool:
    if len(inputs) != 1 or type(inputs[0]) not in _IMAGES:
        return False
    is_plain = type(transform)._needs_transform_list is Transform._needs_transform_list
    return is_plain and check_type(inputs[0], transform._transformed_types)  # type: ignore[no-any-return]


@step(Transform, "forward", "0e65e29bcb6c5fab", Transform._needs_transform_list)
def _forward(transform: Any, *inputs: Any) -> Any:
    if not _is_image(transform, inputs):
        return NotImplemented
    transform.check_inputs(list(inputs))
    return transform.transform(inputs[0], transform.make_params(list(inputs)))


@step(_RandomApplyTransform, "forward", "604b36a3cf6d238c", Transform._needs_transform_list)
def _forward_at_random(transform: Any, *inputs: Any) -> Any:
    if not _is_image(transform, inputs):
        return NotImplemented
    transform.check_inputs(list(inputs))
    beyond = _beyond(transform.p)
    if beyond is None:
        return NotImplemented
    if beyond >= 0:
        return inputs[0]
    return transform.transform(inputs[0], transform.make_params(list(inputs)))


@step(v2.RandomIoUCrop, "make_params", "7106e919ccf09abe")
def _iou_crop(crop: Any, flat_inputs: list[Any]) -> Any:
    """With plain numbers, where stock code makes a dozen tensors for each of dozens of crops."""
    boxes: Any = next((leaf for leaf in flat_inputs if isinstance(leaf, tv_tensors.BoundingBoxes)), None)
    is_plain = type(boxes) is tv_tensors.BoundingBoxes and boxes.is_cpu and not boxes.requires_grad
    if not is_plain or boxes.shape[1:] != (4,) or boxes.dtype not in (torch.float32, torch.int64):
        return NotImplemented
    plain, corners = boxes.as_subclass(torch.Tensor), tv_tensors.BoundingBoxFormat.XYXY
    if boxes.format is not corners:
        plain = convert_bounding_box_format(plain, boxes.format, corners)
    found = plain.tolist()
    if not all(-_LARGEST < left <= right < _LARGEST and -_LARGEST < top <= bottom < _LARGEST
               for left, top, right, bottom in found):  # fmt: skip
        return NotImplemented
    # What whole numbers make is exact; what real numbers make is rounded to float32.
    rounded: Callable[[float], float] = _as_float32 if boxes.dtype is torch.float32 else float
    centers = [(_as_float32(box[0] + box[2]) / 2, _as_float32(box[1] + box[3]) / 2) for box in found]
    height, width = query_size(flat_inputs)
    while not (least := crop.options[_whole(len(crop.options))]) >= 1.0:
        least = _as_float32(least)
        for _ in range(crop.trials):
            box = _tried_crop(crop, width, height)
            if box is None:
                continue
            left, top, right, bottom = box
            is_inside = [left < x < right and top < y < bottom for x, y in centers]
            if any(_iou(each, box, rounded) >= least for each in compress(found, is_inside)):
                place = {"top": top, "left": left, "height": bottom - top, "width": right - left}
                return {**place, "is_within_crop_area": torch.tensor(is_inside)}
    return {}


# Float32 holds all whole numbers below, and areas of boxes with such coordinates do not overflow.
_LARGEST = 1 << 24


def _tried_crop(crop: Any, width: int, height: int) -> tuple[int, int, int, int] | None:
    """(left, top, right, bottom) of a random part of an image, or None where it has another shape than is wanted."""
    low, span = _as_float32(crop.min_scale), _as_float32(crop.max_scale - crop.min_scale)
    across, down = (_as_float32(low + _as_float32(span * chance)) for chance in _two_chances())
    w, h = int(_as_float32(width * across)), int(_as_float32(height * down))
    if not crop.min_aspect_ratio <= w / h <= crop.max_aspect_ratio:
        return None
    across, down = _two_chances()
    left, top = int(_as_float32((width - w) * across)), int(_as_float32((height - h) * down))
    return (left, top, left + w, top + h) if w else None


def _iou(box: Sequence[float], crop: Sequence[int], rounded: Callable[[float], float]) -> float:
    """The intersection of a box and a crop (left, top, right, bottom), divided by their union."""
    wide = max(rounded(min(box[2], crop[2]) - max(box[0], crop[0])), 0)
    high = max(rounded(min(box[3], crop[3]) - max(box[1], crop[1])), 0)
    area = rounded(rounded(box[2] - box[0]) * rounded(box[3] - box[1]))
    common = rounded(wide * high)
    union = rounded(rounded(area + rounded((crop[2] - crop[0]) * (crop[3] - crop[1]))) - common)
    return _as_float32(_as_float32(common) / _as_float32(union))
