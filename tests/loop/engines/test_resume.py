"""A run that is compiled or captured resumes bit for bit at every step; `test_accumulation` does the same in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from loop.engines.test_on_fake_cuda import UNCOMPILED
from loop.reference import assert_equal_training, make_model
from torch_sink.loop import JitConfig, LambdaCallback, StepLoop

EPOCHS, BATCHES, ACCUMULATE = 3, 10, 3


def make_loop(device: str, mode: str, config: JitConfig, seed: int = 0, steps_per_sync: int = 4) -> StepLoop:
    model = make_model(seed, dropout=0.0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return StepLoop(
        model,
        functional.cross_entropy,
        optimizer,
        mode=mode,
        jit_config=config,
        accumulate=ACCUMULATE,
        steps_per_sync=steps_per_sync,
        ema=0.9,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        schedule="step",
    )


def make_data() -> DataLoader[Any]:
    """Ten batches of an epoch, in an order that `set_epoch` decides."""
    images = torch.randn(8 * BATCHES, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(images, torch.arange(8 * BATCHES) % 5)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=2, rank=1, seed=5))


def check(make: Callable[..., StepLoop], positions: Any, folder: Path) -> None:
    whole, data = make(steps_per_sync=1), make_data()
    save = LambdaCallback(on_train_step_end=lambda _: whole.save(folder / str(whole.step_count), data))
    expected = whole.run(data, epochs=EPOCHS, callbacks=[save])
    assert len(expected.losses) == EPOCHS * BATCHES
    for position in positions:
        resumed, data = make(seed=4), make_data()
        assert resumed.resume(folder / str(position), data) == position
        history = resumed.run(data, epochs=EPOCHS)
        assert torch.equal(history.losses, expected.losses[position:]), position
        assert torch.equal(history.learning_rates, expected.learning_rates[position:]), position
        assert_equal_training((resumed.model, resumed.optimizer), (whole.model, whole.optimizer))
        assert_equal_training((resumed.ema_model(), resumed.optimizer), (whole.ema_model(), whole.optimizer))
        resumed.close()
    whole.close()


@pytest.mark.slow
def test_in_graph_mode(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    def make(**options: Any) -> StepLoop:
        return make_loop("cuda", "graph", UNCOMPILED, **options)

    check(make, range(1, EPOCHS * BATCHES + 1), tmp_path)


@pytest.mark.once
def test_in_compile_mode(tmp_path: Path) -> None:
    """Inside a window and at an epoch's last step; each run compiles anew."""

    def make(**options: Any) -> StepLoop:
        return make_loop("cpu", "compile", JitConfig(), **options)

    check(make, (2, 10), tmp_path)
