"""Which of Pillow's kernels of 3 x 3 and 5 x 5 weights are recorded, and what becomes of the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torchvision import transforms as v1
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.cases import encoded, opener
from torch_sink.image.operations import RECORDERS, filters

pytestmark = pytest.mark.halved

WEIGHTS = (0.1, -0.2, 0.3, 1.5, 2, 0.7, 0, -1, 0.6)
FIVE = tuple(range(-9, 16))
Kernel = ImageFilter.Kernel


class OfThem(ImageFilter.SHARPEN):
    """A class without code of its own."""

    filterargs = (3, 3), 2, 9, WEIGHTS


class Emboss(Kernel):
    def __init__(self, offset: float = 128) -> None:
        super().__init__((3, 3), (-1, 0, 0, 0, 1, 0, 0, 0, 0), 1, offset)


class Counted(Emboss):
    """One with code that runs for each image."""

    def filter(self, image: Any) -> Any:
        return super().filter(image)


class Maker(Emboss):
    """One that Pillow calls to get a filter."""

    def __call__(self) -> Any:
        return ImageFilter.BLUR()


def changed(kernel: Any, **fields: Any) -> Any:
    vars(kernel).update(fields)
    return kernel


RECORDED: dict[str, Callable[[], Any]] = {
    "a class": lambda: ImageFilter.SHARPEN,
    "an instance": ImageFilter.SMOOTH_MORE,
    "floats": lambda: Kernel((3, 3), WEIGHTS),
    "a list": lambda: Kernel((5, 5), list(FIVE), 31, -3.5),
    "an array": lambda: Kernel((3, 3), np.array(WEIGHTS)),
    "an array of narrow integers": lambda: Kernel((5, 5), np.array([-128, *[1] * 24], np.int8), 7),
    "numbers of numpy": lambda: Kernel((3, 3), [np.float32(each) for each in WEIGHTS], np.int64(3), np.float64(0.1)),
    "weights of either sign that Pillow's scale makes steep": lambda: Kernel((3, 3), (5, -4.9, 5, -5, 0, 0, 0, 0, 0)),
    "a negative scale": lambda: Kernel((3, 3), WEIGHTS, -2, 255),
    "booleans": lambda: Kernel((3, 3), [True, False, True] * 3),
    "a class of the user's": lambda: OfThem,
    "an instance of it": OfThem,
    "a kernel of the user's": Emboss,
    "its arguments changed": lambda: changed(Emboss(), filterargs=((3, 3), 3, 0, (1,) * 9)),
}
IN_STOCK_CODE: dict[str, Callable[[], Any]] = {
    "a scale of 0": lambda: Kernel((3, 3), WEIGHTS, 0),
    "weights that add up to 0": lambda: Kernel((3, 3), (-1, 1, 0, 0, 0, 0, 0, 0, 0)),
    "not a number": lambda: Kernel((3, 3), (float("nan"),) * 9, 1),
    "infinite": lambda: Kernel((3, 3), (float("inf"),) * 9, 1),
    "an offset beyond float32": lambda: Kernel((3, 3), WEIGHTS, 1, 1e39),
    "an integer beyond float64": lambda: Kernel((3, 3), [10**400] * 9, 1),
    "too small a scale": lambda: Kernel((3, 3), WEIGHTS, 1e-40),
    "words": lambda: Kernel((3, 3), "123456789", 1),
    "a word": lambda: Kernel((3, 3), [*WEIGHTS[1:], "1"], 1),
    "a scale that is a word": lambda: Kernel((3, 3), WEIGHTS, "1"),
    "complex": lambda: Kernel((3, 3), [1j] * 9, 1),
    "sides of floats": lambda: Kernel((3.0, 3.0), WEIGHTS, 1),
    "9 x 1": lambda: Kernel((9, 1), WEIGHTS, 1),
    "7 x 7": lambda: Kernel((7, 7), [1] * 49),
    "too few weights": lambda: changed(Emboss(), filterargs=((3, 3), 1, 0, (1,) * 8)),
    "no arguments": lambda: changed(Emboss(), filterargs=()),
    "arguments of another kind": lambda: changed(Emboss(), filterargs=None),
    "code of the user's": Counted,
    "code of the user's on an instance": lambda: changed(Emboss(), filter=lambda image: image.filter((3, 3), 1, 0, FIVE[:9])),
    "a class that takes arguments": lambda: Emboss,
    "a class that takes arguments which Pillow does not give": lambda: Kernel,
    "what Pillow calls": Maker,
    "a function": lambda: lambda: ImageFilter.BLUR(),
    "the class of them all": lambda: ImageFilter.BuiltinFilter,
    "a median": ImageFilter.MedianFilter,
    "a box blur of a list": lambda: ImageFilter.BoxBlur([1, 2]),
    "a box blur wider than any image": lambda: ImageFilter.BoxBlur(1000),
    "a box blur whose radius was changed": lambda: changed(ImageFilter.BoxBlur(1), radius=-1),
    "an unsharp mask": ImageFilter.UnsharpMask,
    "no filter": lambda: 3,
}  # fmt: skip


def outcome(image: Any, kernel: Any) -> Any:
    """The image, or the error, and what Pillow warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            made = image.filter(kernel)
            said: Any = made.mode, made.size, made.info, made.tobytes()
        except Exception as error:
            said = type(error), str(error)
    return said, [str(warning.message) for warning in found]


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", [*RECORDED, *IN_STOCK_CODE])
def test_images_are_pillows(name: str, mode: str) -> None:
    kernel, open_image = {**RECORDED, **IN_STOCK_CODE}[name](), opener(encoded(23, 17, mode=mode), mode)
    expected = outcome(F.hflip(open_image()), kernel)
    with torch_sink.image_backend("device", device="cpu"):
        assert outcome(F.hflip(open_image()), kernel) == expected


