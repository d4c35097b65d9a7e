"""Sums, differences, products and quotients by constants, and channels of images: recorded, with stock code's bits."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

import torch_sink
from image.cases import encoded, opener
from image.cases_float import scaled_in_place
from image.check import assert_same_bits
from torch_sink.image.core.lowering import value_planes
from torch_sink.image.handles.tensor import Handle

pytestmark = pytest.mark.halved

TO_FLOAT = {
    "v1": v1.ToTensor(),
    "v2": v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]),
    "warped": v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.GaussianBlur(3, 1.0)]),
}
RECORDED: dict[str, Callable[[Any], Any]] = {
    "x * 2 - 1": lambda x: x * 2 - 1,
    "2 * x": lambda x: 2 * x,
    "(x - 0.5) / 0.5": lambda x: (x - 0.5) / 0.5,
    "methods": lambda x: x.sub(0.45).div(0.225).add(3).mul(-0.25),
    "functions": lambda x: torch.div(torch.sub(torch.add(torch.mul(x, 4), 0.1), 0.7), 3),
    "division": lambda x: x / 255,
    "negative division": lambda x: x / -0.3 + -0.0,
    "in a pipeline": v1.Compose([v1.Lambda(lambda x: x * 2 - 1), v1.RandomHorizontalFlip(1.0)]),
    "x * 255": lambda x: x * 255,
    "0.3 * x": lambda x: 0.3 * x,
    "x * -1.7 + 0.2": lambda x: x.mul(-1.7) + 0.2,
    "a product in a pipeline": v1.Compose(
        [v1.RandomHorizontalFlip(1.0), v1.Lambda(lambda x: x * 255), v1.Normalize([9], [6])]
    ),
    "in place": scaled_in_place,
}
IN_STOCK_CODE: dict[str, Callable[[Any], Any]] = {
    "x / 0": lambda x: x / 0,
    "alpha": lambda x: x.sub(1, alpha=2),
    "rounding": lambda x: x.div(0.1, rounding_mode="floor"),
    "infinity": lambda x: x * float("inf"),
    "nan": lambda x: x - float("nan"),
    "alpha in place": lambda x: x.add_(1, alpha=2),
}
# Recorded where a table of 256 values stands for the floats, and not behind a blur.
OF_TABLES: dict[str, Callable[[Any], Any]] = {
    "x * 0": lambda x: x * 0,
    "x * 1e-9": lambda x: x * 1e-9,
    "a tensor": lambda x: x - torch.tensor(0.5),
    "a bool": lambda x: x + True,
    "large": lambda x: x / 1e30,
    "two images": lambda x: x + x,
    "an image in place": lambda x: x.mul_(x),
}
# Where 0 and -0 are made from 0, or from -0.
ZEROS: dict[str, Callable[[Any], Any]] = {
    "x * 0.0": lambda x: x * 0.0,
    "x * -0.0": lambda x: x * -0.0,
    "x / -1 + 0": lambda x: x / -1 + 0,
    "x / -1 - 0": lambda x: x / -1 - 0,
    "x / -1 + 0.0": lambda x: x / -1 + 0.0,
    "x / -1 - 0.0": lambda x: x / -1 - 0.0,
    "0 - x": lambda x: 0 - x,
    "0.0 - x": lambda x: 0.0 - x,
    "mean 0": lambda x: v1.Normalize([0], [1])(x / -1),
    "mean 0.0": lambda x: v1.Normalize([0.0], [1.0])(x / -1),
    "mean -0.0": lambda x: v1.Normalize([-0.0], [1.0])(x / -1),
}


def photo() -> Image.Image:
    return opener(encoded(40, 30, 1))()


def outcome(call: Callable[[Any], Any], to_float: str) -> tuple[Any, bool]:
    result = call(TO_FLOAT[to_float](photo()))
    recorded = isinstance(result, Handle) and result.is_recording
    return (result.materialize() if isinstance(result, Handle) else result), recorded


@pytest.mark.parametrize("to_float", TO_FLOAT)
@pytest.mark.parametrize("name", [*RECORDED, *OF_TABLES, *IN_STOCK_CODE])
def test_constants(name: str, to_float: str) -> None:
    call = {**RECORDED, **OF_TABLES, **IN_STOCK_CODE}[name]
    expected, _ = outcome(call, to_float)
    with torch_sink.image_backend("device", device="cpu"):
        actual, recorded = outcome(call, to_float)
        assert recorded == (name in RECORDED or (name in OF_TABLES and to_float != "warped"))
        assert bool(torch_sink.fallback_report()) != recorded
    assert_same_bits(actual, expected)


def first_values(ops: tuple[Any, ...]) -> torch.Tensor:
    """What the kernels' tables hold for 0, [3, 1, 1]."""
    return torch.stack([torch.from_numpy(plane)[:1] for plane in value_planes(3, ops)]).view(torch.float32)[..., None]


