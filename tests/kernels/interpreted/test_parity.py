"""The parity table: the kernels keep what is promised for each operation and reference."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from torch_sink.cli.parity import ImageKind, measure, promise_of
from torch_sink.cli.parity_calls import REFERENCES
from torch_sink.image.lower import lowering
from torch_sink.triton_kernels.stages import stage


@pytest.mark.parametrize("reference", REFERENCES)
def test_promises_are_kept(reference: str) -> None:
    parity = measure([ImageKind("RGB", 11, 17)], references=[reference])
    assert len(parity.rows) >= 30
    assert not parity.broken_promises()


@pytest.mark.slow
@pytest.mark.parametrize("reference", REFERENCES)
def test_promises_are_kept_at_other_sizes(reference: str) -> None:
    images = [ImageKind("RGB", 1, 23), ImageKind("L", 19, 2), ImageKind("RGB", 47, 61), ImageKind("L", 47, 61)]
    draw = random.Random(reference)
    images += [ImageKind(mode, draw.randint(1, 96), draw.randint(1, 96)) for mode in ("RGB", "RGB", "L")]
    parity = measure(images, references=[reference], seed=1)
    assert not parity.broken_promises()


@pytest.mark.slow
@pytest.mark.parametrize("reference", REFERENCES)
def test_promises_are_kept_at_the_size_of_photographs(reference: str) -> None:
    parity = measure([ImageKind("RGB", 375, 500)], references=[reference], seed=3)
    assert len(parity.rows) >= 30
    assert not parity.broken_promises()


# --- negative controls


def test_a_wrong_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = stage.run_stage

    def flips_a_bit(workspace: torch.Tensor, output: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        stock(workspace, output, *args, **kwargs)
        if output.dtype == torch.uint8:
            output.flatten()[0] ^= 1

    monkeypatch.setattr(stage, "run_stage", flips_a_bit)
    assert _broken("v1 uint8") >= {"crop"}  # the first of its batch


def test_a_wrong_entry_of_a_table_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = lowering.value_planes

    def wrong(*args: Any) -> tuple[np.ndarray, ...]:
        planes = [plane.view(np.float32).copy() for plane in stock(*args)]
        for plane in planes:
            plane[100:140] += 1
        return tuple(plane.view(np.int32) for plane in planes)

    monkeypatch.setattr(lowering, "value_planes", wrong)
    assert "normalize" in _broken("v1 float32")


def _broken(reference: str) -> set[str]:
    parity = measure([ImageKind("RGB", 3, 5)], references=[reference])
    return {row.operation for row in parity.broken_promises()}


@pytest.mark.parametrize(
    ("operation", "reference", "largest", "equal_share"),
    [
        ("hflip", "Pillow", 0, 1), ("resize, BICUBIC", "Pillow", 0, 1), ("rotate, NEAREST", "Pillow", 0, 1),
        ("rotate, BILINEAR", "Pillow", 0, 1), ("gaussian_blur, 3 x 5", "Pillow", 1, 0.99), ("augmix", "Pillow", math.inf, 0.99),
        ("adjust_brightness", "v2 uint8", 0, 1), ("equalize", "v2 uint8", 0, 1), ("resize, BILINEAR", "v2 uint8", 0, 1),
        ("adjust_hue", "v1 uint8", 1, 0.999), ("affine, BILINEAR", "v1 uint8", 1, 0.99),
        ("rotate, NEAREST", "v2 uint8", math.inf, 0.99), ("resize, BILINEAR", "v1 uint8", 1, 0.99),
        ("adjust_brightness", "v2 float32", 4e-6, 0), ("affine, BILINEAR", "v2 float32", 1e-4, 0),
    ],
)  # fmt: skip
def test_what_is_promised(operation: str, reference: str, largest: float, equal_share: float) -> None:
    assert promise_of(operation, reference) == (largest, equal_share)
