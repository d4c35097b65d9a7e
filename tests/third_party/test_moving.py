"""Lightning and Accelerate: they move batches to the device, and shard them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from image.worker_data import train_transform
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.datasets import ImageFolder

import torch_sink
from torch_sink.image.run.batch import LazyBatch

REASON = "the extra third-party is not installed"
CLASSES, SIZE = 4, 20

pytestmark = pytest.mark.filterwarnings("ignore")


def test_accelerate_is_given_a_data_loader_not_a_sink_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare` returns a SinkLoader unsharded, so it says what to wrap; a sharded loader, or one process, is fine."""
    accelerate = pytest.importorskip("accelerate", reason=REASON)
    accelerator = accelerate.Accelerator(cpu=True)
    source = DataLoader(range(8), batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(accelerator.prepare(torch_sink.SinkLoader(source)))
    monkeypatch.setitem(accelerate.PartialState._shared_state, "num_processes", 2)
    prepared = accelerator.prepare(torch_sink.SinkLoader(source))
    with pytest.warns(
        UserWarning, match=r"2 processes reads all samples.*SinkLoader\(accelerator\.prepare\(loader\)\)"
    ):
        list(prepared)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(prepared)
        sampler = DistributedSampler(range(8), num_replicas=2, rank=0)  # type: ignore[arg-type, var-annotated]
        list(torch_sink.SinkLoader(DataLoader(range(8), sampler=sampler)))
    shard = accelerate.data_loader.prepare_data_loader(source, num_processes=2, process_index=1, put_on_device=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded = torch_sink.SinkLoader(shard)
        monkeypatch.setattr(shard, "rng_types", None)
        assert [batch.tolist() for batch in sharded] == [[2, 3], [6, 7]]


def photographs(folder: Path) -> Subset[Any]:
    images = ImageFolder(str(folder), train_transform(), target_transform=lambda target: target % CLASSES)
    return Subset(images, range(10))


def loader_of(folder: Path) -> DataLoader[Any]:
    return DataLoader(photographs(folder), batch_size=4, shuffle=True)


def lightning_move(batch: Any, device: torch.device) -> Any:
    fabric = pytest.importorskip("lightning.fabric.utilities", reason=REASON)
    return fabric.move_data_to_device(batch, device)


def accelerate_move(batch: Any, device: torch.device) -> Any:
    utils = pytest.importorskip("accelerate.utils", reason=REASON)
    assert utils.find_batch_size(batch) == 4
    assert utils.find_device(batch) == torch.device("cpu")
    return utils.send_to_device(batch, device, non_blocking=True)


@pytest.mark.parametrize("move", [lightning_move, accelerate_move])
def test_moving_a_batch_makes_nothing_before_it_moves(generated_photos: Path, move: Callable[..., Any]) -> None:
    """A batch that only records raises when anything but its move is asked for."""
    with torch_sink.image_backend("device", device="meta"):
        batch = next(iter(loader_of(generated_photos)))
        assert type(batch[0]) is LazyBatch
        images, target = move(batch, torch.device("meta"))
        nested = move({"images": [batch[0]], "target": (batch[1], 4)}, torch.device("meta"))
    for made in (images, nested["images"][0]):
        assert type(made) is torch.Tensor
        assert (made.shape, made.dtype, made.device.type) == ((4, 3, SIZE, SIZE), torch.float32, "meta")
    assert target.device.type == nested["target"][0].device.type == "meta"
