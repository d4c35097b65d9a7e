"""Pipelines on float32 tensors, on the CPU path: the same bits as stock torchvision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2.functional import _geometry as v2_geometry

import torch_sink
from image.cases import EXACT_ON_BYTES, SIZE, rgb_images
from image.cases_float import BICUBIC, FALLS_BACK, FLOAT
from image.check import assert_same_bits, check_pipeline
from torch_sink.image.handles.tensor import Handle

pytestmark = pytest.mark.halved


@pytest.mark.parametrize("name", FLOAT)
def test_rgb(name: str) -> None:
    check_pipeline(FLOAT[name](), rgb_images(), seed=1)


@pytest.mark.parametrize("name", FALLS_BACK)
def test_what_would_enlarge_a_difference_runs_in_stock_code(name: str) -> None:
    image = rgb_images()[0]
    torch.manual_seed(3)
    expected = FALLS_BACK[name]()(image())
    with torch_sink.image_backend("device", device="cpu"):
        torch.manual_seed(3)
        made = FALLS_BACK[name]()(image())
        assert torch_sink.fallback_report()
        assert_same_bits(made.materialize() if isinstance(made, Handle) else made, expected)


@pytest.mark.parametrize("mode", [InterpolationMode.NEAREST, BICUBIC])
def test_exact_operations_before_a_threshold_are_recorded(mode: InterpolationMode) -> None:
    """Pillow's own rotations and blurs, and those of tensors that only move bytes."""
    before = [
        v2.RandomRotation(20, mode),
        lambda image: image.filter(ImageFilter.GaussianBlur(2)),
        v2.RandomSolarize(99, 1.0),
    ]
    check_pipeline(v2.Compose([v2.Resize(SIZE), *before, v2.ToImage()]), rgb_images()[:1])
    resized = v2.RandomResizedCrop(SIZE, interpolation=EXACT_ON_BYTES)
    moved = [v2.RandomRotation(20), resized, v2.ColorJitter(0.3, 0.3), v2.RandomEqualize(1.0)]
    check_pipeline(v2.Compose([v2.ToImage(), *moved]), rgb_images()[:1])


def test_bytes_that_stock_code_resizes_in_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors without AVX2: recorded, but for what would turn a difference in the last bits into a large one."""
    monkeypatch.setattr(v2_geometry, "_do_native_uint8_resize_on_cpu", lambda interpolation: False)
    check_pipeline(FLOAT["v2 bytes again at the start"](), rgb_images(), seed=1)
    pipeline = v2.Compose([v2.ToImage(), v2.Resize(SIZE), v2.RandomSolarize(99, 1.0)])
    expected = pipeline(rgb_images()[0]())
    with torch_sink.image_backend("device", device="cpu"):
        made = pipeline(rgb_images()[0]())
        assert [operation for operation, _ in torch_sink.fallback_report().counts] == ["solarize"]
        assert_same_bits(made.materialize() if isinstance(made, Handle) else made, expected)


def test_scaled_bytes_become_bytes_again() -> None:
    """As long as they were only moved."""
    begin = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    moves = [
        v2.RandomHorizontalFlip(1.0),
        v2.RandomCrop(9),
        v2.RandomVerticalFlip(1.0),
        v2.ToDtype(torch.uint8, scale=True),
    ]
    check_pipeline(v2.Compose([*begin, *moves, v2.RandomEqualize(1.0)]), rgb_images()[:2])
    check_pipeline(v1.Compose([v1.ToTensor(), v1.RandomCrop(9), v1.ToPILImage(), v1.ToTensor()]), rgb_images()[:2])


def test_every_byte_comes_back() -> None:
    """What lets a call that turns scaled bytes back be no work."""
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    floats = v1.functional.to_tensor(ramp)
    assert v1.functional.to_pil_image(floats).tobytes() == ramp.tobytes()
    for convert in (v1.functional.convert_image_dtype, lambda image, dtype: v2.functional.to_dtype(image, dtype, True)):
        assert torch.equal(convert(floats, torch.uint8), v1.functional.pil_to_tensor(ramp))
