"""The transforms that torchvision ships with its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchvision.models import get_model_weights, list_models
from torchvision.transforms import _presets, functional

import torch_sink
from image.cases import encoded, opener
from image.check import assert_same_bits, check_pipeline

pytestmark = pytest.mark.halved

PHOTOGRAPHS = [opener(encoded(150, 113, 1, quality=90)), opener(encoded(113, 150, 2))]


def presets(*kinds: type) -> dict[str, Callable[[], Any]]:
    """{name of some weights: preset}, one for each set of arguments that any weights of torchvision give these classes."""
    found: dict[str, tuple[str, Callable[[], Any]]] = {}
    for name in list_models():
        for weights in get_model_weights(name):
            preset = weights.transforms()
            if isinstance(preset, kinds):
                found.setdefault(repr(preset), (str(weights), weights.transforms))
    return dict(found.values())


CLASSIFICATION = presets(_presets.ImageClassification)
DENSE = presets(_presets.ObjectDetection, _presets.SemanticSegmentation)
FLOW = presets(_presets.OpticalFlow)
VIDEO = presets(_presets.VideoClassification)


@pytest.mark.parametrize("name", CLASSIFICATION)
@pytest.mark.sampled(14)
def test_classification(name: str) -> None:
    check_pipeline(CLASSIFICATION[name](), PHOTOGRAPHS)


@pytest.mark.parametrize("name", DENSE)
def test_dense_prediction(name: str) -> None:
    """Results as large as the image: one at a time."""
    for open_image in PHOTOGRAPHS:
        check_pipeline(DENSE[name](), [open_image])


@pytest.mark.parametrize("name", FLOW)
def test_optical_flow(name: str) -> None:
    """Takes two images, and asks for their memory to be contiguous."""
    preset = FLOW[name]()
    expected = preset(PHOTOGRAPHS[0](), PHOTOGRAPHS[0]())
    with torch_sink.image_backend("device", device="cpu", strict=True):
        made = preset(PHOTOGRAPHS[0](), PHOTOGRAPHS[0]())
        for actual, stock in zip(made, expected, strict=True):
            assert_same_bits(actual.materialize(), stock)


@pytest.mark.parametrize("name", VIDEO)
def test_video(name: str) -> None:
    """Frames stacked by the user: uint8 [T, C, H, W]."""
    preset = VIDEO[name]()

    def clip() -> torch.Tensor:
        return preset(torch.stack([functional.pil_to_tensor(PHOTOGRAPHS[0]()) for _ in range(2)]))

    expected = clip()
    with torch_sink.image_backend("device", device="cpu"):
        assert_same_bits(clip(), expected)


def test_every_kind_of_preset_is_tested() -> None:
    kinds = {type(weights.transforms()).__name__ for name in list_models() for weights in get_model_weights(name)}
    assert kinds == set(_presets.__all__)
