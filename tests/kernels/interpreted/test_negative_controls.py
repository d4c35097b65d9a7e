"""The comparison sees a wrong bit, a wrong tap, a wrong draw and a value that nobody wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from image.cases import CORE, rgb_images
from image.check import check_pipeline

from torch_sink.image.operations import resize as lower_resize
from torch_sink.image.program import launches
from torch_sink.image.run import device
from torch_sink.triton_kernels.stages import stage

TRAIN = CORE["v1 imagenet train"]


def check() -> None:
    check_pipeline(TRAIN(), rgb_images()[:2], seed=1)


def test_nothing_wrong() -> None:
    check()


def test_one_flipped_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = stage.run_stage

    def flips_a_bit(workspace: torch.Tensor, output: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        stock(workspace, output, *args, **kwargs)
        output.view(torch.int32).flatten()[77] ^= 1

    monkeypatch.setattr(stage, "run_stage", flips_a_bit)
    with pytest.raises(AssertionError, match="1 of 3456 values differ"):
        check()


def test_one_tap_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = lower_resize.tables.tap_count
    monkeypatch.setattr(lower_resize.tables, "tap_count", lambda *args: stock(*args) - 2)
    with pytest.raises(AssertionError, match="values differ"):
        check()


def test_a_tile_that_nobody_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = launches.lay_out_launches

    def one_less(*args: Any) -> Any:
        found, arrays = stock(*args)
        return [launch._replace(end=launch.end - 1) for launch in found], arrays

    monkeypatch.setattr(launches, "lay_out_launches", one_less)
    with pytest.raises(AssertionError, match=r"values differ.*nan"):
        check()


def test_pixels_that_lie_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = device.places_of
    monkeypatch.setattr(device, "places_of", lambda *args: (stock(*args)[0] + 1, stock(*args)[1]))
    with pytest.raises(AssertionError, match="values differ"):
        check()


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
