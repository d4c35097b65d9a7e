"""What other libraries number by themselves goes on so; what waits for `set_epoch` is told by a training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from torch_sink.loop import LambdaCallback, StepLoop
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.once
COUNT, BATCH, EPOCHS = 24, 4, 3


def columns() -> TensorDataset:
    return TensorDataset(torch.arange(float(COUNT)).unsqueeze(1))


def by_fabric() -> Any:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    sampler = DistributedSampler(columns(), num_replicas=2, rank=0, seed=3)
    return fabric.setup_dataloaders(DataLoader(columns(), BATCH, sampler=sampler))


def by_accelerate() -> Any:
    utils = pytest.importorskip("accelerate.utils")
    config = utils.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=4)
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True, dataloader_config=config)
    return accelerator.prepare(DataLoader(columns(), BATCH, shuffle=True))


def by_hugging_face() -> DataLoader[Any]:
    """A stream, whose program calls `set_epoch`."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [[float(number)] for number in range(COUNT)]})
    stream = rows.to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=8).with_format("torch")
    return DataLoader(stream, BATCH, collate_fn=lambda samples: [torch.stack([one["x"] for one in samples])])


def as_lists(batches: Any) -> list[Any]:
    return [batch[0].tolist() for batch in batches]


def numbered_by_itself(make: Callable[[], Any]) -> list[Any]:
    loader = make()
    return [as_lists(loader) for _ in range(EPOCHS)]


def numbered_by_hand(make: Callable[[], Any]) -> list[Any]:
    loader, passes = make(), []
    for epoch in range(EPOCHS):
        loader.dataset.set_epoch(epoch)
        passes.append(as_lists(loader))
    return passes


class Seeing(nn.Module):
    """Notes what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(1)), list[Any]()

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(inputs.tolist())
        return inputs * self.weight


def make_loop() -> StepLoop:
    model = Seeing()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    return StepLoop(model, None, optimizer, forward=lambda model, batch: model(batch[0]).mean(), steps_per_sync=1)


KINDS = {by_fabric: numbered_by_itself, by_accelerate: numbered_by_itself, by_hugging_face: numbered_by_hand}


@pytest.mark.parametrize("make", KINDS)
def test_a_training_sees_what_a_plain_loop_sees_and_resumes(make: Callable[[], Any], tmp_path: Path) -> None:
    passes = KINDS[make](make)
    expected = [batch for one in passes for batch in one]
    assert passes[0] != passes[1]
    loader, loop = make(), make_loop()
    save = LambdaCallback(on_train_step_end=lambda _: loop.save(tmp_path / str(loop.step_count), loader))
    loop.run(loader, epochs=1, callbacks=[save])
    loop.run(loader, epochs=EPOCHS - 1)
    assert loop.model.seen == expected
    length = len(passes[0])
    for step in (2, length):
        loader, loop = make(), make_loop()
        assert loop.resume(tmp_path / str(step), loader) == step
        loop.run(loader, epochs=EPOCHS)
        assert loop.model.seen == expected[step:]


@pytest.mark.parametrize("make", [by_fabric, by_accelerate])
def test_a_loop_by_hand_sees_what_a_plain_loop_sees(make: Callable[[], Any]) -> None:
    assert numbered_by_itself(lambda: SinkLoader(make())) == numbered_by_itself(make)
