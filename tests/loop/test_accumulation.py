"""Accumulation: a window of `accumulate` steps ends with its epoch, and a run that ends inside one goes on there."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from loop.engines.test_on_fake_cuda import UNCOMPILED, assert_trained_alike
from loop.reference import assert_equal_training, make_batches, make_model
from torch_sink.amp import DynamicLossScaler
from torch_sink.errors import NonFiniteLoss
from torch_sink.loop import CheckpointConfig, LambdaCallback, LossMonitor, ModelCheckpoint, StepLoop
from torch_sink.loop.checkpoints import list_checkpoints
from torch_sink.mindspore import Model
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved

Optimizer = torch.optim.Optimizer


class Announced:
    """Batches whose number is another one than `len()` says, as where broken samples are left out."""

    def __init__(self, batches: list[Any], length: int) -> None:
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


LOADERS: dict[str, Callable[[list[Any]], Any]] = {
    "known": lambda batches: batches,
    "unknown": lambda batches: lambda: iter(batches),
    "shorter": lambda batches: Announced(batches, len(batches) + 2),
}


def plain(
    batches: list[Any], epochs: int, accumulate: int, *, scaler: Any = None, dropout: float = 0.25
) -> tuple[nn.Module, Optimizer, list[float], list[float]]:
    """As Lightning and Accelerate do: the loss divided by `accumulate`, an update at each epoch's end as well."""
    model = make_model(dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 9)
    torch.manual_seed(3)
    losses, rates = [], []
    for _ in range(epochs):
        optimizer.zero_grad()
        for step, (inputs, targets) in enumerate(batches, 1):
            loss = functional.cross_entropy(model(inputs), targets)
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
            (loss / accumulate if accumulate > 1 else loss).backward()
            if step % accumulate == 0 or step == len(batches):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return model, optimizer, losses, rates


def make_loop(
    accumulate: int, *, device: str = "cpu", dropout: float = 0.25, seed: int = 0, **options: Any
) -> StepLoop:
    model = make_model(seed, dropout=dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, 9), "schedule": "step", **options}
    loop = StepLoop(model, functional.cross_entropy, optimizer, accumulate=accumulate, clip_grad_norm=0.5, **options)
    torch.manual_seed(3)
    return loop


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("batches", "accumulate"), [(3, 4), (10, 4), (9, 3), (7, 3), (1, 2), (5, 1)])
@pytest.mark.parametrize("steps_per_sync", [-1, 3])
@pytest.mark.sampled(16)
def test_the_window_ends_with_the_epoch(kind: str, batches: int, accumulate: int, steps_per_sync: int) -> None:
    data, updates, steps = make_batches(batches), list[int](), list[list[bool]]()
    loop = make_loop(accumulate, steps_per_sync=steps_per_sync)
    loop.optimizer.register_step_post_hook(lambda *_: updates.append(loop.step_count))
    note = LambdaCallback(on_train_epoch_end=lambda context: steps.append(context.original_args().updates.tolist()))
    history = loop.run(LOADERS[kind](data), epochs=3, callbacks=[note])
    model, optimizer, losses, rates = plain(data, 3, accumulate)
    assert_equal_training((loop.model, loop.optimizer), (model, optimizer))
    assert torch.equal(history.losses, torch.tensor(losses))
    assert history.learning_rates[:, 0].tolist() == rates
    assert len(updates) == 3 * math.ceil(batches / accumulate)
    assert all(sink[-1] for sink in steps), "an epoch ends with an update"
    assert loop.progress.window == 0


def test_a_stream_that_is_longer_than_announced_has_another_window_behind_it() -> None:
    updates: list[int] = []
    loop = make_loop(3)
    loop.optimizer.register_step_post_hook(lambda *_: updates.append(loop.step_count))
    loop.run(Announced(make_batches(9), 4), epochs=2)
    assert updates == [3, 4, 7, 9, 12, 13, 16, 18]


