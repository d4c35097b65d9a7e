"""Samples with several views, through the kernels: their batches equal those of stock torchvision."""

from __future__ import annotations

from pathlib import Path

import pytest
from image.cases import write_classes
from image.check import device_in_use
from image.views import FORMS, SAMPLES, assert_equals, recorded

import torch_sink
from torch_sink.image.run.device import DecodedImages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classes(tmp_path_factory.mktemp("images"), SAMPLES)


@pytest.mark.parametrize("name", FORMS)
def test_samples_with_several_views(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, begin = [], DecodedImages.__init__
    monkeypatch.setattr(
        DecodedImages, "__init__", lambda images, *given: (decoded.append(images), begin(images, *given))[1]
    )
    form = FORMS[name]
    expected = form.load(folder)
    with torch_sink.image_backend("device", device=device_in_use(), strict=True):
        batch = form.load(folder)
        assert len(recorded(batch)) == len(form.images)
        assert_equals(batch, expected, device_in_use())
    assert len(decoded) == 1
