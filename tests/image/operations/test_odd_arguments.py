"""Functionals with arguments of every kind: the result or the kind of error that stock gives, from the same call."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F1
from torchvision.transforms.v2 import functional as F2

import torch_sink
from image.random_pipelines import same_value
from torch_sink.cli.photos import make_photo
from torch_sink.image.handles.tensor import LazyTensor

pytestmark = pytest.mark.halved

Call = tuple[str, str, tuple[Any, ...]]

NUMBERS = (
    0, 1, -1, 0.5, 2, 8, 9, True, None, "1", np.float64(0.7), np.int64(2), torch.tensor(0.7), float("nan"),
    float("inf"), 1e9, Fraction(1, 2), (1,), [0.5],
)  # fmt: skip
SIZES = (
    5, [5], [5, 6], (5, 6), 5.0, [5.0, 6], [5, 6, 7], 0, [0, 5], -1, [-1, 5], np.int64(5), np.array([5, 6]),
    torch.Size([5, 6]), None, "5", True, [True, 5], [],
)  # fmt: skip
PADDINGS = (
    0, 1, [1], [1, 2], [1, 2, 3, 4], [1, 2, 3], -1, [-1, 2], 1.0, None, True, np.int64(2), 40, (29, 20), (30, 21),
)  # fmt: skip
FILLS = (
    0, 255, 256, -1, 1.7, True, None, "red", (1,), (1, 2, 3), [1, 2, 3], (1, 2), (1.5, 2.5, 3.5), (300, -1, 2),
    np.int64(4), np.array([1, 2, 3]), (1, 2, 3, 4),
)  # fmt: skip
BOXES = (
    (0, 0, 5, 6), (-2, -3, 10, 10), (5, 5, 0, 0), (5, 5, -2, 3), (15, 20, 30, 30), (0.0, 0, 5, 6), (1.5, 2.5, 5, 6),
    (np.int64(1), 2, 3, 4), (40, 40, 5, 5), (-50, -50, 5, 5), (None, 0, 1, 1), (True, True, 5, 5),
)  # fmt: skip
STATISTICS = (
    ([0.5] * 3, [0.5] * 3), ((0.5,), (0.5,)), (0.5, 0.5), ([0.5] * 3, [0, 1, 1]), ([0.5] * 2, [0.5] * 2), ([], []),
    (torch.tensor([0.5] * 3), torch.tensor([0.5] * 3)), (np.array([0.5] * 3), np.array([0.5] * 3)),
    ([True] * 3, [2] * 3), ([float("nan")] * 3, [1] * 3), ([0.5] * 3, [1e-46] * 3), ([0.5] * 3, [-1.0] * 3),
)  # fmt: skip
KERNELS = (
    3, [3], [3, 5], (5, 3), -3, [-3, 3], [3, -1], 0, [2, 3], 3.0, [3.0, 3], True, [True, 3], None, np.int64(3),
    [3, np.int64(5)], torch.Size([3, 5]), [3, 3, 3], [], "3", 41, [61, 3], [3, 43], [59, 41],
)  # fmt: skip
SIGMAS = (
    1, 0.9, [0.9], (0.9, 1.3), [0.9, 1.3, 2.0], [], 0, [0.0, 1.0], -1.0, [1.0, -1.0], True, [True, 1.0], None, "1",
    np.float64(0.9), [np.float64(0.9), 1], torch.tensor(0.9), float("nan"), float("inf"), [1.0, float("inf")], 1e-30,
)  # fmt: skip
DTYPES = (torch.uint8, torch.float16, torch.float32, torch.float64, torch.int32, torch.bool, "float", None)
VALUES = (0, 5.5, torch.tensor(3), torch.rand(3, 3, 4), torch.rand(1, 3, 4), np.ones(3), None, torch.tensor(300.0))
ORDERS = (
    [2, 1, 0], (1, 0, 2), [0, 0, 1], [0, 1], [0], [], None, [3, 0, 1], [-1, 0, 1], [0.0, 1, 2], torch.tensor([2, 0, 1]),
)  # fmt: skip
SHIFTS = (
    torch.zeros(1, 21, 30, 2), torch.full((1, 21, 30, 2), 0.1), torch.full((1, 21, 30, 2), 0.1, dtype=torch.float64),
    torch.zeros(1, 20, 30, 2), torch.zeros(21, 30, 2), torch.full((1, 21, 30, 2), float("nan")), 0.1, None,
    np.zeros((1, 21, 30, 2)), torch.zeros(2, 21, 30, 2),
)  # fmt: skip
ADJUSTMENTS = ("brightness", "contrast", "saturation", "hue", "sharpness", "gamma")
CORNERS = [[0, 0], [29, 0], [29, 20], [0, 20]]
MOVED = [[2, 1], [27, 0], [29, 19], [1, 20]]


def calls(module: ModuleType) -> Iterator[Call]:
    """Those of functionals that a module has."""
    return (call for call in _calls() if hasattr(module, call[1]))


def _calls() -> Iterator[Call]:
    """(label, name of the functional, arguments after the image)."""
    for value in NUMBERS:
        for name in (*(f"adjust_{kind}" for kind in ADJUSTMENTS), "posterize", "solarize", "to_grayscale", "rotate"):
            yield f"{value!r}", name, (value,)
        yield f"scale {value!r}", "affine", (5, [1, 2], value, [0, 0])
    for size in SIZES:
        for name in ("resize", "center_crop", "five_crop", "ten_crop"):
            yield f"{size!r}", name, (size,)
        yield f"size {size!r}", "resized_crop", (1, 2, 8, 9, size)
    for mode in (*InterpolationMode, 0, 2, 3, "bilinear", None):
        yield f"{mode}", "resize", ([7, 8], mode)
        yield f"{mode}", "rotate", (20, mode)
        yield f"{mode}", "perspective", (CORNERS, MOVED, mode)
    for padding in PADDINGS:
        for padding_mode in ("constant", "edge", "reflect", "symmetric", "wrap", None):
            yield f"{padding!r}, {padding_mode}", "pad", (padding, 0, padding_mode)
    for fill in FILLS:
        yield f"fill {fill!r}", "pad", (2, fill)
        for mode in (InterpolationMode.NEAREST, InterpolationMode.BILINEAR):
            yield f"fill {fill!r} {mode}", "rotate", (20, mode, True, None, fill)
            yield f"fill {fill!r} {mode}", "affine", (0, [3, 2], 1.5, [0, 0], mode, fill)
            yield f"fill {fill!r} {mode}", "perspective", (CORNERS, MOVED, mode, fill)
    for box in BOXES:
        yield f"{box}", "crop", box
        yield f"{box}", "resized_crop", (*box, [5, 5])
        yield f"{box}", "erase", (*box, torch.tensor(3.0))
    for size in KERNELS:
        yield f"{size!r}", "gaussian_blur", (size,)
        yield f"{size!r}, sigma", "gaussian_blur", (size, [0.9, 1.3])
    for sigma in SIGMAS:
        yield f"sigma {sigma!r}", "gaussian_blur", ([3, 5], sigma)
    for value in VALUES:
        yield f"value {value!r}", "erase", (2, 3, 3, 4, value)
    for mean, std in STATISTICS:
        for inplace in (False, True):
            yield f"{mean}, {std}, {inplace}", "normalize", (mean, std, inplace)
    for dtype in DTYPES:
        yield f"{dtype}", "convert_image_dtype", (dtype,)
        for scale in (True, False, None, 1):
            yield f"{dtype}, {scale}", "to_dtype", (dtype, scale)
    for order in ORDERS:
        yield f"{order!r}", "permute_channels", (order,)
    for shift in SHIFTS:
        yield f"{shift!r}", "elastic", (shift,)
        yield f"{shift!r}, filled", "elastic", (shift, InterpolationMode.NEAREST, 7)
    for name in ("hflip", "invert", "equalize", "to_tensor", "pil_to_tensor", "to_pil_image", "get_dimensions"):
        yield "none", name, ()
        yield "too many", name, (1, 2, 3)


def _inputs(module: ModuleType) -> dict[str, Callable[[], Any]]:
    buffers = {"RGB": io.BytesIO(), "L": io.BytesIO()}
    for mode, buffer in buffers.items():
        make_photo(30, 21, 3).convert(mode).save(buffer, "JPEG")

    def opened(mode: str) -> Image.Image:
        return Image.open(io.BytesIO(buffers[mode].getvalue())).convert(mode)

    made: dict[str, Callable[[], Any]] = {}
    for mode in buffers:
        made[mode] = lambda mode=mode: opened(mode)
        made[f"{mode}, uint8"] = lambda mode=mode: F1.pil_to_tensor(opened(mode))
        made[f"{mode}, float"] = lambda mode=mode: F1.to_tensor(opened(mode))
        if module is F2:
            made[f"{mode}, tv image"] = lambda mode=mode: F2.to_image(opened(mode))
    return made


def _attempt(function: Callable[..., Any], image: Any, args: tuple[Any, ...]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = function(image, *args)
        except Exception as error:
            result = error
    return result, [str(warning.message) for warning in caught]


def _check(actual: Any, expected: Any) -> None:
    if isinstance(expected, Exception) or isinstance(actual, Exception):
        assert type(actual) is type(expected), f"{actual!r} instead of {expected!r}"
        return
    for leaf, stock_leaf in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        same_value(leaf, stock_leaf)


FAMILIES = {"v1": F1, "v2": F2}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "kind"), [(family, kind) for family in FAMILIES for kind in _inputs(FAMILIES[family])]
)
@pytest.mark.sampled(6)
def test_functionals_with_odd_arguments(family: str, kind: str) -> None:
    wrong, stock, module = [], [], FAMILIES[family]
    make = _inputs(module)[kind]
    for _, name, args in calls(module):
        image = make()
        stock.append((image, *_attempt(getattr(module, name), image, args)))
    with torch_sink.image_backend("device", device="cpu"):
        for (label, name, args), (stock_image, expected, stock_warnings) in zip(calls(module), stock, strict=True):
            image = make()
            actual, our_warnings = _attempt(getattr(module, name), image, args)
            try:
                _check(actual, expected)
                _check(image, stock_image)  # calls in place
                assert our_warnings == stock_warnings
            except AssertionError as error:
                wrong.append(f"{name} of {kind}, {label}: {error}")
    assert not wrong, "\n".join(wrong[:40])


KEYWORDS: dict[str, Callable[[ModuleType, Any], Any]] = {
    "a resized crop": lambda module, image: module.resized_crop(
        **{FIRST[module]: image}, top=1, left=2, height=8, width=9, size=[5, 6]
    ),
    "a conversion": lambda module, image: module.pil_to_tensor(pic=image),
    "a resize": lambda module, image: module.resize(**{FIRST[module]: image}, size=[5, 6]),
    "a blur": lambda module, image: module.gaussian_blur(
        **{FIRST[module]: image}, kernel_size=[3, 5], sigma=[0.9, 1.3]
    ),
}
FIRST = {F1: "img", F2: "inpt"}


@pytest.mark.parametrize("module", [F1, F2], ids=["v1", "v2"])
@pytest.mark.parametrize("name", KEYWORDS)
def test_the_image_by_its_name(name: str, module: ModuleType) -> None:
    for image in (make_photo(30, 21, 3), F1.pil_to_tensor(make_photo(30, 21, 3))):
        if name == "a conversion" and isinstance(image, torch.Tensor):
            continue
        expected = KEYWORDS[name](module, image)
        with torch_sink.image_backend("device", device="cpu"):
            same_value(KEYWORDS[name](module, image), expected)
            with pytest.raises(TypeError, match="argument"):
                module.resized_crop(top=1, left=2, height=8, width=9, size=[5, 6])


def test_zeros_of_both_signs() -> None:
    """They are equal for Python, and a plan is made once for equal calls."""

    def made() -> list[torch.Tensor]:
        image = F1.to_tensor(make_photo(30, 21, 3))
        values = [torch.tensor(zero).expand(3, 1, 1) for zero in (0.0, -0.0)]
        erased = [F2.erase(image, 2, 3, 4, 5, value) for value in values]
        turned = [F2.rotate(image, 20, fill=zero) for zero in (0.0, -0.0)]
        padded = [F2.pad(image, 2, fill=zero) for zero in (0.0, -0.0)]
        return [default_collate(images).to("cpu").signbit() for images in (erased, turned, padded)]

    expected = made()
    with torch_sink.image_backend("device", device="cpu"):
        assert all(map(torch.equal, made(), expected))


def test_what_one_normalization_refuses_another_records() -> None:
    with torch_sink.image_backend("device", device="meta"):
        images = [F1.to_tensor(F1.hflip(make_photo(30, 21, 3))) for _ in range(5)]
        means = (True, 1, 1.0, Fraction(1), 1.0)
        kinds = [type(F1.normalize(image, [mean] * 3, [1.0] * 3)) for image, mean in zip(images, means, strict=True)]
    recorded = LazyTensor
    assert kinds == [torch.Tensor, recorded, recorded, torch.Tensor, recorded]
