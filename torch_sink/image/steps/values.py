"""Conversions, normalization and colors."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from torch_sink.image.core.ops import Op, recorder
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.handles.tensor import LazyTensor, LazyTVImage
from torch_sink.image.steps.draft import Draft
from torch_sink.image.steps.draws import as_drawn, chance, exponential, is_probability, log_ratio, real, whole
from torch_sink.image.steps.registry import Functional, family_of, step

# --- conversions

_TO_TENSOR, _PIL_TO_TENSOR, _TO_IMAGE = Op("to_tensor"), Op("pil_to_tensor"), Op("to_image")


@step(v1.ToTensor, v2.ToTensor, calls="to_tensor pil_to_tensor to_image", takes_samples=True)
def _to_tensor(transform: Any, draft: Draft) -> Any:
    return draft.as_tensor(_TO_TENSOR, torch.float32) if draft.kind is LazyImage else NotImplemented


@step(v1.PILToTensor, v2.PILToTensor, calls="to_tensor pil_to_tensor to_image", takes_samples=True)
def _pil_to_tensor(transform: Any, draft: Draft) -> Any:
    return draft.as_tensor(_PIL_TO_TENSOR, torch.uint8) if draft.kind is LazyImage else NotImplemented


@step(v2.ToImage, calls="pil_to_tensor to_image", takes_samples=True)
def _to_image(transform: Any, draft: Draft) -> Any:
    if draft.kind is LazyTVImage:  # which the transform passes on
        return draft
    return draft.as_tensor(_TO_IMAGE, torch.uint8, as_tv_image=True) if draft.kind is LazyImage else NotImplemented


@step(v2.ToPureTensor, calls="pil_to_tensor to_image", takes_samples=True)
def _to_pure_tensor(transform: Any, draft: Draft) -> Any:
    draft.moves = {}
    return draft.as_pure_tensor() if draft.kind is LazyTVImage else draft


_convert = recorder("v1.convert_image_dtype")
_convert_v2 = recorder("v2.to_dtype")


@step(v1.ConvertImageDtype, calls="convert_image_dtype to_tensor")
def _converted_v1(transform: Any, draft: Draft) -> Any:
    return _convert(draft, transform.dtype) if draft.kind is LazyTensor else NotImplemented


@step(v2.ConvertImageDtype, calls="to_dtype convert_image_dtype", takes_samples=True)
def _converted_v2(transform: Any, draft: Draft) -> Any:
    return NotImplemented if draft.kind is LazyImage else _convert_v2(draft, transform.dtype, True)


@step(v2.ToDtype, calls="to_dtype convert_image_dtype", takes_samples=True)
def _typed(transform: Any, draft: Draft) -> Any:
    if not isinstance(transform.dtype, torch.dtype) or draft.kind is LazyImage:
        return NotImplemented
    return _convert_v2(draft, transform.dtype, transform.scale)


_normalize = Functional("normalize", {}, v1="normalize", v2="normalize")


@step(v1.Normalize, v2.Normalize, calls="normalize to_tensor to_dtype", takes_samples=True)
def _normalized(normalize: Any, draft: Draft) -> Any:
    return _normalize.record(family_of(normalize), draft, normalize.mean, normalize.std, normalize.inplace)


# --- colors

_PROPERTIES = ("brightness", "contrast", "saturation", "hue")
_adjust = [
    Functional(f"adjust_{name}", recorder(f"pil.adjust_{name}"), v1=f"adjust_{name}", v2=f"adjust_{name}")
    for name in _PROPERTIES
]


@step(v1.ColorJitter, v2.ColorJitter, calls=" ".join(functional.name for functional in _adjust), takes_samples=True)
def _jittered(jitter: Any, draft: Draft) -> Any:
    limits = jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue
    family, image = family_of(jitter), draft
    order = torch.randperm(4).tolist()
    factors = [None if limit is None else real(limit[0], limit[1]) for limit in limits]
    for at in order:
        if factors[at] is not None:
            image = _adjust[at](family, image, factors[at])
    return image


_TONES: dict[str, tuple[Functional, Sequence[str]]] = {
    f"Random{name}": (Functional(functional, recorder(f"pil.{functional}"), v1=functional, v2=functional), fields)
    for name, functional, *fields in (
        ("AdjustSharpness", "adjust_sharpness", "sharpness_factor"), ("Autocontrast", "autocontrast"),
        ("Equalize", "equalize"), ("Invert", "invert"), ("Posterize", "posterize", "bits"),
        ("Solarize", "solarize", "threshold"),
    )
}  # fmt: skip


_KINDS = [getattr(module, name) for module in (v1, v2) for name in _TONES]


@step(*_KINDS, calls="adjust_sharpness autocontrast equalize invert posterize solarize", takes_samples=True)
def _toned_at_random(transform: Any, draft: Draft) -> Any:
    functional, fields = _TONES[type(transform).__name__]
    made = functional.record(family_of(transform), draft, *(getattr(transform, field) for field in fields))
    if made is NotImplemented or not is_probability(transform.p):
        return NotImplemented
    return made if chance() < as_drawn(transform.p) else draft


def _blur_image(family: str, draft: Draft, *args: Any) -> Any:
    made = _blur.on_tensors[family](draft.as_tensor(_PIL_TO_TENSOR, torch.uint8), *args)
    return made if made is NotImplemented else made.as_image()


_blur_images = {family: functools.partial(_blur_image, family) for family in ("v1", "v2")}
_blur = Functional("gaussian_blur", _blur_images, v1="gaussian_blur", v2="gaussian_blur")


@step(v1.GaussianBlur, v2.GaussianBlur, calls="gaussian_blur to_pil_image pil_to_tensor", takes_samples=True)
def _blurred(blur: Any, draft: Draft) -> Any:
    sigma = real(*blur.sigma)
    return _blur(family_of(blur), draft, blur.kernel_size, [sigma, sigma])


_erase = Functional("erase", {}, v1="erase", v2="erase")


@step(v1.RandomErasing, v2.RandomErasing, calls="erase to_tensor")
def _erased(erasing: Any, draft: Draft) -> Any:
    family, value, (channels, height, width) = family_of(erasing), erasing.value, draft.lazy_shape
    value = [value] if type(value) in (int, float) else None if value == "random" else value
    is_known = value is None or (type(value) in (list, tuple) and len(value) in (1, channels))
    if draft.kind is not _OWN_TENSORS[family] or not is_known or not is_probability(erasing.p):
        return NotImplemented
    if chance() >= as_drawn(erasing.p):
        return draft
    logs = erasing._log_ratio.tolist() if family == "v2" else log_ratio(tuple(erasing.ratio))
    for _ in range(10):
        area, ratio = height * width * real(*erasing.scale), exponential(*logs)
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if h < height and w < width:
            written = torch.empty((channels, h, w)).normal_() if value is None else _written(*map(float, value))
            return _erase(family, draft, whole(height - h + 1), whole(width - w + 1), h, w, written, erasing.inplace)
    return draft if family == "v2" else _erase(family, draft, 0, 0, height, width, draft, erasing.inplace)


_OWN_TENSORS = {"v1": LazyTensor, "v2": LazyTVImage}


@functools.lru_cache(maxsize=64)
def _written(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None, None]


_to_gray = recorder("pil.to_grayscale")


@step(v1.Grayscale, v2.Grayscale, calls="rgb_to_grayscale to_grayscale", takes_samples=True)
def _gray(transform: Any, draft: Draft) -> Any:
    return _to_gray(draft, transform.num_output_channels) if draft.kind is LazyImage else NotImplemented


@step(v1.RandomGrayscale, v2.RandomGrayscale, calls="rgb_to_grayscale to_grayscale", takes_samples=True)
def _gray_at_random(transform: Any, draft: Draft) -> Any:
    if draft.kind is not LazyImage or not is_probability(transform.p):
        return NotImplemented
    return _to_gray(draft, draft.lazy_shape[0]) if chance() < as_drawn(transform.p) else draft
