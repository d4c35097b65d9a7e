"""Pipelines on float32 tensors through the kernels: the same bits as stock torchvision, or as close as promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from image.cases import MEAN, SIZE, STD, rgb_images
from image.cases_float import FLOAT
from image.check import check_pipeline
from torchvision.transforms import functional as F

from torch_sink.image.core.lowering import ResizeWeights
from torch_sink.image.core.ops import CLOSE
from torch_sink.image.operations import resize as lower_resize
from torch_sink.image.program import plan
from torch_sink.triton_kernels.stages import stage


@pytest.mark.parametrize("name", FLOAT)
def test_rgb(name: str) -> None:
    # One image or the other, for an interpreted kernel pays for each; below they share batches.
    image = rgb_images()[sum(map(ord, name)) % 2]
    check_pipeline(FLOAT[name](), [image], seed=1)


def some_in_floats(image: Any) -> Any:
    """Only wide images need float stages; all have a box of floats erased."""
    tensor = F.to_tensor(F.resize(image, SIZE))
    if image.width > 20:
        tensor = F.adjust_saturation(tensor, 2.0)
    tensor = F.erase(tensor, 2, 3, 4, 5, torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1))
    return F.normalize(F.hflip(tensor), MEAN, STD)


def test_images_that_need_floats_beside_others() -> None:
    check_pipeline(some_in_floats, rgb_images()[:2], dtypes=[torch.bfloat16])


@pytest.mark.parametrize("name", ["v1 train", "v2 photometric distortion"])
def test_batches(name: str) -> None:
    check_pipeline(FLOAT[name](), rgb_images()[:2], seed=2)


def test_one_tap_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lower_resize, "ResizeWeights", lambda old, new, taps, *more: ResizeWeights(old, new, taps - 2, *more)
    )
    monkeypatch.setattr(plan, "_kept", {})
    with pytest.raises(AssertionError, match="values differ"):
        check_pipeline(FLOAT["v1 resize"](), rgb_images()[:2])


def test_a_value_beyond_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = stage.run_stage

    def adds_a_little(workspace: Any, output: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        stock(workspace, output, *args, **kwargs)
        output.flatten()[77] += 2 * CLOSE

    monkeypatch.setattr(stage, "run_stage", adds_a_little)
    with pytest.raises(AssertionError, match="values differ by up to"):
        check_pipeline(FLOAT["v2 jitter"](), rgb_images()[:2])