@pytest.mark.parametrize("kind", ["known", "unknown"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.sampled(2)
def test_graphs_end_their_windows_with_the_epoch(fake_cuda: FakeCuda, kind: str, scaled: bool) -> None:
    data = make_batches(10)
    scaler = DynamicLossScaler(64.0) if scaled else None
    options = {"mode": "graph", "jit_config": UNCOMPILED, "loss_scaler": scaler}
    loop = make_loop(3, device="cuda", dropout=0.0, steps_per_sync=6, **options)
    with SinkLoader(LOADERS[kind](data), slots=3) as loader:
        history = loop.run(loader, epochs=3)
    model, _, losses, rates = plain(data, 3, 3, dropout=0.0)
    torch.testing.assert_close(history.losses, torch.tensor(losses), rtol=1e-4, atol=1e-5)
    assert history.learning_rates[:, 0].tolist() == rates
    assert_trained_alike(loop.model, model, rtol=1e-3, atol=1e-4)
    assert "mode: graph" in loop.explain(), loop.explain()
    assert history.overflows.sum() == 0
    loop.close()


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_new_run_drops_what_an_open_window_has_gathered(
    fake_cuda: FakeCuda, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = make_batches(8)
    options = {"scheduler": None, "schedule": None, "mode": mode, "jit_config": UNCOMPILED}
    loop, other = (make_loop(4, device="cuda", dropout=0.0, **options) for _ in range(2))
    with caplog.at_level(logging.WARNING, "torch_sink"):
        loop.run(data, epochs=2)
        other.run(data, epochs=2)
        assert "inside an accumulation" not in caplog.text
        loop.run(data, max_steps=6)
    text = "ended after step 22, inside an accumulation: the gradients of 2 of its 4 steps are in no update yet"
    assert text in caplog.text
    other.run(data[:4])
    loop.run(data[4:])
    other.run(data[4:])
    for mine, theirs in zip(loop.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs.cpu(), rtol=1e-5, atol=1e-6)


def parts(kind: str) -> Any:
    """Ten batches, from a loader that shuffles or from a stream, whose length nobody knows."""
    data = TensorDataset(torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 5)
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))
    return loader if kind == "known" else lambda: iter(make_batches(10, size=4))


@pytest.mark.parametrize("kind", ["known", "unknown"])
def test_a_run_resumes_bit_for_bit_at_every_step(kind: str, tmp_path: Path) -> None:
    """Three epochs of ten batches, accumulated by three; `test_interruptions` does the same with killed processes."""

    def make(steps_per_sync: int, seed: int = 0) -> StepLoop:
        return make_loop(3, seed=seed, steps_per_sync=steps_per_sync, ema=0.9)

    whole, data = make(1), parts(kind)
    save = LambdaCallback(on_train_step_end=lambda context: whole.save(tmp_path / str(whole.step_count), data))
    expected = whole.run(data, epochs=3, callbacks=[save])
    for position in range(1, 31):
        torch.manual_seed(99)
        resumed, data = make(4, seed=4), parts(kind)
        assert resumed.resume(tmp_path / str(position), data) == position
        history = resumed.run(data, epochs=3)
        assert torch.equal(history.losses, expected.losses[position:]), position
        assert torch.equal(history.learning_rates, expected.learning_rates[position:]), position
        assert_equal_training((resumed.model, resumed.optimizer), (whole.model, whole.optimizer))
        assert_equal_training((resumed.ema_model(), resumed.optimizer), (whole.ema_model(), whole.optimizer))
        assert resumed.scheduler.state_dict() == whole.scheduler.state_dict(), position


def test_a_checkpoint_of_an_unannounced_end_is_saved_again_behind_its_update(tmp_path: Path) -> None:
    """The last sink ends with the stream, which only the next fetch tells; the update comes after its callbacks."""
    loop = make_loop(4, steps_per_sync=3)
    config = CheckpointConfig(save_checkpoint_steps=6, keep_checkpoint_max=0)
    saving = ModelCheckpoint(directory=tmp_path, config=config)
    save = LambdaCallback(on_train_end=lambda context: saving._save(context.original_args()))
    loop.run(lambda: iter(make_batches(6)), callbacks=[saving, save])
    assert [path.name for path in list_checkpoints(tmp_path)] == ["CKP-00000006"]
    state = torch.load(tmp_path / "CKP-00000006" / "state.pt", weights_only=True)
    assert state["progress"]["window"] == 0
    assert torch.equal(state["model"]["6.weight"], loop.model[6].weight)


def test_overflows_of_short_windows_are_skipped_and_listed() -> None:
    """The infinity comes in the first step of the short window, the update that is skipped at the epoch's end."""
    for kind, loader in LOADERS.items():
        data = make_batches(5)
        data[3][0].fill_(math.inf)
        loop = make_loop(3, loss_scaler=DynamicLossScaler(4.0, 2, 100), steps_per_sync=2)
        history = loop.run(loader(data), epochs=2)
        assert history.overflows.nonzero().flatten().tolist() == [4, 9], kind
        assert loop.scaler.scale_value.item() == 1.0, kind
        assert all(parameter.isfinite().all() for parameter in loop.model.parameters())


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loss_that_is_not_finite_counts_by_the_update_of_its_window(kind: str, scaled: bool) -> None:
    data = make_batches(5)
    data[3][0].fill_(math.inf)
    loop = make_loop(3, loss_scaler=DynamicLossScaler(4.0) if scaled else None, steps_per_sync=2)
    if scaled:
        loop.run(LOADERS[kind](data), epochs=2, callbacks=[LossMonitor(0)])
    else:
        with pytest.raises(NonFiniteLoss, match="the loss of step 4"):
            loop.run(LOADERS[kind](data), epochs=2, callbacks=[LossMonitor(0)])


def test_epochs_of_a_sink_size_have_windows_of_their_own() -> None:
    network = make_model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    updates: list[int] = []
    trainer = Model(network, functional.cross_entropy, optimizer, accumulate=2)
    optimizer.register_step_post_hook(lambda *_: updates.append(trainer.loop.step_count))
    trainer.train(2, make_batches(4), sink_size=3)
    assert updates == [2, 3, 5, 6]
