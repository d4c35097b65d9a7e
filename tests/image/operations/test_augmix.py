"""AugMix runs in stock code: equal pixels and draws, one fallback for each image, and what follows it is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

import torch_sink
from image.cases import encoded, gray_images, opener
from image.check import Opener, Pipeline, assert_same_bits, run
from torch_sink.image.handles.tensor import Handle

pytestmark = pytest.mark.halved

SIZE = 14, 17
IMAGES = [opener(encoded(30 + at, 22 + 2 * at, at)) for at in range(4)]

INPUTS: dict[str, Callable[..., Pipeline]] = {
    "v1 Pillow images": lambda **options: _v1(v1.AugMix(**options), v1.RandomVerticalFlip(1.0), v1.ToTensor()),
    "v1 tensors": lambda **options: _v1(v1.PILToTensor(), v1.AugMix(**options), v1.RandomHorizontalFlip()),
    "v1 on tv_tensors": lambda **options: _v1(v2.ToImage(), v1.AugMix(**options)),
    "v2 Pillow images": lambda **options: _v2(v2.AugMix(**options), v2.RandomCrop(11), v2.ToImage()),
    "v2 tensors": lambda **options: _v2(v2.PILToTensor(), v2.AugMix(**options), v2.ColorJitter(0.4, 0.4)),
    "v2 tv_tensors": lambda **options: _v2(
        v2.ToImage(), v2.AugMix(**options), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)
    ),
    "v2 floats": lambda **options: _v2(v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.AugMix(**options)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "partial": {"all_ops": False, "severity": 10},
    "depth 2, width 5": {"chain_depth": 2, "mixture_width": 5, "severity": 7},
    "nearest": {"interpolation": InterpolationMode.NEAREST, "fill": 7.5, "severity": 9, "alpha": 3.0},
    "a color": {"fill": [1, 2, 3.5], "severity": 9},
}


def _v1(*transforms: Any) -> Pipeline:
    return v1.Compose([v1.Resize(SIZE), *transforms])


def _v2(*transforms: Any) -> Pipeline:
    return v2.Compose([v2.Resize(SIZE), *transforms])


def check_falls_back(pipeline: Pipeline, openers: list[Opener], seed: int) -> None:
    """Equal bits and draws, and AugMix is reported for each image."""
    expected, state = run(pipeline, openers, seed)
    with torch_sink.image_backend("device", device="cpu"):
        made, own_state = run(pipeline, openers, seed)
        assert torch.equal(default_collate(made), default_collate(expected))
        for result, tensor in zip(made, expected, strict=True):
            assert_same_bits(result.materialize() if isinstance(result, Handle) else result, tensor)
        counts = torch_sink.fallback_report().counts
    assert torch.equal(state, own_state)
    assert sum(count for (_, reason), count in counts.items() if "AugMix.forward" in reason) == len(openers)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(setting: str, kind: str) -> None:
    check_falls_back(INPUTS[kind](**SETTINGS[setting]), IMAGES, seed=len(setting))


@pytest.mark.parametrize("kind", INPUTS)
def test_gray(kind: str) -> None:
    check_falls_back(INPUTS[kind](severity=10, fill=[9]), gray_images()[:4], seed=2)


@pytest.mark.parametrize("kind", ["v2 Pillow images", "v2 tensors", "v2 tv_tensors"])
def test_a_fill_for_each_type(kind: str) -> None:
    """Stock code looks the fill up by the type of what it works on."""
    fill = {tv_tensors.Image: 200, torch.Tensor: 90, "others": 3}
    check_falls_back(INPUTS[kind](severity=10, fill=fill), IMAGES, seed=3)


@pytest.mark.parametrize("kind", ["v1 Pillow images", "v2 Pillow images"])
def test_what_follows_is_recorded(kind: str) -> None:
    with torch_sink.image_backend("device", device="meta"):
        made, _ = run(INPUTS[kind](), IMAGES, 4)
    assert all(isinstance(one, Handle) and len(one.lazy_recording.calls) == 2 for one in made)


@pytest.mark.parametrize("kind", INPUTS)
def test_strict_refuses_it_by_name(kind: str) -> None:
    with (
        torch_sink.image_backend("device", device="cpu", strict=True),
        pytest.raises(torch_sink.UnsupportedOperation, match=r"AugMix\.forward"),
    ):
        INPUTS[kind]()(IMAGES[0]())


def test_views_share_memory_as_in_stock_code() -> None:
    def changed(image: Any) -> Any:
        batch = image.view(1, *image.shape)
        batch += 1
        return image

    pipeline = v2.Compose([v2.PILToTensor(), changed])
    expected, _ = run(pipeline, IMAGES, 6)
    with torch_sink.image_backend("device", device="cpu"):
        made, _ = run(pipeline, IMAGES, 6)
    for result, tensor in zip(made, expected, strict=True):
        assert_same_bits(result, tensor)
