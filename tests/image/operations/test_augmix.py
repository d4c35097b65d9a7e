"""AugMix: recorded with torchvision's own draws, the same bits on the CPU path, and stock code where nothing records."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import torch_sink
from image.augmix_cases import FILL_BY_TYPE, INPUTS, SETTINGS, SIZE, WAYS, images
from image.cases import gray_images
from image.check import assert_same_bits, check_pipeline, run

pytestmark = pytest.mark.halved


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(setting: str, kind: str) -> None:
    check_pipeline(INPUTS[kind](SETTINGS[setting]), images(2), seed=len(setting))


@pytest.mark.parametrize("name", WAYS)
def test_in_pipelines(name: str) -> None:
    check_pipeline(WAYS[name](), images(4), seed=1)


@pytest.mark.parametrize("kind", INPUTS)
def test_gray(kind: str) -> None:
    check_pipeline(INPUTS[kind]({"severity": 10, "fill": [9]}), gray_images()[:4], seed=2)


@pytest.mark.parametrize("kind", ["v2 Pillow images", "v2 tensors", "v2 tv_tensors"])
def test_a_fill_for_each_type(kind: str) -> None:
    """Stock code looks the fill up by the type of what it works on, which is a pure tensor."""
    check_pipeline(INPUTS[kind]({"severity": 10, "fill": FILL_BY_TYPE}), images(6), seed=3)


def test_many_seeds() -> None:
    """Enough draws to meet every pair of operations."""
    pipeline = v2.Compose([v2.Resize((6, 7)), v2.ToImage(), v2.AugMix(10)])
    other = v1.Compose([v1.Resize((6, 7)), v1.AugMix(10), v1.PILToTensor()])
    for seed in range(24):
        check_pipeline(pipeline if seed % 2 else other, images(2), seed=seed)


def test_a_detection_sample_keeps_its_structure() -> None:
    def sample(image: Any) -> Any:
        return v2.AugMix()({"image": F.resize(image, SIZE), "label": 7})["image"]

    check_pipeline(v2.Compose([sample, v2.ToImage()]), images(3))


def test_a_recorded_image_is_small_and_crosses_pickle() -> None:
    expected = run(WAYS["v1, resized"](), images(1), 4)[0][0]
    with torch_sink.image_backend("device", device="meta", strict=True):
        handle = run(WAYS["v1, resized"](), images(1), 4)[0][0]
        assert [op.name for op in handle.lazy_ops][-3:] == ["to_pil_image", "to_tensor", "v1.normalize"]
        sent = pickle.dumps(handle)
        assert len(sent) < len(handle.lazy_source.data) + 4000
        assert_same_bits(pickle.loads(sent).materialize(), expected)


# --- stock code, exactly


def run_both(pipeline: Callable[[Any], Any]) -> tuple[Any, Any, str]:
    """Results in stock code and through the backend, and what that says it did not record; equal draws."""
    expected, state = run(pipeline, images(4), 6)
    with torch_sink.image_backend("device", device="cpu"):
        results, own_state = run(pipeline, images(4), 6)
        made = [result.materialize() if hasattr(result, "materialize") else result for result in results]
        report = str(torch_sink.fallback_report())
    assert torch.equal(state, own_state)
    return expected, made, report


class Brighter(v2.AugMix):
    """Weights that are no parts of a whole."""

    def _sample_dirichlet(self, params: torch.Tensor) -> torch.Tensor:
        return super()._sample_dirichlet(params) * 1.5


class Undefined(v1.AugMix):
    """Weights that are no numbers, as tiny values of `alpha` give them."""

    def _sample_dirichlet(self, params: torch.Tensor) -> torch.Tensor:
        return torch.where(super()._sample_dirichlet(params) < 0.5, torch.nan, 0.25)


@pytest.mark.parametrize(
    ("pipeline", "operation"),
    [
        (v2.Compose([v2.ToImage(), v2.AugMix(9, fill=300)]), "affine"),
        (v1.Compose([v1.PILToTensor(), v1.AugMix(9, fill=300)]), "affine"),
        (v2.Compose([v2.ToImage(), Brighter()]), "to"),
        (v1.Compose([v1.PILToTensor(), Undefined()]), "mul"),
        (v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.AugMix()]), "reshape"),
    ],
    ids=["fill v2", "fill v1", "brighter", "undefined", "floats"],
)
def test_what_is_not_recorded_equals_stock(pipeline: Any, operation: str) -> None:
    expected, made, report = run_both(pipeline)
    for result, tensor in zip(made, expected, strict=True):
        assert_same_bits(result, tensor)
    assert operation in report


def test_where_tensors_keep_their_type() -> None:
    """Stock code then works on `tv_tensors.Image`, whose fill is another one."""
    with tv_tensors.set_return_type("TVTensor"):
        expected, made, _ = run_both(v2.Compose([v2.ToImage(), v2.AugMix(10, fill=FILL_BY_TYPE)]))
    for result, tensor in zip(made, expected, strict=True):
        assert_same_bits(result, tensor)


def test_views_elsewhere_share_memory_as_in_stock_code() -> None:
    def changed(image: Any) -> Any:
        batch = image.view(1, *image.shape)
        batch += 1
        return image

    expected, made, _ = run_both(v2.Compose([v2.PILToTensor(), changed]))
    for result, tensor in zip(made, expected, strict=True):
        assert_same_bits(result, tensor)
