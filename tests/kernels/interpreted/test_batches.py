"""Batches that wait for the device: the tests of the CPU path once more, and what only a waiting batch does."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from image.backend.test_workers import epochs_of, jpegs, some_images, what_workers_did
from image.check import assert_same_bits, device_in_use
from image.decode.test_bad_input import *  # noqa: F403
from image.handles.test_batch_of_one import test_one_image_is_moved  # noqa: F401
from image.run.test_collate import *  # noqa: F403
from image.run.test_collate import images
from image.worker_data import train_transform
from torch.utils.data import default_collate

import torch_sink
from torch_sink.image.run.batch import LazyBatch

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.mark.parametrize(("start_method", "workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow)])
def test_workers_decode_nothing_and_batches_equal_stock(
    photos: Path, tmp_path: Path, start_method: str, workers: int
) -> None:
    dataset = some_images(photos, train_transform())
    expected = epochs_of(dataset, num_workers=workers, multiprocessing_context="fork")[:2]
    loader = {"num_workers": workers, "multiprocessing_context": start_method}
    with torch_sink.image_backend("device", device=device_in_use()):
        made = epochs_of(dataset, **loader)[:2]
        seen = what_workers_did(tmp_path, jpegs(photos, train_transform()), workers, start_method)
        for (images, targets), (stock_images, stock_targets) in zip(made, expected, strict=True):
            assert type(images) is LazyBatch
            assert_same_bits(images.to(device_in_use()).cpu(), stock_images)
            assert torch.equal(targets, stock_targets)
    assert seen == [{"decodes": 0, "cuda": False, "kernels": False}] * workers


# Loads torch anew, which takes seconds; every day, a spawned worker of `image/backend/test_workers.py` shows the same.
@pytest.mark.slow
def test_recording_and_collating_import_no_kernels() -> None:
    code = """
import sys, torch
sys.path.insert(0, "tests")
from image.run.test_collate import images
from image.worker_data import kernel_modules
from torch.utils.data import default_collate
import torch_sink
with torch_sink.image_backend("device", device=sys.argv[1]):
    batch = default_collate(images())
    assert not kernel_modules()
    batch.to(sys.argv[1])
    assert "torch_sink.triton_kernels.stages.stage" in sys.modules
"""
    finished = subprocess.run(
        [sys.executable, "-c", code, device_in_use()], capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr


def test_a_waiting_batch_crosses_pickle_and_copies() -> None:
    expected = default_collate(images())
    with torch_sink.image_backend("device", device=device_in_use()):
        batch = default_collate(images())
        for other in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch), copy.copy(batch)):
            assert_same_bits(other.to(device_in_use()).cpu(), expected)


def test_an_empty_tail(tmp_path: Path) -> None:
    """Rows of a given tensor beyond the batch are left alone."""
    expected = default_collate(images())
    with torch_sink.image_backend("device", device=device_in_use()):
        batch = default_collate(images())
        out = torch.full((5, 3, 14, 15), 7.0, device=device_in_use())
        made, rows = batch.__torch_sink_execute__(device_in_use(), out=out)
        assert rows is None
        assert_same_bits(made.cpu(), expected)
        assert made.data_ptr() == out.data_ptr()
        assert (out[3:] == 7.0).all()


def test_using_a_batch_before_it_moves_is_reported() -> None:
    with torch_sink.image_backend("device", device=device_in_use()):
        batch = default_collate(images())
        assert_same_bits(batch * 1, default_collate(images()).to("cpu") * 1)
        assert "used on the CPU before it was moved" in str(torch_sink.fallback_report())
    with torch_sink.image_backend("device", device=device_in_use(), strict=True):
        batch = default_collate(images())
        with pytest.raises(torch_sink.UnsupportedOperation, match="before it was moved"):
            batch * 1
