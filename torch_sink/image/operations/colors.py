"""Brightness, contrast, saturation, hue, gray images and the order of channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchvision.transforms import _functional_pil as F_pil
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms.v2 import functional as F_v2

from torch_sink.image.core.arguments import is_factor, is_number, permutation_of, with_numbers
from torch_sink.image.core.exactness import is_normalized, may_overshoot
from torch_sink.image.core.ops import BLENDED, EXACT_BYTES, NUMERIC, Op, Operation, both
from torch_sink.image.operations.examples import Arguments, Example, of_method, sample


def _one_factor(functional: str) -> Callable[[Arguments], Iterator[Example]]:
    return lambda a: iter([Example(functional, (a.factor(),))])


# --- brightness


@with_numbers
def _brightness(family: str, handle: Any, brightness_factor: Any) -> Any:
    if handle.sink_dtype not in NUMERIC or not is_factor(brightness_factor):
        return NotImplemented
    return handle.record(Op(f"{family}.adjust_brightness", (brightness_factor,)))


@with_numbers
def _brightness_of_image(image: Any, brightness_factor: Any) -> Any:
    if not is_number(brightness_factor):
        return NotImplemented
    return image.record(Op("pil.adjust_brightness", (brightness_factor,)))


Operation(
    "brightness",
    stock={
        "pil.adjust_brightness": F_pil.adjust_brightness,
        "v1.adjust_brightness": F_tensor.adjust_brightness,
        "v2.adjust_brightness": F_v2.adjust_brightness_image,
    },
    record={**both("adjust_brightness", _brightness), "pil.adjust_brightness": _brightness_of_image},
    examples=_one_factor("adjust_brightness"),
    transforms={
        "ColorJitter": [
            sample(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
            sample(brightness=0.4, label="brightness alone"),
        ],
        "RandomPhotometricDistort": [sample(p=1.0), sample(p=0.0, label="p=0")],
    },
    clamps=True,
)

# --- contrast


@with_numbers
def _contrast(family: str, handle: Any, contrast_factor: Any) -> Any:
    if handle.sink_dtype not in NUMERIC or not is_factor(contrast_factor):
        return NotImplemented
    if handle.sink_dtype == torch.uint8:
        return handle.record(Op(f"{family}.adjust_contrast", (contrast_factor,)))
    if is_normalized(handle):
        return NotImplemented  # the kernel adds gray values up as whole numbers
    return handle.record(Op(f"{family}.float_contrast", (contrast_factor,)))


@with_numbers
def _contrast_of_image(image: Any, contrast_factor: Any) -> Any:
    return image.record(Op("pil.adjust_contrast", (contrast_factor,))) if is_number(contrast_factor) else NotImplemented


Operation(
    "contrast",
    stock={
        "pil.adjust_contrast": F_pil.adjust_contrast,
        **{"v1.adjust_contrast": F_tensor.adjust_contrast, "v1.float_contrast": F_tensor.adjust_contrast},
        **{"v2.adjust_contrast": F_v2.adjust_contrast_image, "v2.float_contrast": F_v2.adjust_contrast_image},
    },
    record={**both("adjust_contrast", _contrast), "pil.adjust_contrast": _contrast_of_image},
    promise=BLENDED,
    examples=_one_factor("adjust_contrast"),
    clamps=True,
)

# --- saturation


@with_numbers
def _saturation(family: str, handle: Any, saturation_factor: Any) -> Any:
    if handle.sink_dtype not in NUMERIC or not is_factor(saturation_factor):
        return NotImplemented
    if handle.sink_shape[0] == 1:
        return handle
    return handle.record(Op(f"{family}.adjust_saturation", (saturation_factor,)))


@with_numbers
def _saturation_of_image(image: Any, saturation_factor: Any) -> Any:
    if not is_number(saturation_factor):
        return NotImplemented
    return image.copy() if image.mode == "L" else image.record(Op("pil.adjust_saturation", (saturation_factor,)))


Operation(
    "saturation",
    stock={
        "pil.adjust_saturation": F_pil.adjust_saturation,
        "v1.adjust_saturation": F_tensor.adjust_saturation,
        "v2.adjust_saturation": F_v2.adjust_saturation_image,
    },
    record={**both("adjust_saturation", _saturation), "pil.adjust_saturation": _saturation_of_image},
    promise=BLENDED,
    examples=_one_factor("adjust_saturation"),
    clamps=True,
    keeps_info=lambda op: True,
)

# --- hue


def _hue(family: str, handle: Any, hue_factor: Any) -> Any:
    if handle.sink_dtype not in NUMERIC or not is_number(hue_factor) or not -0.5 <= hue_factor <= 0.5:
        return NotImplemented
    if handle.sink_shape[0] == 1:
        return handle
    if handle.sink_dtype == torch.float32 and (is_normalized(handle) or may_overshoot(handle)):
        return NotImplemented  # stock code makes NaN of some values below 0
    return handle.record(Op(f"{family}.adjust_hue", (hue_factor,)))


def _hue_of_image(image: Any, hue_factor: Any) -> Any:
    if image.mode != "RGB" or not is_number(hue_factor) or not -0.5 <= hue_factor <= 0.5:
        return NotImplemented
    return image.record(Op("pil.adjust_hue", (hue_factor,)))


Operation(
    "hue",
    stock={
        "pil.adjust_hue": F_pil.adjust_hue,
        "v1.adjust_hue": F_tensor.adjust_hue,
        "v2.adjust_hue": F_v2.adjust_hue_image,
    },
    record={**both("adjust_hue", _hue), "pil.adjust_hue": _hue_of_image},
    promise=BLENDED,
    examples=lambda a: iter([Example("adjust_hue", (a.chance.uniform(-0.5, 0.5),))]),
)

# --- gray images


def _gray(family: str, handle: Any, num_output_channels: Any = 1) -> Any:
    channels, height, width = handle.sink_shape
    if handle.sink_dtype not in NUMERIC or type(num_output_channels) is not int or num_output_channels not in (1, 3):
        return NotImplemented
    # The kernel of v1 leaves an image of one channel as it is.
    made = channels if (family, channels) == ("v1", 1) else num_output_channels
    return handle.record(Op(f"{family}.rgb_to_grayscale", (num_output_channels,)), shape=(made, height, width))


def _gray_of_image(image: Any, num_output_channels: Any) -> Any:
    if num_output_channels not in (1, 3):
        return NotImplemented
    mode = "L" if num_output_channels == 1 else "RGB"
    return image.record(Op("pil.to_grayscale", (num_output_channels,)), mode=mode)


def _to_rgb(family: str, handle: Any) -> Any:
    channels, height, width = handle.sink_shape
    if channels == 3:
        return handle
    if handle.sink_dtype not in NUMERIC:
        return NotImplemented
    return handle.record(Op("v2.grayscale_to_rgb"), shape=(3, height, width))


def _convert(image: Any, mode: Any = None) -> Any:
    if mode == image.mode or (mode is None and image.mode != "P"):
        return image.copy()
    if mode not in ("L", "RGB"):
        return NotImplemented
    return _colored(image, mode) if image.mode == "P" else image.record(Op("pil.convert", (mode,)), mode=mode)


def _colored(image: Any, mode: str) -> Any:
    """The colors of a palette image: its numbers, looked up in a table for each channel."""
    if "transparency" in image.info:
        return NotImplemented
    numbers = image.record(Op("pil_to_tensor"))
    if mode == "RGB":
        numbers = numbers.record(Op("v2.grayscale_to_rgb"))
    colored = numbers.record(Op("to_pil_image")).record(Op("pil.point", (image.color_planes(mode),)), mode=mode)
    colored.info = dict(image.info)
    return colored


def _gray_examples(a: Arguments) -> Iterator[Example]:
    name = "to_grayscale" if a.is_pillow else "rgb_to_grayscale"
    yield Example(name, (1,))
    yield Example(name, (3,), label="3 channels")
    if a.is_pillow:
        yield Example("rgb_to_grayscale", (1,))
        yield Example("rgb_to_grayscale", (3,), label="3 channels")
    yield from of_method(a, "convert", {"L": ("L",), "RGB": ("RGB",)})
    yield from of_method(a, "getchannel", {"the last": (a.channels - 1,)})


def _rgb_examples(a: Arguments) -> Iterator[Example]:
    yield Example("grayscale_to_rgb")
    if a.is_pillow or a.functional is F_v2:
        gray = F_v2.rgb_to_grayscale
        yield Example("grayscale_to_rgb", label="gray images", run=lambda image: F_v2.grayscale_to_rgb(gray(image, 1)))


Operation(
    "gray",
    stock={
        "pil.to_grayscale": F_pil.to_grayscale,
        "pil.convert": lambda image, mode: image.convert(mode),
        "v1.rgb_to_grayscale": F_tensor.rgb_to_grayscale,
        "v2.rgb_to_grayscale": F_v2.rgb_to_grayscale_image,
    },
    record={**both("rgb_to_grayscale", _gray), "pil.to_grayscale": _gray_of_image, "Image.convert": _convert},
    promise=EXACT_BYTES,
    examples=_gray_examples,
    transforms={
        "Grayscale": [sample(), sample(3, label="3 channels")],
        "RandomGrayscale": [sample(p=1.0)],
    },
    keeps_info=lambda op: op.name == "pil.convert" or op.args == (1,),
)
Operation(
    "gray to RGB",
    stock={"v2.grayscale_to_rgb": F_v2.grayscale_to_rgb_image},
    record={"v2.grayscale_to_rgb": _to_rgb},
    examples=_rgb_examples,
    transforms={"RGB": [sample()]},
)

# --- the order of channels


def permute_channels(family: str, handle: Any, permutation: Any) -> Any:
    order = permutation_of(permutation, handle.sink_shape[0])
    if order is None or handle.sink_dtype not in NUMERIC:
        return NotImplemented
    return handle.record(Op("v2.permute_channels", (order,)))


def _channel(image: Any, channel: Any) -> Any:
    """Recorded as an image of which all channels are this one, of which the gray values are the channel's."""
    number = "RGB".find(channel) if isinstance(channel, str) and len(channel) == 1 else channel
    if image.mode != "RGB" or type(number) is not int or not 0 <= number < 3:
        return NotImplemented
    same = image.record(Op("pil_to_tensor")).record(Op("v2.permute_channels", ((number,) * 3,)))
    recorded = same.record(Op("to_pil_image")).record(Op("pil.convert", ("L",)), mode="L")
    recorded.info = dict(image.info)
    return recorded


def _split(image: Any) -> Any:
    return tuple(map(image.getchannel, range(3))) if image.mode == "RGB" else (image.copy(),)


def _permutations(a: Arguments) -> Iterator[Example]:
    if a.is_pillow or a.functional is F_v2:
        yield Example("permute_channels", (a.chance.sample(range(a.channels), a.channels),))


Operation(
    "channels",
    stock={"v2.permute_channels": lambda image, order: F_v2.permute_channels_image(image, list(order))},
    record={"v2.permute_channels": permute_channels, "Image.getchannel": _channel, "Image.split": _split},
    examples=_permutations,
    transforms={"RandomChannelPermutation": [sample()]},
)
