"""Brightness, contrast, saturation, hue, gray images and the order of channels."""

from __future__ import annotations

from typing import Any

import torch
from torchvision.transforms import _functional_pil as F_pil
from torchvision.transforms.v2 import functional as F_v2

from torch_sink.image.core.arguments import is_computed_in_float32, is_number, leaves_range, permutation_of
from torch_sink.image.core.lowering import FAMILIES, LoweredImage, by_formula, float_bits
from torch_sink.image.core.ops import BLENDED, EXACT_BYTES, NUMERIC, Op, Operation, ViewOp, always, both
from torch_sink.image.core.recording import Recording
from torch_sink.image.operations.functionals import adjusted, functional, stock_of
from torch_sink.triton_kernels.rows import Formula, Kind

# --- brightness


def _brightness(family: str, image: Recording, brightness_factor: Any) -> Any:
    if family == "v2" and image.dtype == torch.uint8 and type(brightness_factor) is int:
        return NotImplemented  # stock code multiplies by it modulo 256
    return adjusted(f"{family}.adjust_brightness", image, brightness_factor)


functional(
    "adjust_brightness",
    _brightness,
    lambda lowered, factor: lowered.add(Kind.BRIGHTNESS, factor=factor),
    clamps=always,
    loses_info=always,
)

# --- contrast


def _contrast(family: str, image: Recording, contrast_factor: Any) -> Any:
    if leaves_range(image):
        return NotImplemented  # the kernel adds gray values up as whole numbers
    return adjusted(f"{family}.adjust_contrast", image, contrast_factor)


def _lower_contrast(lowered: LoweredImage, factor: float, formula: Formula) -> None:
    """CONTRAST: (bits of 255, bits of 1 - factor, channels) and the factor.
    BLEND_MEAN, of floats: (bits of 1 - factor, -, channels) and the factor."""
    rest = float_bits(1.0 - factor)
    if lowered.is_float:
        lowered.add(Kind.BLEND_MEAN, *rest, 0, lowered.channels, factor=factor, formula=formula)
    else:
        lowered.add(Kind.CONTRAST, *float_bits(255.0), *rest, lowered.channels, factor=factor, formula=formula)


functional(
    "adjust_contrast",
    _contrast,
    by_formula("adjust_contrast", _lower_contrast, FAMILIES),
    promise=BLENDED,
    clamps=always,
    loses_info=always,
)

# --- saturation


def _saturation(family: str, image: Recording, saturation_factor: Any) -> Any:
    made = adjusted(f"{family}.adjust_saturation", image, saturation_factor)
    if made is NotImplemented or image.shape[0] == 3:
        return made
    return image.copied() if family == "pil" else image


def _lower_saturation(lowered: LoweredImage, factor: float, formula: Formula) -> None:
    """SATURATION: (bits of 1 - factor,) and the factor."""
    if lowered.channels == 3:
        lowered.add(Kind.SATURATION, *float_bits(1.0 - factor), factor=factor, formula=formula)


functional(
    "adjust_saturation",
    _saturation,
    by_formula("adjust_saturation", _lower_saturation, FAMILIES),
    promise=BLENDED,
    clamps=always,
)

# --- hue


def _hue(family: str, image: Recording, hue_factor: Any) -> Any:
    if image.dtype not in NUMERIC or not is_number(hue_factor) or not -0.5 <= hue_factor <= 0.5:
        return NotImplemented
    if image.shape[0] == 1:
        return NotImplemented if family == "pil" else image
    if leaves_range(image, also_by_overshoot=True):
        return NotImplemented  # stock code makes NaN of some values below 0
    return image.record(Op(f"{family}.adjust_hue", (hue_factor,)))


def _lower_hue_of_image(lowered: LoweredImage, factor: float) -> None:
    """HUE: (the shift of the 8-bit hue, modulo 256,)."""
    lowered.add(Kind.HUE, int(factor * 255) & 255)


def _lower_hue(lowered: LoweredImage, factor: float, formula: Formula) -> None:
    """HUE: the part of a turn as the factor."""
    if lowered.channels == 3:
        lowered.add(Kind.HUE, factor=factor, formula=formula)


functional(
    "adjust_hue",
    _hue,
    {"pil.adjust_hue": _lower_hue_of_image, **by_formula("adjust_hue", _lower_hue)},
    promise=BLENDED,
    changes_layout=always,
    loses_info=always,
)

# --- gray images


def _gray(family: str, image: Recording, num_output_channels: Any = 1) -> Any:
    channels, height, width = image.shape
    if type(num_output_channels) is not int or num_output_channels not in (1, 3):
        return NotImplemented
    if image.dtype not in NUMERIC or not is_computed_in_float32(family, image):
        return NotImplemented
    # The kernel of v1 leaves an image of one channel as it is.
    made = channels if (family, channels) == ("v1", 1) else num_output_channels
    return image.record(Op(f"{family}.rgb_to_grayscale", (num_output_channels,)), (made, height, width))


