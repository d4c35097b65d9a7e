"""torch's functions of single values behind `ToTensor`: limits, comparisons, masks, types, turns. Recorded, equal bits."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.cases import encoded, opener
from image.check import (
    EXACT,
    assert_keeps,
    assert_same_bits,
    check_pipeline,
    device_in_use,
    lazy_batch,
    promise_of_calls,
    runs_kernels,
)
from torch_sink.image.handles.tensor import HANDLES, Handle

pytestmark = pytest.mark.halved

_PHOTO, _GRAY = opener(encoded(31, 23, 5))(), opener(encoded(16, 9, 2))()
SOURCES: dict[str, Callable[[], Any]] = {
    "v1": lambda: F.to_tensor(F.hflip(_PHOTO)),
    "v2": lambda: v2.functional.to_dtype(v2.functional.to_image(F.hflip(_PHOTO)), torch.float32, scale=True),
    "normalized": lambda: v1.Normalize([0.5, 0.4, 0.3], [0.2, 0.2, 0.3])(F.to_tensor(F.hflip(_PHOTO))),
    "gray": lambda: F.to_tensor(F.hflip(_GRAY.convert("L"))),
    "bytes": lambda: F.pil_to_tensor(F.hflip(_PHOTO)),
    "bytes of v2": lambda: v2.functional.to_image(F.hflip(_GRAY)),
    "half": lambda: F.to_tensor(F.hflip(_PHOTO)).half(),
}
FLOATS, BYTES, ALL = ("v1", "v2", "normalized", "gray"), ("bytes", "bytes of v2"), tuple(SOURCES)
LOW, HIGH = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.tensor(0.75)


def _cut(x: Any) -> Any:
    x[x < 0.2] = 0
    return x


def _standardized(x: Any) -> Any:
    return (x - x.mean()) / x.std()


# Behind each call nothing runs in stock code.
RECORDED: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "clamp": (ALL, lambda x: x.clamp(0.1, 0.9)),
    "clamp, by names": (ALL, lambda x: torch.clamp(x, max=0.5)),
    "clamp, whole numbers": (ALL, lambda x: x.clamp(1, 200)),
    "clamp, the wrong way": (FLOATS, lambda x: x.clamp(0.9, 0.1)),
    "clamp, infinite": (FLOATS, lambda x: x.clamp(0.3, float("inf"))),
    "clamp, a tensor": (FLOATS, lambda x: x.clamp(min=torch.tensor(0.3))),
    "clamp, tensors": (("v1", "v2", "normalized"), lambda x: x.clamp(LOW, HIGH)),
    "clamp of itself": (ALL, lambda x: x.clamp(max=x * x)),
    "clip": (ALL, lambda x: torch.clip(x, 0.25)),
    "clamp_min and clamp_max": (ALL, lambda x: x.clamp_min(0.2).clamp_max(max=0.8)),
    "in place": (FLOATS, lambda x: x.clamp_(0.1, 0.9).round_().abs_()),
    "bytes in place": (BYTES, lambda x: x.clamp_(10, 200)),
    "clamped, then more": (FLOATS, lambda x: v1.Normalize([0.4], [0.2])(F.hflip(x.clamp(0, 1)[:, 1:]) * 2 - 1)),
    "between bytes": (BYTES, lambda x: (x.clamp(9, 99) // 2 * 3 + 250).float() / 255),
    "rounded to bytes": (FLOATS, lambda x: (x.clamp(0, 1) * 255).round().byte()),
    "bytes to pixels": (("v1", "v2"), lambda x: v1.RandomPosterize(3, 1.0)((x * 255).to(torch.uint8))),
    "binarized": (ALL, lambda x: (x > 0.5).float()),
    "a mask": (ALL, lambda x: x >= 0.5),
    "a whole number": (ALL, lambda x: (x * 7).long()),
    "a short one": (ALL, lambda x: (x * 7).type(torch.int16)),
    "equal": (ALL, lambda x: (x == 1) | (x != x.round())),
    "masks": (FLOATS, lambda x: ((x > 0.2) & ~(x > 0.8)).half()),
    "masks by name": (FLOATS, lambda x: torch.logical_and(x.lt(0.8), torch.ge(x, 0.2)).logical_xor(x == 0)),
    "where": (ALL, lambda x: torch.where(x > 0.5, 1.0, 0.0)),
    "where, the image": (ALL, lambda x: torch.where(x > 0.5, x, 0)),
    "where, a method": (ALL, lambda x: x.where(x > 0.5, -x.abs() if x.is_floating_point() else 3)),
    "where, likes": (FLOATS, lambda x: torch.where(x > 0.5, torch.ones_like(x), torch.zeros_like(x))),
    "masked_fill": (ALL, lambda x: x.masked_fill(x < 0.2, 1)),
    "written by a mask": (FLOATS, _cut),
    "written in place": (FLOATS, lambda x: x.masked_fill_(x <= 0.2, 0.5)),
    "times a mask": (ALL, lambda x: x * (x > 0.3)),
    "times itself": (FLOATS, lambda x: x * x - x**3 + x**2 / (x.square() + 1) + (x * x).sqrt()),
    "the larger": (FLOATS, lambda x: torch.maximum(x * 2, x + 0.1).minimum(torch.full_like(x, 0.9))),
    "reversed": (FLOATS, lambda x: 3.0 - 1 / x.clamp(min=1)),
    "rounded": (FLOATS, lambda x: (x * 4).floor() + x.ceil() + x.trunc() + torch.round(x, decimals=1) + x.sign()),
    "by numbers": (FLOATS, lambda x: x.sub(HIGH).mul(0).add(True) + x * 1e-9),
    "not a number": (ALL, lambda x: torch.isfinite(x) & ~x.isnan()),
    "rot90": (ALL, lambda x: torch.rot90(x, 3, (1, 2)).clamp(0.1, 0.9)),
    "turned and transposed": (ALL, lambda x: (x.mT > 0.5).rot90(1, [2, 1]).contiguous().flip(1).clone().float()),
    "a clone": (FLOATS, lambda x: [y := x.clone(), y.clamp_(0, 0.5), x.sub_(1), y.detach() * 2]),
    "detached": (FLOATS, lambda x: [x, x.detach().clamp_(0, 0.5), x > 0.4]),
    "a mask moves": (ALL, lambda x: F.hflip(v1.functional.crop(x > 0.5, 2, 1, 6, 12)).int()),
    "a type by name": (ALL, lambda x: x.type_as(HIGH) if x.type() == "torch.FloatTensor" else x.type(torch.float32)),
}
# What only one image after the other knows, or another processor may compute otherwise.
IN_STOCK_CODE: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "exp": (FLOATS, torch.exp),
    "a free power": (FLOATS, lambda x: x.abs() ** 2.2),
    "infinite values": (FLOATS, lambda x: (x - x) / 0 + 1 / (x * 0)),
    "a double": (FLOATS, lambda x: x.double()),
    "a larger tensor": (FLOATS, lambda x: x.clamp(max=torch.full(x.shape, 0.5))),
    "another image": (FLOATS, lambda x: torch.where(F.hflip(x) > 0.5, x, 0)),
    "floats that are no bytes": (("normalized",), lambda x: (x * -300).byte()),
    "a mask that wants gradients": (("v1",), lambda x: torch.ones_like(x, requires_grad=True).detach()),
    "the type of another": (("v1",), lambda x: HIGH.type_as(x)),
    "an alpha": (FLOATS, lambda x: x.add(x, alpha=0.3)),
}


def _results(kind: str, call: Callable[[Any], Any]) -> list[Any]:
    made = call(SOURCES[kind]())
    return made if isinstance(made, list) else [made]


CASES = [
    pytest.param(kind, call, calls is RECORDED, id=f"{name}-{kind}")
    for calls in (RECORDED, IN_STOCK_CODE)
    for name, (kinds, call) in calls.items()
    for kind in kinds
]


def check(kind: str, call: Callable[[Any], Any], is_recorded: bool) -> None:
    """The batch of each result, then the results themselves: types, strides and bits."""
    expected = _results(kind, call)
    with torch_sink.image_backend("device", device=device_in_use()):
        made = _results(kind, call)
        assert all(type(ours) in HANDLES and ours.is_recording for ours in made) == is_recorded
        assert bool(torch_sink.fallback_report()) != is_recorded
        for ours, stock in zip(made, expected, strict=True):
            assert (type(ours).__name__, ours.dtype, ours.shape) == (type(stock).__name__, stock.dtype, stock.shape)
            if is_recorded and ours.lazy_base is None:
                batch = lazy_batch([ours, ours]).to(device_in_use()).cpu()
                together = default_collate([stock.as_subclass(torch.Tensor)] * 2)
                promise = promise_of_calls([ours.lazy_recording.calls], together)
                assert_keeps(promise if runs_kernels() else EXACT, batch, together)
        for ours, stock in zip(made, expected, strict=True):
            assert_same_bits(ours.materialize() if isinstance(ours, Handle) else ours, stock)


@pytest.mark.parametrize(("kind", "call", "is_recorded"), CASES)
@pytest.mark.sampled(120)
def test_calls(kind: str, call: Callable[[Any], Any], is_recorded: bool) -> None:
    check(kind, call, is_recorded)


def test_numbers_are_told_apart() -> None:
    """Calls that are equal for Python, as those with 1, 1.0 and True, or 0.0 and -0.0, are different ones."""
    numbers = (1, 1.0, True, 0.0, -0.0, 0, False, torch.tensor(1), torch.tensor(1.0))

    def tried() -> list[Any]:
        found: list[Any] = []
        for call in (operator.mul, torch.maximum, torch.clamp, operator.add, operator.eq):
            for kind in ("bytes", "v1", "half"):
                for one in numbers:
                    try:
                        found.append(call(SOURCES[kind](), one))
                    except TypeError:
                        found.append(TypeError)
        return found

    expected = tried()
    with torch_sink.image_backend("device", device="cpu"):
        for made, stock in zip(tried(), expected, strict=True):
            if isinstance(stock, torch.Tensor):
                assert_same_bits(made.materialize() if isinstance(made, Handle) else made, stock)
            else:
                assert made is stock


def test_thresholds_of_rounded_bytes_run_in_stock_code() -> None:
    """A blur's last bits depend on the processor: a limit keeps a difference as small as it is, a comparison does not."""
    with torch_sink.image_backend("device", device="meta"):
        blurred = F.to_tensor(F.gaussian_blur(F.hflip(_PHOTO), 3))
        assert blurred.clamp(0.1, 0.9).is_recording
        assert (blurred * 2).half().is_recording
        for call in (lambda x: x > 0.5, torch.round, lambda x: x.sqrt(), lambda x: x.masked_fill(x.clone() == 0, 1)):
            blurred = F.to_tensor(F.gaussian_blur(F.hflip(_PHOTO), 3))
            with (
                torch_sink.image_backend("device", device="meta", strict=True),
                pytest.raises(Exception, match="stock"),
            ):
                call(blurred)


