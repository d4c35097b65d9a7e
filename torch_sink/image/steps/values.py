"""Conversions, normalization and colors."""

from __future__ import annotations

from typing import Any

import torch
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from torch_sink.image.core.ops import Op
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.handles.tensor import LazyTensor, LazyTVImage
from torch_sink.image.steps.draft import Draft
from torch_sink.image.steps.draws import as_drawn, chance, is_probability, real
from torch_sink.image.steps.registry import Functional, family_of, recorder, step

# --- conversions

_TO_TENSOR, _PIL_TO_TENSOR, _TO_IMAGE = Op("to_tensor"), Op("pil_to_tensor"), Op("to_image")


@step(v1.ToTensor, v2.ToTensor, calls="to_tensor pil_to_tensor to_image")
def _to_tensor(transform: Any, draft: Draft) -> Any:
    return draft.as_tensor(_TO_TENSOR, torch.float32) if draft.kind is LazyImage else NotImplemented


@step(v1.PILToTensor, v2.PILToTensor, calls="to_tensor pil_to_tensor to_image")
def _pil_to_tensor(transform: Any, draft: Draft) -> Any:
    return draft.as_tensor(_PIL_TO_TENSOR, torch.uint8) if draft.kind is LazyImage else NotImplemented


@step(v2.ToImage, calls="pil_to_tensor to_image")
def _to_image(transform: Any, draft: Draft) -> Any:
    return draft.as_tensor(_TO_IMAGE, torch.uint8, as_tv_image=True) if draft.kind is LazyImage else NotImplemented


@step(v2.ToPureTensor, calls="pil_to_tensor to_image")
def _to_pure_tensor(transform: Any, draft: Draft) -> Any:
    return draft.as_pure_tensor() if draft.kind is LazyTVImage else draft


_convert = recorder("v1.convert_image_dtype")
_convert_v2 = recorder("v2.to_dtype")


@step(v1.ConvertImageDtype, calls="convert_image_dtype to_tensor")
def _converted_v1(transform: Any, draft: Draft) -> Any:
    return _convert(draft, transform.dtype) if draft.kind is LazyTensor else NotImplemented


@step(v2.ConvertImageDtype, calls="to_dtype convert_image_dtype")
def _converted_v2(transform: Any, draft: Draft) -> Any:
    return NotImplemented if draft.kind is LazyImage else _convert_v2(draft, transform.dtype, True)


@step(v2.ToDtype, calls="to_dtype convert_image_dtype")
def _typed(transform: Any, draft: Draft) -> Any:
    if not isinstance(transform.dtype, torch.dtype) or draft.kind is LazyImage:
        return NotImplemented
    return _convert_v2(draft, transform.dtype, transform.scale)


_normalize = Functional("normalize", {}, v1="normalize", v2="normalize")


@step(v1.Normalize, v2.Normalize, calls="normalize to_tensor to_dtype")
def _normalized(normalize: Any, draft: Draft) -> Any:
    return _normalize.record(family_of(normalize), draft, normalize.mean, normalize.std, normalize.inplace)


# --- colors

_PROPERTIES = ("brightness", "contrast", "saturation", "hue")
_adjust = [
    Functional(f"adjust_{name}", recorder(f"pil.adjust_{name}"), v1=f"adjust_{name}", v2=f"adjust_{name}")
    for name in _PROPERTIES
]


@step(v1.ColorJitter, v2.ColorJitter, calls="adjust_brightness adjust_contrast adjust_saturation adjust_hue")
def _jittered(jitter: Any, draft: Draft) -> Any:
    limits = jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue
    family, image = family_of(jitter), draft
    order = torch.randperm(4).tolist()
    factors = [None if limit is None else real(limit[0], limit[1]) for limit in limits]
    for at in order:
        if factors[at] is not None:
            image = _adjust[at](family, image, factors[at])
    return image


_to_gray = recorder("pil.to_grayscale")


@step(v1.Grayscale, v2.Grayscale, calls="rgb_to_grayscale to_grayscale")
def _gray(transform: Any, draft: Draft) -> Any:
    return _to_gray(draft, transform.num_output_channels) if draft.kind is LazyImage else NotImplemented


@step(v1.RandomGrayscale, v2.RandomGrayscale, calls="rgb_to_grayscale to_grayscale")
def _gray_at_random(transform: Any, draft: Draft) -> Any:
    if draft.kind is not LazyImage or not is_probability(transform.p):
        return NotImplemented
    return _to_gray(draft, draft.lazy_shape[0]) if chance() < as_drawn(transform.p) else draft