def _gray_of_image(image: Recording, num_output_channels: Any) -> Any:
    if num_output_channels not in (1, 3):
        return NotImplemented
    mode = "L" if num_output_channels == 1 else "RGB"
    return _in_mode(image, mode, Op("pil.to_grayscale", (num_output_channels,)))


def _convert(image: Recording, mode: Any = None) -> Any:
    if mode == image.mode or (mode is None and image.mode != "P"):
        return image.copied()
    if mode not in ("L", "RGB") or image.mode == "P":
        return NotImplemented
    return _in_mode(image, mode, Op("pil.convert", (mode,)))


def _in_mode(image: Recording, mode: str, op: Op) -> Recording:
    channels = 3 if mode == "RGB" else 1
    return image.record(op, (channels, *image.shape[1:]), mode=mode)  # type: ignore[no-any-return]


def _lower_gray(lowered: LoweredImage, channels: int, formula: Formula = Formula.PILLOW) -> None:
    if lowered.channels == 3:
        lowered.add(Kind.GRAY, formula=formula)
    elif formula == Formula.TENSOR_V1:
        return
    lowered.channels = channels


def _lower_convert(lowered: LoweredImage, mode: str) -> None:
    if mode == "RGB":
        _lower_to_rgb(lowered)
    else:
        _lower_gray(lowered, 1)


Operation(
    "gray",
    stock={
        "pil.to_grayscale": F_pil.to_grayscale,
        "pil.convert": lambda image, mode: image.convert(mode),
        **stock_of("rgb_to_grayscale"),
    },
    record={**both("rgb_to_grayscale", _gray), "pil.to_grayscale": _gray_of_image, "Image.convert": _convert},
    lower={
        "pil.to_grayscale": _lower_gray,
        "pil.convert": _lower_convert,
        **by_formula("rgb_to_grayscale", _lower_gray),
    },
    promise=EXACT_BYTES,
    changes_layout=lambda op: op.args == (3,),  # the three channels share memory
    loses_info=lambda op: op.name == "pil.to_grayscale" and op.args == (3,),
)

# --- gray images with three channels


def _spread(image: Recording, name: str) -> Any:
    """Records a call that makes three equal channels of one."""
    channels, height, width = image.shape
    if channels != 1 or image.dtype not in NUMERIC:
        return NotImplemented
    return image.record((ViewOp if name == "expand" else Op)(name), (3, height, width))


def _lower_to_rgb(lowered: LoweredImage) -> None:
    lowered.channels = 3


Operation(
    "gray to RGB",
    stock=stock_of("grayscale_to_rgb"),
    record={
        "v2.grayscale_to_rgb": lambda family, image: (
            image if image.shape[0] == 3 else _spread(image, "v2.grayscale_to_rgb")
        ),
    },
    lower=_lower_to_rgb,
)


def _repeat(image: Recording, channels: Any, down: Any = None, across: Any = None) -> Any:
    sizes = tuple(channels) if isinstance(channels, (list, tuple)) else (channels, down, across)
    return _spread(image, "repeat") if sizes == (3, 1, 1) else NotImplemented


def _expand(image: Recording, channels: Any, height: Any = None, width: Any = None) -> Any:
    sizes = tuple(channels) if isinstance(channels, (list, tuple)) else (channels, height, width)
    kept = zip(sizes[1:], image.shape[1:], strict=False)
    fits = len(sizes) == 3 and sizes[0] == 3 and all(size in (-1, side) for size, side in kept)
    return _spread(image, "expand") if fits else NotImplemented


Operation(
    "three equal channels",
    stock={"repeat": lambda image: image.repeat(3, 1, 1), "expand": lambda image: image.expand(3, -1, -1)},
    record={torch.Tensor.repeat: _repeat, torch.Tensor.expand: _expand},
    lower=_lower_to_rgb,
    changes_layout=lambda op: op.name == "expand",
)

# --- the order of channels


def permute_channels(family: str, image: Recording, permutation: Any) -> Any:
    order = permutation_of(permutation, image.shape[0])
    if order is None or image.dtype not in NUMERIC:
        return NotImplemented
    return image.record(Op("v2.permute_channels", (order,)))


def _lower_permute(lowered: LoweredImage, permutation: tuple[int, ...]) -> None:
    """PERMUTE: for each channel of the output the channel of the input."""
    if lowered.channels == 3:
        lowered.add(Kind.PERMUTE, *permutation)


Operation(
    "channels",
    stock={"v2.permute_channels": lambda image, order: F_v2.permute_channels_image(image, list(order))},
    record={"v2.permute_channels": permute_channels},
    lower=_lower_permute,
)