def test_floats_that_no_table_holds() -> None:
    """Kernels cut off what leaves [0, 1], as a bicubic filter does; other limits run in stock code."""
    resize = v2.Resize((13, 17), v2.InterpolationMode.BICUBIC)
    to_floats = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), resize])
    check_pipeline(
        v2.Compose([to_floats, v2.Lambda(lambda x: x.clamp(0, 1)), v2.ColorJitter(hue=0.2)]), [lambda: F.hflip(_PHOTO)]
    )
    with torch_sink.image_backend("device", device="cpu"):
        other = to_floats(F.hflip(_PHOTO)).clamp(0.1, 0.9)
        assert not isinstance(other, Handle)
        assert torch_sink.fallback_report()


def test_types_of_torchvision() -> None:
    """With `set_return_type`, what a function makes of an image is an image."""
    for kind in ("Tensor", "TVTensor"):
        for call in (
            lambda x: x.clamp(0, 0.5),
            torch.clone,
            lambda x: x.clone(),
            lambda x: x.detach(),
            lambda x: x > 0.5,
        ):
            with tv_tensors.set_return_type(kind):
                expected = call(SOURCES["v2"]())
                with torch_sink.image_backend("device", device="cpu"):
                    made = call(SOURCES["v2"]())
                    assert isinstance(made, Handle)
                    assert_same_bits(made.materialize(), expected)
    expected = torch.where(SOURCES["v2"]() > 0.5, SOURCES["v2"](), 0)
    with torch_sink.image_backend("device", device="cpu"), tv_tensors.set_return_type("TVTensor"):
        image = SOURCES["v2"]()
        assert_same_bits(torch.where(image > 0.5, image, 0).as_subclass(torch.Tensor), expected)


def test_limits_that_are_drawn() -> None:
    """For each image others, by torch's generator, in the order of stock code."""
    limit = v1.Lambda(lambda x: x.clamp(torch.rand(()).item() / 4, 1 - torch.rand(()).item() / 4))
    pipeline = v1.Compose([v1.RandomCrop(8), v1.ToTensor(), limit, v1.RandomHorizontalFlip()])
    check_pipeline(pipeline, [lambda: _PHOTO] * 4, dtypes=(torch.bfloat16,))


def test_default_dtype() -> None:
    """`torch.where` makes floats of the default dtype, of which kernels make float32 alone."""
    image = Image.new("RGB", (3, 3), (7, 8, 9))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        expected = torch.where(F.pil_to_tensor(image) > 8, 1.0, 0.0)
        with torch_sink.image_backend("device", device="cpu"):
            made = torch.where(F.pil_to_tensor(F.hflip(image)) > 8, 1.0, 0.0)
            assert_same_bits(made, expected)
    finally:
        torch.set_default_dtype(before)
