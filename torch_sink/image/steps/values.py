"""Conversions, normalization, colors, blur and deformations."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torchvision.transforms import InterpolationMode as Mode
from torchvision.transforms import functional as F
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from torch_sink.image.core.ops import Op, recorder
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.handles.tensor import LazyTensor, LazyTVImage
from torch_sink.image.operations.functionals import through_tensor
from torch_sink.image.steps.draft import Draft, draft_of
from torch_sink.image.steps.draws import as_drawn, chance, exponential, is_probability, log_ratio, real, whole
from torch_sink.image.steps.moves import fill_of_warp, sized, warped
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


_convert, _convert_v2 = recorder("v1.convert_image_dtype"), recorder("v2.to_dtype")


@step(v1.ConvertImageDtype, calls="convert_image_dtype to_tensor")
def _converted_v1(transform: Any, draft: Draft) -> Any:
    return _convert(draft, transform.dtype) if draft.kind is LazyTensor else NotImplemented


@step(v2.ConvertImageDtype, calls="to_dtype convert_image_dtype", takes_samples=True)
def _converted_v2(transform: Any, draft: Draft) -> Any:
    draft.moves = {}
    return NotImplemented if draft.kind is LazyImage else _convert_v2(draft, transform.dtype, True)


@step(v2.ToDtype, calls="to_dtype convert_image_dtype", takes_samples=True)
def _typed(transform: Any, draft: Draft) -> Any:
    if not isinstance(transform.dtype, torch.dtype) or draft.kind is LazyImage:
        return NotImplemented
    return _convert_v2(draft, transform.dtype, transform.scale)


_normalize = Functional("normalize", {}, v1="normalize", v2="normalize")


@functools.lru_cache(maxsize=256, typed=True)
def _normalization(family: str, channels: int, count: int, *values: Any) -> Op | None:
    """The call for `count` means and the deviations behind them; None where more than one call is recorded."""
    draft = Draft(None, (), (channels, 1, 1), LazyTensor, torch.float32)
    made = _normalize.on_tensors[family](draft, values[:count], values[count:])
    return None if made is NotImplemented or len(made.ops) > 1 or 0 in values else made.ops[0]


@step(v1.Normalize, v2.Normalize, calls="normalize to_tensor to_dtype", takes_samples=True)
def _normalized(normalize: Any, draft: Draft) -> Any:
    mean, std = normalize.mean, normalize.std
    are_plain = type(mean) in (tuple, list) and type(std) in (tuple, list) and not normalize.inplace
    if are_plain and draft.lazy_dtype is torch.float32 and draft.kind is _OWN_TENSORS[family_of(normalize)]:
        try:
            op = _normalization(family_of(normalize), draft.lazy_shape[0], len(mean), *mean, *std)
        except TypeError:  # lists have no hash
            op = None
        if op is not None:
            return Draft(draft.origin, (*draft.ops, op), draft.lazy_shape, draft.kind, draft.lazy_dtype)
    return _normalize.record(family_of(normalize), draft, normalize.mean, normalize.std, normalize.inplace)


# --- colors

_adjust = [
    Functional(f"adjust_{name}", recorder(f"pil.adjust_{name}"), v1=f"adjust_{name}", v2=f"adjust_{name}")
    for name in ("brightness", "contrast", "saturation", "hue")
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


# --- blur and deformations


def _by_family(name: str, **kernels: Any) -> Functional:
    images = {each: through_tensor(recorder(f"{each}.{kernels[each]}")) for each in kernels}
    return Functional(name, images, **kernels)


_CALLED_THERE = "to_pil_image pil_to_tensor gaussian_blur elastic_transform"
_blur = _by_family("gaussian_blur", v1="gaussian_blur", v2="gaussian_blur")
_elastic = _by_family("elastic_transform", v1="elastic_transform", v2="elastic")


@step(v1.GaussianBlur, v2.GaussianBlur, calls=_CALLED_THERE, takes_samples=True)
def _blurred(blur: Any, draft: Draft) -> Any:
    sigma = real(*blur.sigma)
    return _blur(family_of(blur), draft, blur.kernel_size, [sigma, sigma])


def _perspective_image(draft: Draft, start: Any, end: Any, interpolation: Any, fill: Any, values: Any = None) -> Any:
    values = values or F._get_perspective_coeffs(start, end)
    return warped(draft, Image.Transform.PERSPECTIVE, values, fill, interpolation)


_perspective = Functional("perspective", _perspective_image, v2="perspective")


@step(v1.RandomPerspective, v2.RandomPerspective, calls="perspective get_dimensions get_size", takes_samples=True)
def _seen_from_aside(perspective: Any, draft: Draft) -> Any:
    if (fill := fill_of_warp(perspective, draft)) is NotImplemented or not is_probability(perspective.p):
        return NotImplemented
    if chance() >= as_drawn(perspective.p):
        return draft
    mode = perspective.interpolation
    if family_of(perspective) == "v1":
        points = perspective.get_params(*draft.size, perspective.distortion_scale)
        return _perspective("v1", draft, *points, mode, fill)
    draft.moves = perspective.make_params([sized(draft)])
    return _perspective("v2", draft, None, None, mode, fill, draft.moves["coefficients"])


@step(v1.ElasticTransform, v2.ElasticTransform, calls=_CALLED_THERE, takes_samples=True)
def _deformed(elastic: Any, draft: Draft) -> Any:
    mode = elastic.interpolation
    if mode not in (Mode.NEAREST, Mode.BILINEAR, "nearest", "bilinear"):
        return NotImplemented
    family, fill = family_of(elastic), fill_of_warp(elastic, draft)
    if fill is NotImplemented or (family == "v1" and type(mode) is not Mode):
        return NotImplemented
    if family == "v2":
        draft.moves = elastic.make_params([sized(draft)])
        return _elastic("v2", draft, draft.moves["displacement"], mode, fill)
    field = elastic.get_params(elastic.alpha, elastic.sigma, list(draft.lazy_shape[1:]))
    made = _elastic.record("v1", draft, field, mode.value, fill)
    return draft_of(F.elastic_transform(draft.handle(), field, mode, fill)) if made is NotImplemented else made


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
