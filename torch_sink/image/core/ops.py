"""Recorded operations: a name and the parameters of one call of stock code.

`STOCK` maps each name to the call itself, on a Pillow image ("pil."), or on a tensor with the kernels of
`transforms` ("v1.") or of `transforms.v2` ("v2."). Replaying the recorded calls in order is the definition of what a
handle stands for; the kernels have to give the same values.

The stock functions are bound when this module is imported, which `reroute.install` does before it replaces any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageFilter
from torchvision.transforms import InterpolationMode
from torchvision.transforms import _functional_pil as F_pil
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms import functional as F
from torchvision.transforms.v2 import functional as F_v2


class Op(NamedTuple):
    """One recorded call.

    Attributes:
        name: a key of `STOCK`.
        args: everything but the image, hashable.
    """

    name: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.args))})"


class InPlaceOp(Op):
    """One whose stock code writes its result to the tensor that it is called on, which so keeps its strides."""

    __slots__ = ()


_DTYPE_CONVERSIONS = ("v1.convert_image_dtype", "v2.to_dtype")


# Types of tensors that hold what float32 cannot.
WIDE_TYPES = (torch.float64, torch.int16, torch.int32, torch.int64)


def makes_floats(op: Op) -> bool:
    """True for a call whose result is a tensor of another type than uint8, whatever it is called on."""
    return op.name == "to_tensor" or (op.name in _DTYPE_CONVERSIONS and op.args[0] != torch.uint8)


def makes_bytes(op: Op) -> bool:
    """True for a call whose result is a uint8 tensor or a Pillow image, whatever it is called on."""
    return op.name == "to_pil_image" or (op.name in _DTYPE_CONVERSIONS and op.args[0] == torch.uint8)


STOCK: dict[str, Callable[..., Any]] = {}


def _stock(name: str, function: Callable[..., Any]) -> None:
    if name in STOCK:
        raise ValueError(f"operation {name!r} is registered twice")
    STOCK[name] = function


def replay(image: Any, ops: Sequence[Op], in_place: bool = False) -> Any:
    """Runs recorded calls in stock code.

    Args:
        image: a plain Pillow image or tensor; never written to.
        ops: calls, in order.
        in_place: an `InPlaceOp` does so here too, on what an earlier call made; the values are the same.
    """
    for op in ops:
        made = STOCK[op.name](image, *op.args)
        image = image.copy_(made) if in_place and type(op) is InPlaceOp else made
    return image


# Pillow images
_stock("pil.convert", lambda image, mode: image.convert(mode))
_stock("pil.crop", lambda image, box: image.crop(box))
_stock("pil.resize", lambda image, size, resample: image.resize(size, resample))
_stock("pil.transpose", lambda image, method: image.transpose(method))
_stock(
    "pil.transform",
    lambda image, size, method, data, resample, fill: image.transform(
        size, Image.Transform(method), data, resample, fillcolor=fill
    ),
)
_stock("pil.point", lambda image, table: image.point(list(table)))
_stock("pil.gaussian_blur", lambda image, radii: image.filter(ImageFilter.GaussianBlur(radii)))
_stock("pil.box_blur", lambda image, radii: image.filter(ImageFilter.BoxBlur(radii)))
_stock("pil.pad", F_pil.pad)
for _name in (
    "adjust_brightness",
    "adjust_contrast",
    "adjust_saturation",
    "adjust_hue",
    "adjust_sharpness",
    "adjust_gamma",
    "to_grayscale",
    "invert",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
):
    _stock(f"pil.{_name}", getattr(F_pil, _name))

# From Pillow image to tensor and back
_stock("to_tensor", F.to_tensor)
_stock("pil_to_tensor", F.pil_to_tensor)
_stock("to_image", F_v2.to_image)
_stock("to_pil_image", F.to_pil_image)
_stock("to_pil_bytes", lambda image: F.pil_to_tensor(F.to_pil_image(image)))
_stock("contiguous", torch.Tensor.contiguous)

# Whole batches


def _mix_up(batch: torch.Tensor, lam: float) -> torch.Tensor:
    """`v2.MixUp`: each image with the one before it, in the proportion lam : 1 - lam."""
    return batch.roll(1, 0).mul_(1.0 - lam).add_(batch.mul(lam))


def _cut_mix(batch: torch.Tensor, box: tuple[int, int, int, int]) -> torch.Tensor:
    """`v2.CutMix`: a box (left, top, right, bottom) of each image comes from the one before it."""
    left, top, right, bottom = box
    mixed = batch.clone()
    mixed[..., top:bottom, left:right] = batch.roll(1, 0)[..., top:bottom, left:right]
    return mixed


_stock("batch.mix_up", _mix_up)
_stock("batch.cut_mix", _cut_mix)

# AugMix


def _augmix(image: torch.Tensor, terms: tuple[tuple[float, tuple[Op, ...]], ...], dtype: torch.dtype) -> torch.Tensor:
    """The sum of weights times results of chains, in float32 and in this order; the first chain is empty."""
    batch = image.reshape(1, *image.shape)
    weights = torch.tensor([weight for weight, _ in terms], dtype=torch.float32, device="cpu").view(-1, 1, 1, 1, 1)
    mix = weights[0] * batch
    for weight, (_, chain) in zip(weights[1:], terms[1:], strict=True):
        mix.add_(weight * replay(batch, chain))
    return mix.reshape(image.shape).to(dtype)


_stock("augmix", _augmix)

# Tensors of float32 times a constant
_stock("mul", lambda image, factor: image * factor)

# Tensors, kernels of transforms; `pixels` and `field` are tensors wrapped in a `TensorArgument`
_stock("v1.normalize", F_tensor.normalize)
_stock("v1.convert_image_dtype", F_tensor.convert_image_dtype)
_stock("v1.hflip", F_tensor.hflip)
_stock("v1.vflip", F_tensor.vflip)
_stock("v1.crop", F_tensor.crop)
_stock("v1.pad", F_tensor.pad)
_stock("v1.resize", lambda image, size, mode, antialias: F_tensor.resize(image, list(size), mode.value, antialias))
_stock("v1.erase_pixels", lambda image, i, j, h, w, pixels: F_tensor.erase(image, i, j, h, w, pixels.tensor))
_stock("v1.erase", lambda image, i, j, h, w, value: F_tensor.erase(image, i, j, h, w, _erased(image, value)))

# Tensors, kernels of transforms.v2
_stock("v2.normalize", F_v2.normalize_image)
_stock("v2.to_dtype", F_v2.to_dtype_image)
_stock("v2.horizontal_flip", F_v2.horizontal_flip_image)
_stock("v2.vertical_flip", F_v2.vertical_flip_image)
_stock("v2.crop", F_v2.crop_image)
_stock("v2.pad", F_v2.pad_image)
_stock(
    "v2.resize", lambda image, size, mode, antialias: F_v2.resize_image(image, list(size), mode, antialias=antialias)
)
_stock("v2.erase_pixels", lambda image, i, j, h, w, pixels: F_v2.erase_image(image, i, j, h, w, pixels.tensor))
_stock("v2.erase", lambda image, i, j, h, w, value: F_v2.erase_image(image, i, j, h, w, _erased(image, value)))

for _name in (
    "adjust_brightness",
    "adjust_contrast",
    "adjust_saturation",
    "adjust_hue",
    "adjust_sharpness",
    "adjust_gamma",
    "rgb_to_grayscale",
    "invert",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
):
    _stock(f"v1.{_name}", getattr(F_tensor, _name))
    _stock(f"v2.{_name}", getattr(F_v2, f"{_name}_image"))

_stock("v1.gaussian_blur", F_tensor.gaussian_blur)
_stock("v2.gaussian_blur", F_v2.gaussian_blur_image)
_stock("v2.grayscale_to_rgb", F_v2.grayscale_to_rgb_image)
_stock("v2.permute_channels", lambda image, permutation: F_v2.permute_channels_image(image, list(permutation)))

# Tensors of float32, where the calls on uint8 tensors have other names
_stock("v1.float_contrast", F_tensor.adjust_contrast)
_stock("v2.float_contrast", F_v2.adjust_contrast_image)
_stock("v1.crop_beyond", F_tensor.crop)
_stock("v2.crop_beyond", F_v2.crop_image)
_stock(
    "v1.float_resize",
    lambda image, size, mode, antialias: F_tensor.resize(image, list(size), mode.value, antialias),
)
_stock(
    "v2.float_resize",
    lambda image, size, mode, antialias: F_v2.resize_image(image, list(size), mode, antialias=antialias),
)

# Warps of tensors
_stock("v1.affine", lambda image, matrix, mode, fill: F_tensor.affine(image, list(matrix), mode, fill))
_stock(
    "v1.rotate_expanded",
    lambda image, matrix, size, mode, fill: F_tensor.rotate(image, list(matrix), mode, True, fill),
)
_stock("v1.perspective", lambda image, values, mode, fill: F_tensor.perspective(image, list(values), mode, fill))
_stock(
    "v1.elastic_transform",
    lambda image, field, mode, fill: F_tensor.elastic_transform(image, field.tensor, mode, fill),
)
_stock(
    "v2.affine",
    lambda image, angle, translate, scale, shear, center, mode, fill: F_v2.affine_image(
        image, angle, translate, scale, shear, InterpolationMode(mode), fill, center
    ),
)
_stock(
    "v2.rotate",
    lambda image, angle, expand, center, size, mode, fill: F_v2.rotate_image(
        image, angle, InterpolationMode(mode), expand, center, fill
    ),
)
_stock("v2.quarter_turns", lambda image, turns: image.rot90(turns, (-2, -1)) if turns else image.clone())
_stock(
    "v2.perspective",
    lambda image, values, mode, fill: F_v2.perspective_image(
        image, None, None, InterpolationMode(mode), fill, list(values)
    ),
)
_stock(
    "v2.elastic",
    lambda image, field, mode, fill: F_v2.elastic_image(image, field.tensor, InterpolationMode(mode), fill),
)


def _erased(image: torch.Tensor, value: tuple[float, ...]) -> torch.Tensor:
    """The value of each channel as `erase` takes it, [C, 1, 1] or [1, 1, 1]."""
    return torch.tensor(value, dtype=torch.float32, device="cpu").view(-1, 1, 1)
