"""Pipelines on float32 tensors, on the CPU path: the same bits as stock torchvision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import transforms as v1
from torchvision.transforms import functional as F1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F2

import torch_sink
from image.cases import rgb_images
from image.cases_float import FLOAT
from image.check import check_pipeline
from torch_sink.image import sum_order
from torch_sink.image.lower.lowering import lower
from torch_sink.image.ops import Op
from torch_sink.image.plan.atoms import FloatKind
from torch_sink.image.sum_order import sum_in_order, summing_threads


@pytest.mark.parametrize("name", FLOAT)
def test_rgb(name: str) -> None:
    pipeline, promise = FLOAT[name]
    check_pipeline(pipeline(), rgb_images(), seed=1, promise=promise)


@pytest.mark.parametrize("name", [name for name in FLOAT if "hue makes of values below 0" in name])
def test_a_hue_of_values_below_0_makes_nan(name: str) -> None:
    made = FLOAT[name][0]()(rgb_images()[0]())
    bytes_follow = made.dtype == torch.uint8 or "levels" in name
    assert made.isnan().any() != bytes_follow


@pytest.mark.parametrize("policy", [None, *v2.AutoAugmentPolicy])
def test_whatever_augmentations_draw_is_recorded(policy: v2.AutoAugmentPolicy | None) -> None:
    """In any order, and also where bytes follow."""
    shuffled = v2.RandomOrder(
        [
            v2.RandAugment(3) if policy is None else v2.AutoAugment(policy),
            v2.TrivialAugmentWide(),
            v2.ColorJitter(0.5, 0.5, 0.5, 0.3),
            v2.RandomPhotometricDistort(p=1.0),
        ]
    )
    pipeline = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), shuffled])
    image = rgb_images()[0]()
    with torch_sink.image_backend("device", device="cpu", strict=True):
        for seed in range(25):
            torch.manual_seed(seed)
            assert v2.functional.to_dtype(pipeline(image), torch.uint8, scale=True).is_recording


UNRECORDED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a threshold after a contrast in columns": lambda image: F1.solarize(
        F2.adjust_contrast(F2.rotate(image, 90, expand=True), 0.5), 0.3
    ),
    "bytes after a contrast of a part in gray": lambda image: F2.to_dtype(
        F2.adjust_contrast(F2.crop(F2.rgb_to_grayscale(image), 2, 3, 9, 8), 0.5), torch.uint8, scale=True
    ),
    "levels after a gamma": lambda image: F2.posterize(F2.adjust_gamma(image, 0.5), 3),
    "bytes of half precision": lambda image: F2.to_dtype(F2.to_dtype(image, torch.float16), torch.uint8, scale=True),
    "half precision, normalized": lambda image: F1.normalize(
        F1.convert_image_dtype(image, torch.float16), [0.5], [0.3]
    ),
    "a hue of what is nearly infinite": lambda image: F1.adjust_hue(F2.adjust_gamma(F1.pad(image, 1, fill=1e9), 4.0), 0.2),
    "a gamma of values around 0 that differ in the last bits": lambda image: F1.adjust_gamma(
        F1.normalize(F1.adjust_gamma(F1.resize(image, [9, 8]), 0.7), [0.5], [0.5]), 2.5
    ),
    "a small gamma after another one": lambda image: F1.adjust_gamma(
        F1.invert(F1.adjust_gamma(F1.resize(image, [9, 8]), 0.7)), 0.6
    ),
    "a contrast of large values": lambda image: F1.adjust_contrast(F1.pad(image, 1, fill=1e9), 0.5),
    "a threshold after a gamma of resized values": lambda image: F1.solarize(
        F1.adjust_gamma(F1.resize(image, [9, 8]), 0.7), 0.5
    ),
    "one column so high that threads share it": v1.Resize((11_000, 1)),
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_what_the_kernels_cannot_promise_runs_in_stock_code(name: str) -> None:
    image = rgb_images()[0]
    expected = UNRECORDED[name](F1.to_tensor(image()))
    with torch_sink.image_backend("device", device="cpu"):
        made = UNRECORDED[name](F1.to_tensor(image()))
        assert torch_sink.fallback_report()
        assert torch.equal(made.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_a_contrast_on_an_unknown_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch does not add as it does on x86-64, a threshold after a contrast runs in stock code."""
    monkeypatch.setattr(sum_order, "_is_order_known", lambda: False)
    with torch_sink.image_backend("device", device="cpu"):
        F1.solarize(F1.adjust_contrast(F1.to_tensor(rgb_images()[0]()), 0.5), 0.3)
        assert torch_sink.fallback_report()


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 13, 40])
def test_the_order_in_which_torch_adds(threads: int) -> None:
    counts = [*range(1, 80), 511, 512, 8191, 8200, 32767, 32768, 32769, 70_001, 300_007]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count in counts:
            numbers = np.random.default_rng(count).normal(size=count).astype(np.float32)
            assert torch.from_numpy(numbers).sum().item() == sum_in_order(numbers, threads), count
            assert summing_threads(count) == (threads if count > 32768 else 1)
    finally:
        torch.set_num_threads(before)


def test_a_contrast_keeps_the_order_only_before_a_threshold() -> None:
    def order_of(*ops: Op) -> tuple[int, ...]:
        begin = Op("to_tensor"), Op("v1.float_contrast", (0.5, 2))
        atoms = lower(300, 200, 3, [*begin, *ops]).float_atoms
        return next(atom.values[5:] for atom in atoms or () if atom.kind == FloatKind.CONTRAST)

    assert order_of() == order_of(Op("v1.adjust_saturation", (0.5,))) == ()
    assert (
        order_of(Op("v1.solarize", (0.5,))) == order_of(Op("v1.convert_image_dtype", (torch.uint8,))) == (2, 2, 30_000)
    )


@pytest.mark.parametrize("functional", [F1, F2])
@pytest.mark.parametrize(("size", "records"), [((64, 64), True), ((64, 65), False)])
def test_how_positions_round_beyond_128_rows_and_columns_is_up_to_torch(
    functional: Any, size: tuple[int, int], records: bool
) -> None:
    """Of a bilinear resize without antialiasing it depends on threads, channels and release."""
    with torch_sink.image_backend("device", device="meta"):
        handle = functional.resize(F1.to_tensor(rgb_images()[0]()), list(size), antialias=False)
        assert getattr(handle, "is_recording", False) == records
        assert bool(torch_sink.fallback_report()) != records
