"""Gray images, and the order of channels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchvision.transforms import _functional_pil as F_pil
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms.v2 import functional as F_v2

from torch_sink.image.core.arguments import permutation_of
from torch_sink.image.core.atoms import Formula, Kind, Lowering, by_formula
from torch_sink.image.core.examples import Arguments, Example, of_method, sample
from torch_sink.image.core.ops import EXACT_BYTES, NUMERIC, Op, Operation, both

# --- to kernel work


def _lower_convert(state: Lowering, mode: str) -> None:
    if mode == "L" and state.channels == 3:
        state.add(Kind.GRAY)
    state.channels = 3 if mode == "RGB" else 1


def _lower_gray_of_image(state: Lowering, channels: int) -> None:
    _lower_convert(state, "L")
    state.channels = channels


def _lower_gray(state: Lowering, channels: int, formula: Formula) -> None:
    if state.channels == 3:
        state.add(Kind.GRAY, formula=formula)
        state.channels = channels
    elif formula == Formula.TENSOR_V2:
        # The kernel of v1 leaves an image of one channel as it is.
        state.channels = channels


def lower_to_rgb(state: Lowering) -> None:
    state.channels = 3


def _lower_permute(state: Lowering, permutation: tuple[int, ...]) -> None:
    """PERMUTE: for each channel of the output the channel of the input."""
    if state.channels == 3:
        state.add(Kind.PERMUTE, *permutation)


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
    lower={
        "pil.to_grayscale": _lower_gray_of_image,
        "pil.convert": _lower_convert,
        **by_formula("rgb_to_grayscale", _lower_gray),
    },
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
    lower=lower_to_rgb,
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
    lower=_lower_permute,
    examples=_permutations,
    transforms={"RandomChannelPermutation": [sample()]},
)
