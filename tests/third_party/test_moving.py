"""Lightning and Accelerate: they move batches to the device, and train to the same losses."""

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
from torch_sink.image.execute.batch import LazyBatch

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


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIZE * SIZE, CLASSES))


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


# --- moving


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
        assert isinstance(batch[0], LazyBatch)
        images, target = move(batch, torch.device("meta"))
        nested = move({"images": [batch[0]], "target": (batch[1], 4)}, torch.device("meta"))
    for made in (images, nested["images"][0]):
        assert type(made) is torch.Tensor
        assert (made.shape, made.dtype, made.device.type) == ((4, 3, SIZE, SIZE), torch.float32, "meta")
    assert target.device.type == nested["target"][0].device.type == "meta"


# --- training


def with_trainer(folder: Path) -> list[float]:
    lightning = pytest.importorskip("lightning", reason=REASON)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network, self.losses = network(), []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = loss_of(self.network, batch)
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader_of(folder))
    return module.losses


def with_fabric(folder: Path) -> list[float]:
    lightning = pytest.importorskip("lightning", reason=REASON)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    return _trained(model, optimizer, fabric.setup_dataloaders(loader_of(folder)), fabric.backward)


def with_accelerate(folder: Path) -> list[float]:
    accelerate = pytest.importorskip("accelerate", reason=REASON)
    accelerator = accelerate.Accelerator(cpu=True)
    model = network()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), loader_of(folder)
    )
    return _trained(model, optimizer, loader, accelerator.backward)


def _trained(model: Any, optimizer: Any, loader: Any, backward: Callable[[torch.Tensor], None]) -> list[float]:
    losses = []
    for _ in range(2):
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("train", [with_trainer, with_fabric, with_accelerate])
def test_training_gives_the_same_losses(generated_photos: Path, train: Callable[[Path], list[float]]) -> None:
    torch.manual_seed(11)
    expected = train(generated_photos)
    with torch_sink.image_backend("device", device="cpu", strict=True):
        torch.manual_seed(11)
        made = train(generated_photos)
    assert made == expected
    assert len(set(expected)) == 6
