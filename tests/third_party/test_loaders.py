"""The loaders of other libraries in a SinkLoader: their own batches, and nothing left behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from sink.ring.test_slabs import files_in_shared_memory, slab_files
from sink.simulated_device import ImmediateOps
from torch.utils.data import DataLoader, Dataset

from torch_sink.sink import SinkLoader
from torch_sink.sink import loader as loader_module
from torch_sink.sink.ring import DeviceRing

REASON = "the extra third-party is not installed"
BATCHES = 24

# From Python 3.12 on, starting a worker by fork warns when the process has threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


class Bytes(Dataset[Any]):
    """Images as timm's fast collate function takes them, larger than what is sent by value."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], int]:
        return np.full((3, 48, 48), index, np.uint8), index


def accelerate_shard(**options: Any) -> Any:
    accelerate = pytest.importorskip("accelerate", reason=REASON)
    return accelerate.Accelerator(cpu=True).prepare(DataLoader(Bytes(), 4, **options))


def accelerate_left_on_host(**options: Any) -> Any:
    accelerate = pytest.importorskip("accelerate", reason=REASON)
    accelerate.Accelerator(cpu=True)
    return accelerate.data_loader.prepare_data_loader(DataLoader(Bytes(), 4, **options), put_on_device=False)


def accelerate_dispatcher(**options: Any) -> Any:
    accelerate = pytest.importorskip("accelerate", reason=REASON)
    accelerate.Accelerator(cpu=True)
    loader = DataLoader(Bytes(), 4, **options)
    return accelerate.data_loader.prepare_data_loader(loader, dispatch_batches=True, put_on_device=True)


def timm_multi_epochs(**options: Any) -> Any:
    data = pytest.importorskip("timm.data.loader", reason=REASON)
    return data.MultiEpochsDataLoader(Bytes(), 4, **options)


def timm_prefetch(**options: Any) -> Any:
    data = pytest.importorskip("timm.data.loader", reason=REASON)
    return data.PrefetchLoader(
        DataLoader(Bytes(), 4, collate_fn=data.fast_collate, **options), device=torch.device("cpu")
    )


def torchdata_stateful(**options: Any) -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason=REASON)
    return stateful.StatefulDataLoader(Bytes(), 4, **options)


KINDS = [
    accelerate_shard,
    accelerate_left_on_host,
    accelerate_dispatcher,
    timm_multi_epochs,
    timm_prefetch,
    torchdata_stateful,
]


@pytest.fixture(autouse=True)
def no_slab_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert slab_files() == []
    assert files_in_shared_memory(os.getpid()) == []


@pytest.fixture(autouse=True)
def on_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device ring whose device is the host."""
    monkeypatch.setattr(loader_module, "make_slots", lambda form, *_: DeviceRing(3, form, ImmediateOps()))


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
@pytest.mark.parametrize("make", KINDS)
def test_batches_are_the_loader_s_own(make: Callable[..., Any], persistent: bool) -> None:
    expected = [list(batch) for batch in make(num_workers=0)]
    assert len(expected) == BATCHES
    with SinkLoader(make(num_workers=2, persistent_workers=persistent)) as loader:
        for _ in range(2):
            for batch, stock in zip(loader, expected, strict=True):
                torch.testing.assert_close(list(batch), stock, rtol=0, atol=0)
        if make is torchdata_stateful:
            assert loader._opener.pool.batches_received > BATCHES


def test_a_killed_worker_leaves_nothing() -> None:
    others = {child.pid for child in psutil.Process().children()}
    with SinkLoader(torchdata_stateful(num_workers=2)) as loader:
        batches = iter(loader)
        for _ in range(8):
            next(batches)
        pids = [child.pid for child in psutil.Process().children() if child.pid not in others]
        psutil.Process(pids[0]).kill()
        with pytest.raises(RuntimeError, match=str(pids[0])):
            list(batches)
        del batches
    gc.collect()
    assert files_in_shared_memory(*pids) == []