@pytest.mark.parametrize("name", [*RECORDED, *IN_STOCK_CODE])
def test_what_is_recorded(name: str) -> None:
    kernel = {**RECORDED, **IN_STOCK_CODE}[name]()
    with torch_sink.image_backend("device", device="cpu"):
        image = F.hflip(opener(encoded(23, 17))())
        made = image.record(RECORDERS["Image.filter"], kernel)
        assert (made is not NotImplemented) == (name in RECORDED)
        assert name not in RECORDED or (made.is_recording and made.lazy_recording.calls[-1].name == "pil.kernel")


@pytest.mark.parametrize("mode", ["1", "P", "LA", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "I", "I;16", "F"])
@pytest.mark.parametrize("kernel", [ImageFilter.SHARPEN, ImageFilter.SMOOTH_MORE, OfThem()])
def test_other_modes(mode: str, kernel: Any) -> None:
    image = opener(encoded(23, 17))().convert("L" if mode == "I;16" else mode).convert(mode)
    expected = outcome(F.hflip(image), kernel)
    with torch_sink.image_backend("device", device="cpu"):
        assert outcome(F.hflip(image), kernel) == expected


@pytest.mark.parametrize("size", [(1, 9), (2, 2), (4, 4), (4, 9), (9, 3), (5, 5)], ids=str)
def test_smaller_images_than_the_kernel(size: tuple[int, int]) -> None:
    image = opener(encoded(*size))()
    for kernel in (ImageFilter.SHARPEN, ImageFilter.SMOOTH_MORE):
        expected = outcome(image, kernel)
        with torch_sink.image_backend("device", device="cpu"):
            made = F.hflip(F.hflip(image)).filter(kernel)
            assert len(made.lazy_recording.calls) == 2 + (min(size) >= kernel.filterargs[0][0])
            assert made.tobytes() == expected[0][-1]


def test_what_a_kernel_is_later_changes_nothing() -> None:
    weights = [0.5, *WEIGHTS[1:]]
    kernel, image = Kernel((3, 3), weights), opener(encoded(23, 17))()
    expected = image.filter(kernel).tobytes()
    with torch_sink.image_backend("device", device="cpu"):
        made = F.hflip(F.hflip(image)).filter(kernel)
        weights[:] = [0.0] * 9
        assert made.tobytes() == expected


@pytest.mark.parametrize(
    ("kernel", "records"),
    [(ImageFilter.SHARPEN, False), (ImageFilter.SMOOTH, True), (ImageFilter.BLUR, True), (ImageFilter.EMBOSS, False)],
)
def test_differences_are_not_enlarged(kernel: Any, records: bool) -> None:
    """Behind torchvision's blur, whose last bits depend on the processor."""
    with torch_sink.image_backend("device", device="cpu"):
        image = F.gaussian_blur(opener(encoded(23, 17))(), 3)
        assert (image.record(RECORDERS["Image.filter"], kernel) is not NotImplemented) == records


EXACT = {"BLUR", "CONTOUR", "EDGE_ENHANCE", "EDGE_ENHANCE_MORE", "EMBOSS", "FIND_EDGES", "SHARPEN"}
ROUNDED = {"DETAIL", "SMOOTH", "SMOOTH_MORE"}


def test_where_pillow_rounds_a_product_and_a_sum_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiler fuses them on some processors; then only sums that are not rounded at all have the same bits."""
    assert filters._rounds_each_product()
    monkeypatch.setattr(filters, "_rounds_each_product", lambda: False)
    with torch_sink.image_backend("device", device="cpu"):
        image = F.hflip(opener(encoded(23, 17))())
        recorded = {
            name
            for name in EXACT | ROUNDED
            if image.record(RECORDERS["Image.filter"], getattr(ImageFilter, name)) is not NotImplemented
        }
        steep = Kernel((3, 3), [1 << 12] * 9, 1)
        assert image.record(RECORDERS["Image.filter"], steep) is NotImplemented
    assert recorded == EXACT


def fused(image: Any, kernel: Any) -> Image.Image:
    """What a Pillow does that rounds a product and a sum once, of gray values."""
    (side, _), scale, offset, weights = kernel.filterargs
    square = (np.array(weights, np.float32) / np.float32(scale)).reshape(side, side)
    pixels, made = np.asarray(image, np.float64), np.array(image)
    for y in range(side // 2, len(pixels) - side // 2):
        for x in range(side // 2, pixels.shape[1] - side // 2):
            total = np.float32(offset + 0.5)
            for line, row in zip(square, range(y + side // 2, -1, -1), strict=False):
                inner = np.float32(0)
                for weight, column in zip(line, range(x - side // 2, x + side // 2 + 1), strict=True):
                    inner = np.float32(pixels[row, column] * np.float64(weight) + inner)
                total = np.float32(total + inner)
            made[y, x] = np.clip(total, 0, 255)
    return Image.fromarray(made)


def test_such_a_pillow_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "filter", fused)
    assert not filters._rounds_each_product.__wrapped__()


def test_chains_record_behind_it_and_before() -> None:
    chain = v2.Compose([
        v2.Resize(15), v2.Lambda(lambda image: image.filter(ImageFilter.SHARPEN)), v2.RandomHorizontalFlip(),
        v1.Lambda(lambda image: image.filter(ImageFilter.EDGE_ENHANCE_MORE)), v2.ToImage(),
    ])  # fmt: skip
    image = opener(encoded(23, 17))()
    torch.manual_seed(3)
    expected = chain(image)
    torch.manual_seed(3)
    with torch_sink.image_backend("device", device="cpu", strict=True):
        made = chain(opener(encoded(23, 17))())
        assert made.is_recording
    assert torch.equal(made.materialize(), expected)
