"""The parity table: the kernels keep what is promised of each operation, and the comparison sees where they do not."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from image.cases import CORE, rgb_images
from image.check import check_pipeline, device_in_use
from image.examples import REFERENCES
from image.parity import ImageKind, measure, promise_of
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import _geometry

from torch_sink.image.core import lowering
from torch_sink.image.core.lowering import ResizeWeights
from torch_sink.image.core.ops import Op
from torch_sink.image.operations import resize as lower_resize
from torch_sink.image.program import launches, plan
from torch_sink.image.run import device
from torch_sink.triton_kernels.stages import stage


@pytest.mark.halved
@pytest.mark.parametrize("reference", REFERENCES)
def test_promises_are_kept(reference: str) -> None:
    parity = measure([ImageKind("RGB", 11, 17)], references=[reference], device=device_in_use())
    assert len(parity.rows) >= 30
    assert not parity.broken_promises()


@pytest.mark.slow
@pytest.mark.parametrize("reference", REFERENCES)
def test_promises_are_kept_at_other_sizes(reference: str) -> None:
    images = [ImageKind("RGB", 1, 23), ImageKind("L", 19, 2), ImageKind("RGB", 47, 61), ImageKind("L", 47, 61)]
    draw = random.Random(reference)
    images += [ImageKind(mode, draw.randint(1, 96), draw.randint(1, 96)) for mode in ("RGB", "RGB", "L")]
    parity = measure(images, references=[reference], seed=1, device=device_in_use())
    assert not parity.broken_promises()


@pytest.mark.slow
@pytest.mark.parametrize("reference", REFERENCES)
def test_promises_are_kept_at_the_size_of_photographs(reference: str) -> None:
    parity = measure([ImageKind("RGB", 375, 500)], references=[reference], seed=3, device=device_in_use())
    assert len(parity.rows) >= 30
    assert not parity.broken_promises()


# --- negative controls


@pytest.mark.once
def test_a_wrong_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = stage.run_stage

    def flips_a_bit(workspace: torch.Tensor, output: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        stock(workspace, output, *args, **kwargs)
        if output.dtype == torch.uint8:
            output.flatten()[0] ^= 1

    monkeypatch.setattr(stage, "run_stage", flips_a_bit)
    assert _broken("v1 uint8") >= {"crop"}  # the first of its batch


@pytest.mark.once_on_oldest
def test_a_wrong_entry_of_a_table_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = lowering.value_planes

    def wrong(*args: Any) -> tuple[np.ndarray, ...]:
        planes = [plane.view(np.float32).copy() for plane in stock(*args)]
        for plane in planes:
            plane[100:140] += 1
        return tuple(plane.view(np.int32) for plane in planes)

    monkeypatch.setattr(lowering, "value_planes", wrong)
    monkeypatch.setattr(lowering, "_ending", lowering._ending.__wrapped__)  # which remembers right ones
    assert "normalize" in _broken("v1 float32")


TRAIN = CORE["v1 imagenet train"]


def check_train() -> None:
    check_pipeline(TRAIN(), rgb_images()[:2], seed=1)


def test_nothing_wrong() -> None:
    check_train()


def test_one_flipped_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = stage.run_stage

    def flips_a_bit(workspace: torch.Tensor, output: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        stock(workspace, output, *args, **kwargs)
        output.view(torch.int32).flatten()[77] ^= 1

    monkeypatch.setattr(stage, "run_stage", flips_a_bit)
    with pytest.raises(AssertionError, match="1 of 3456 values differ"):
        check_train()


def test_one_tap_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lower_resize, "ResizeWeights", lambda old, new, taps, *more: ResizeWeights(old, new, taps - 2, *more)
    )
    monkeypatch.setattr(plan, "_kept", {})
    with pytest.raises(AssertionError, match="values differ"):
        check_train()


def test_a_tile_that_nobody_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = launches.lay_out_launches

    def one_less(*args: Any) -> Any:
        found, arrays = stock(*args)
        return [[launch._replace(begin=launch.begin + 1) for launch in each] for each in found], arrays

    monkeypatch.setattr(launches, "lay_out_launches", one_less)
    with pytest.raises(AssertionError, match=r"values differ.*nan"):
        check_train()


def test_pixels_that_lie_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = device.places_of

    def red_alone(*args: Any) -> Any:
        places, owners = stock(*args)
        places[:, 3] = 0  # from channel to channel; any other place could lie outside of the image
        return places, owners

    monkeypatch.setattr(device, "places_of", red_alone)
    with pytest.raises(AssertionError, match="values differ"):
        check_train()


def test_another_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    transform = TRAIN()
    calls = []

    def draws_more(image: Any) -> Any:
        calls.append(image)
        if len(calls) == 4:
            torch.rand(1)
        return transform(image)

    with pytest.raises(AssertionError, match="generator was used differently"):
        check_pipeline(draws_more, rgb_images()[:2], seed=1)


def _broken(reference: str) -> set[str]:
    parity = measure([ImageKind("RGB", 3, 5)], references=[reference], device=device_in_use())
    return {row.operation for row in parity.broken_promises()}


_BILINEAR, _NEAREST = InterpolationMode.BILINEAR, InterpolationMode.NEAREST
# Where stock code resizes bytes as bytes; torchvision 0.23 does not on processors with AVX512.
_OF_BYTES = (0, 1) if _geometry._do_native_uint8_resize_on_cpu(_BILINEAR) else (1, 0.99)


@pytest.mark.parametrize(
    ("call", "is_float", "largest", "equal_share"),
    [
        (Op("v1.hflip"), False, 0, 1), (Op("v1.hflip"), True, 0, 1),
        (Op("pil.resize", ((3, 4), 3)), False, 0, 1), (Op("pil.transform", ((3, 4), 0, (), 2, None)), False, 0, 1),
        (Op("v2.gaussian_blur", ((3, 5), (1.0, 1.0))), False, 1, 0.99),
        (Op("v2.adjust_brightness", (1.5,)), False, 0, 1), (Op("v2.equalize"), False, 0, 1),
        (Op("v2.resize", ((3, 4), _BILINEAR, True)), False, *_OF_BYTES), (Op("v1.resize", ((3, 4), _BILINEAR, True)), False, 1, 0.99),
        (Op("v1.adjust_hue", (0.1,)), False, 1, 0.999), (Op("v1.affine", ((), "bilinear", None)), False, 1, 0.99),
        (Op("v2.rotate", (1.0, None, None, "nearest", None)), False, math.inf, 0.99),
        (Op("v2.adjust_sharpness", (1.5,)), True, 4e-6, 0), (Op("v2.affine", ("bilinear", None)), True, 1e-4, 0),
        (Op("v1.resize", ((3, 4), _BILINEAR, True)), True, 4e-6, 0), (Op("v1.resize", ((3, 4), _BILINEAR, False)), True, 1e-4, 0),
        (Op("v1.resize", ((3, 4), _NEAREST, True)), True, 0, 1),
    ],
)  # fmt: skip
def test_what_is_promised(call: Op, is_float: bool, largest: float, equal_share: float) -> None:
    assert promise_of([Op("v1.hflip"), call], is_float) == (largest, equal_share)
