"""Samples with several views: pairs, targets, captions, and samples of two datasets, in all containers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import torch_sink
from image.cases import write_classes
from image.views import (
    FORMS,
    SAMPLES,
    assert_equals,
    assert_shared,
    in_slots,
    launched,
    made_there,
    on_cpu,
    recorded,
)

__all__ = ["launched"]

pytestmark = [pytest.mark.halved, pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")]

WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 1, "multiprocessing_context": "fork"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classes(tmp_path_factory.mktemp("images"), SAMPLES)


@pytest.mark.parametrize("workers", WORKERS, ids=["here", "worker"])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.sampled(8)
def test_each_file_travels_once_and_values_are_those_of_stock(folder: Path, name: str, workers: dict[str, Any]) -> None:
    form = FORMS[name]
    expected = form.load(folder, **workers)
    with torch_sink.image_backend("device", device="meta", strict=True):
        batch = form.load(folder, **workers)
    assert_shared(batch, len(form.images), SAMPLES)
    assert [len(one) for one in recorded(batch)] == [*form.images]
    assert_equals(on_cpu(batch), expected)


@pytest.mark.parametrize("name", FORMS)
def test_files_are_decoded_once(folder: Path, name: str, launched: Counter[str]) -> None:
    with torch_sink.image_backend("device", device="meta", strict=True):
        batch, other = (FORMS[name].load(folder) for _ in range(2))
    made_there(recorded(batch))
    assert launched["decoding"] == 1
    launched.clear()
    in_slots(recorded(other))
    assert launched["decoding"] == launched["prologue_kernel"] == 1
    stages = max(len(one.images.batch.launches) for one in recorded(other))
    assert launched["stage_kernel"] <= stages * len({one.dtype for one in recorded(other)})