def test_signs_of_zeros() -> None:
    """Also those in the kernels' tables, which are kept."""
    image = Image.new("RGB", (1, 1))
    for (name, call), to_float in itertools.product(ZEROS.items(), ("v1", "v2")):
        expected = call(TO_FLOAT[to_float](image))
        with torch_sink.image_backend("device", device="cpu"):
            result = call(TO_FLOAT[to_float](v1.functional.hflip(image)))
            results = [result]
            if isinstance(result, Handle) and result.is_recording:
                results = [first_values(result.lazy_recording.calls[1:]), result.materialize()]
        for made in results:
            assert torch.equal(
                made.as_subclass(torch.Tensor).signbit(), expected.as_subclass(torch.Tensor).signbit()
            ), name


VIEWS: dict[str, Callable[[Any], Any]] = {
    "a crop": lambda whole: v2.functional.crop(whole, 2, 3, 9, 8),
    "a crop of a pure tensor": lambda whole: v2.functional.crop(whole.as_subclass(torch.Tensor), 2, 3, 9, 8),
    "a pure tensor": lambda whole: whole.as_subclass(torch.Tensor),
    "an image again": lambda whole: tv_tensors.Image(whole.as_subclass(torch.Tensor)),
}


@pytest.mark.parametrize("in_place", [scaled_in_place, v1.Normalize([0.1], [0.7], inplace=True)])
@pytest.mark.parametrize("view", VIEWS)
def test_a_change_in_place_is_one_of_every_view(view: str, in_place: Callable[[Any], Any]) -> None:
    def views(image: Any) -> tuple[Any, ...]:
        whole = TO_FLOAT["v2"](image)
        part = VIEWS[view](whole)
        return whole, part, in_place(whole)

    expected = views(photo())
    with torch_sink.image_backend("device", device="cpu"):
        results = views(photo())
        assert bool(torch_sink.fallback_report()) == ("crop" in view)  # all others stand for the whole
        for actual, stock in zip(results, expected, strict=True):
            assert_same_bits(actual.materialize() if isinstance(actual, Handle) else actual, stock)


def test_a_compose_that_holds_the_image_records_a_change_in_place() -> None:
    """The value of `x *= 2` is another tensor of the same memory, and `Compose` holds the first one."""
    pipeline = v2.Compose([TO_FLOAT["v2"], v2.Lambda(scaled_in_place), v2.RandomHorizontalFlip(1.0)])
    expected = pipeline(photo())
    with torch_sink.image_backend("device", device="cpu", strict=True):
        assert_same_bits(pipeline(photo()).materialize(), expected)


def test_other_constants_have_stock_codes_bits() -> None:
    generator = torch.Generator().manual_seed(2)
    constants = (torch.rand(100, generator=generator) * 4 - 2).tolist()
    kinds = (operator.sub, operator.add, operator.truediv, operator.mul)
    calls = [lambda x, kind=kind, constant=constant: kind(x, constant) for constant in constants for kind in kinds]
    stock = [outcome(call, "v1")[0] for call in calls]
    with torch_sink.image_backend("device", device="cpu"):
        for call, expected in zip(calls, stock, strict=True):
            actual, recorded = outcome(call, "v1")
            assert recorded
            assert_same_bits(actual, expected)
