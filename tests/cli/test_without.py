"""What a fallback costs a data worker: `explain` measures it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import functional, v2

from torch_sink.cli import explain
from torch_sink.cli.photos import make_photo
from torch_sink.cli.pipelines import FolderImages, Pipeline, open_pipeline
from torch_sink.cli.worker_cost import cost_of_fallbacks

pytestmark = pytest.mark.once

FILES = 4
HEAD = [v1.Resize(96), v1.CenterCrop(64)]


def negative(image: Image.Image) -> Image.Image:
    return Image.fromarray(255 - np.asarray(image))


@pytest.fixture(autouse=True)
def _few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "MEASURED_IMAGES", 2 * FILES)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for seed in range(FILES):
        make_photo(1280, 960, seed).save(root / f"{seed}.jpg", quality=90)
    return root


def pipeline_of(transform: Callable[[Any], Any], folder: Path) -> Pipeline:
    pipeline = open_pipeline("v1 train", folder, FILES)
    return pipeline._replace(dataset=FolderImages(sorted(folder.iterdir()), transform))


@pytest.mark.parametrize(
    ("transform", "names"),
    [
        (v1.Compose([*HEAD, v1.Lambda(negative), v1.ToTensor()]), ["negative"]),
        (v1.Compose([negative, *HEAD, v1.ToTensor()]), ["negative"]),
        (v1.Compose([v1.Compose([*HEAD, negative]), v1.ToTensor()]), ["negative"]),
        (v2.Compose([v2.Resize(96), v2.CenterCrop(64), v2.Lambda(negative), v2.ToImage()]), ["negative"]),
    ],
)
@pytest.mark.sampled(2)
def test_the_worker_with_fallbacks_and_without(transform: Any, names: list[str], photos: Path) -> None:
    stock = v1.Compose.__call__, v2.Compose.forward

    def is_dearer_with_them() -> bool:
        cost = cost_of_fallbacks(pipeline_of(transform, photos), 8)
        assert cost is not None
        assert cost.names == names
        assert (v1.Compose.__call__, v2.Compose.forward) == stock
        # A file of this size takes ten milliseconds to decode, and a recorded image tenths of one.
        return cost.with_them > 3 * cost.without

    assert any(is_dearer_with_them() for _ in range(4)), "never, which a busy machine does not explain"


def test_the_figure_without_is_that_of_the_chain_without_it(photos: Path) -> None:
    def is_that_of_the_shorter_chain() -> bool:
        chain = pipeline_of(v1.Compose([*HEAD, v1.Lambda(negative), v1.ToTensor()]), photos)
        shorter = explain.explain(pipeline_of(v1.Compose([*HEAD, v1.ToTensor()]), photos), "cuda")
        cost = explain.explain(chain, "cuda").cost
        assert shorter.cost is None
        assert cost is not None
        return cost.without == pytest.approx(shorter.worker.seconds, rel=0.6)

    assert any(is_that_of_the_shorter_chain() for _ in range(4)), "each time, which a busy machine does not explain"


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "transform",
    [
        lambda image: functional.to_tensor(negative(image)),  # in no chain
        v1.Compose([*HEAD, np.array, lambda array: functional.to_tensor(array[:8])]),  # an image has no [:8]
    ],
)
def test_what_cannot_be_measured_is_said(transform: Any, photos: Path) -> None:
    found = explain.explain(pipeline_of(transform, photos), "cuda")
    assert found.fallbacks
    assert found.cost is None
    assert "What they cost cannot be measured by itself" in explain.report_of(found).as_text()


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_report_says_it(device: str, photos: Path) -> None:
    found = explain.explain(pipeline_of(v1.Compose([*HEAD, negative, v1.ToTensor()]), photos), device)
    said = re.sub(r"\s+", " ", explain.report_of(found).as_text())
    assert found.cost is not None
    with_them, without = (f"{1e6 * each:,.0f} us" for each in found.cost[1:])
    assert f"an image costs {with_them} with negative, and {without} without" in said


@pytest.mark.usefixtures("unmeasured")
def test_nothing_is_measured_where_nothing_is_to_be_done(photos: Path) -> None:
    found = explain.explain(pipeline_of(v1.Compose([*HEAD, v1.ToTensor()]), photos), "cuda")
    assert (found.fallbacks, found.cost) == ({}, None)
