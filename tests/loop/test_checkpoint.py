"""Save and resume: complete or ignored, and the resumed run equals the uninterrupted one bit for bit."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from loop.reference import assert_equal_training, make_batches, make_model
from torch_sink.amp import DynamicLossScaler
from torch_sink.errors import SinkError
from torch_sink.loop import CheckpointConfig, LambdaCallback, ModelCheckpoint, StepLoop
from torch_sink.loop.checkpoints import list_checkpoints
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved


def make_loop(seed: int = 0, scheduler: Callable[..., Any] | None = None, **options: Any) -> StepLoop:
    model = make_model(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return StepLoop(
        model,
        functional.cross_entropy,
        optimizer,
        steps_per_sync=3,
        scheduler=scheduler(optimizer) if scheduler else None,
        schedule="step",
        **options,
    )


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.01, total_steps=40),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=3, cycle_momentum=False),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 5, 9]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR with NumPy": lambda o: lr_scheduler.LambdaLR(o, lambda step: np.cos(step / 20)),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 5), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_is_saved_and_restored(name: str, tmp_path: Path) -> None:
    batches = make_batches(8)
    options = {"scheduler": SCHEDULERS[name], "loss_scaler": DynamicLossScaler(4.0, 2, 3), "ema": 0.5}
    torch.manual_seed(1)
    whole = make_loop(**options)
    expected = whole.run(batches, epochs=2)
    torch.manual_seed(1)
    part = make_loop(**options)
    part.run(batches, epochs=2, max_steps=11)
    part.save(tmp_path, batches)
    torch.manual_seed(99)
    resumed = make_loop(seed=4, **options)
    assert resumed.resume(tmp_path, batches) == 11
    history = resumed.run(batches, epochs=2)
    assert torch.equal(history.losses, expected.losses[11:])
    assert torch.equal(history.learning_rates, expected.learning_rates[11:])
    assert_equal_training((resumed.model, resumed.optimizer), (whole.model, whole.optimizer))
    assert_equal_training((resumed.ema_model(), resumed.optimizer), (whole.ema_model(), whole.optimizer))
    assert torch.equal(resumed.scaler.counter, whole.scaler.counter)


@pytest.mark.parametrize("position", [1, 4, 5, 7, 10, 12])
@pytest.mark.parametrize("own_loader", [False, True])
@pytest.mark.sampled(6)
def test_position_in_the_data(position: int, own_loader: bool, tmp_path: Path) -> None:
    """Epochs of 5 batches; positions in the middle and at the very end of an epoch."""

    def make_data() -> Any:
        data = TensorDataset(torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 5)
        loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))
        return loader if own_loader else SinkLoader(loader)

    epochs = []
    torch.manual_seed(1)
    whole = make_loop(accumulate=2)
    expected = whole.run(make_data(), epochs=3)
    torch.manual_seed(1)
    part, data = make_loop(accumulate=2), make_data()
    config = CheckpointConfig(save_checkpoint_steps=position)
    stop = LambdaCallback(on_train_step_end=lambda c: part.step_count >= position and c.request_stop())
    part.run(data, epochs=3, callbacks=[ModelCheckpoint(directory=tmp_path, config=config), stop])
    resumed, data = make_loop(seed=3, accumulate=2), make_data()
    assert resumed.resume(tmp_path, data) == position
    note = LambdaCallback(on_train_epoch_end=lambda c: epochs.append(c.original_args().cur_epoch_num))
    history = resumed.run(data, epochs=3, callbacks=note)
    assert torch.equal(history.losses, expected.losses[position:])
    assert_equal_training((resumed.model, resumed.optimizer), (whole.model, whole.optimizer))
    assert epochs == [epoch for epoch in (1, 2, 3) if epoch * 5 >= position]
    assert resumed.run(data, epochs=1).steps == 5, "a later run counts from zero"


@pytest.mark.parametrize("event", ["on_train_begin", "on_train_epoch_begin", "on_train_step_begin"])
@pytest.mark.parametrize("own_loader", [False, True])
def test_a_resumed_run_that_fails_before_its_first_step_can_be_run_again(
    event: str, own_loader: bool, tmp_path: Path
) -> None:
    def fail(run_context: Any) -> None:
        raise KeyError(event)

    def make_data() -> Any:
        return make_batches(5) if own_loader else SinkLoader(make_batches(5))

    whole, part, resumed, data = make_loop(), make_loop(), make_loop(seed=3), make_data()
    torch.manual_seed(1)
    expected = whole.run(make_data(), epochs=2)
    torch.manual_seed(1)
    part.run(data, epochs=2, max_steps=3)
    part.save(tmp_path, data)
    data = make_data()
    assert resumed.resume(tmp_path, data) == 3
    for _ in range(2):
        with pytest.raises(KeyError):
            resumed.run(data, epochs=2, callbacks=LambdaCallback(**{event: fail}))
    assert torch.equal(resumed.run(data, epochs=2).losses, expected.losses[3:])
    assert resumed.run(data, epochs=1).steps == 5, "a later run counts from zero"


def test_a_position_that_a_callback_loads_is_the_next_runs(tmp_path: Path) -> None:
    """The run during which it is loaded goes on in its own data, and leaves no position behind."""
    batches = [(torch.full((1, 3, 8, 8), float(number)), torch.tensor([0])) for number in range(8)]
    seen: list[float] = []

    def forward(model: nn.Module, batch: Any) -> Any:
        seen.append(batch[0].flatten()[0].item())
        return functional.cross_entropy(model(batch[0]), batch[1])

    loop = make_loop(forward=forward, mode="eager")
    loop.run(batches, max_steps=4)
    loop.save(tmp_path, batches)
    load = LambdaCallback(on_train_step_end=lambda c: (loop.resume(tmp_path, batches), c.request_stop()))
    loop.run(batches, epochs=2, max_steps=6, callbacks=load)
    seen.clear()
    loop.run(batches, epochs=2, max_steps=5)
    assert seen == [4.0]


@pytest.mark.parametrize("position", [2, 3, 4])
def test_position_in_data_of_unknown_length(position: int, tmp_path: Path) -> None:
    """Epochs of 4 batches that nobody announced; 4 is an end that the first run had not seen yet."""

    def data() -> Any:
        return iter(make_batches(4))

    torch.manual_seed(1)
    whole = make_loop()
    expected = whole.run(data, epochs=3)
    torch.manual_seed(1)
    part = make_loop()
    part.run(data, epochs=3, max_steps=position)
    part.save(tmp_path, data)
    resumed, epochs = make_loop(seed=3), []
    assert resumed.resume(tmp_path, data) == position
    note = LambdaCallback(on_train_epoch_end=lambda c: epochs.append(resumed.step_count))
    history = resumed.run(data, epochs=3, callbacks=note)
    assert torch.equal(history.losses, expected.losses[position:])
    assert epochs == [4, 8, 12]


@pytest.mark.parametrize("announced", [3, 5, 4])
@pytest.mark.parametrize("position", [3, 4, 5])
def test_position_in_data_that_announces_another_length(position: int, announced: int, tmp_path: Path) -> None:
    """Epochs of 4 batches, whatever `len()` says, as where broken samples are left out."""

    class Data:
        def __len__(self) -> int:
            return announced

        def __iter__(self) -> Any:
            return iter(make_batches(4))

    def train(loop: StepLoop, data: Data, **options: Any) -> tuple[Any, list[int]]:
        epochs: list[int] = []
        note = LambdaCallback(on_train_epoch_end=lambda c: epochs.append(loop.step_count))
        return loop.run(data, epochs=3, callbacks=note, **options), epochs

    torch.manual_seed(1)
    expected, ends = train(make_loop(), Data())
    assert ends == [4, 8, 12]
    torch.manual_seed(1)
    part, data = make_loop(), Data()
    train(part, data, max_steps=position)
    part.save(tmp_path, data)
    resumed = make_loop(seed=3)
    assert resumed.resume(tmp_path, data) == position
    history, ends = train(resumed, data)
    assert torch.equal(history.losses, expected.losses[position:])
    assert ends[-2:] == [8, 12]


def test_max_steps_counts_from_the_start_of_the_interrupted_run(tmp_path: Path) -> None:
    batches = make_batches(6)
    loop = make_loop()
    loop.run(batches, max_steps=2)
    loop.run(batches, epochs=9, max_steps=4)
    loop.save(tmp_path)
    resumed = make_loop()
    resumed.resume(tmp_path)
    assert resumed.step_count == 6
    assert resumed.run(batches, epochs=9, max_steps=10).steps == 6
    assert resumed.run(batches, epochs=9, max_steps=10).steps == 10


def test_torn_checkpoints_are_ignored(tmp_path: Path) -> None:
    loop = make_loop()
    loop.run(make_batches(3))
    complete = loop.save(tmp_path)
    assert complete.name == "CKP-00000003"
    torn = tmp_path / "CKP-00000009"
    shutil.copytree(complete, torn)
    (torn / "complete.json").unlink()
    (tmp_path / ".CKP-00000012.tmp").mkdir()
    (tmp_path / "notes-12345678.txt").write_text("not a checkpoint")
    assert list_checkpoints(tmp_path) == [complete]
    assert make_loop().resume(tmp_path) == 3
    assert make_loop().resume(tmp_path / "missing") == 0


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest"])
def test_a_damaged_checkpoint_is_left_out(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = make_loop()
    loop.run(make_batches(2))
    older = loop.save(tmp_path)
    loop.run(make_batches(2))
    newer = loop.save(tmp_path)
    state = newer / "state.pt"
    if damage == "truncated":
        os.truncate(state, state.stat().st_size // 2)
    elif damage == "missing":
        state.unlink()
    else:
        (newer / "complete.json").write_text("")
    assert list_checkpoints(tmp_path) == [older]
    assert "CKP-00000004 is left out" in caplog.text
    assert make_loop().resume(tmp_path) == 2


def test_an_unreadable_checkpoint_is_named(tmp_path: Path) -> None:
    loop = make_loop()
    loop.run(make_batches(2))
    state = loop.save(tmp_path) / "state.pt"
    state.write_bytes(bytes(state.stat().st_size))
    with pytest.raises(SinkError, match=r"state\.pt cannot be read; delete .*CKP-00000002"):
        make_loop().resume(tmp_path)


def test_what_would_not_load_is_not_saved(tmp_path: Path) -> None:
    """Found out at the first save, and not when a run is to be resumed."""

    class Warmup:
        def __init__(self) -> None:
            self.path = tmp_path

        def __call__(self, step: int) -> float:
            return 1.0

    loop = make_loop(scheduler=lambda o: lr_scheduler.LambdaLR(o, Warmup()))
    loop.run(make_batches(2))
    with pytest.raises(SinkError, match=r"the state holds pathlib.*weights_only=True"):
        loop.save(tmp_path)
    assert list_checkpoints(tmp_path) == []


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    loop = make_loop()
    loop.run(make_batches(2))
    path = loop.save(tmp_path)
    with torch.no_grad():
        loop.model[-1].bias.fill_(7.0)
    assert loop.save(tmp_path) == path
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    other = make_loop()
    other.resume(tmp_path)
    assert torch.equal(other.model[-1].bias, torch.full((5,), 7.0))


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_a_failed_save_leaves_the_older_one(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop()
    loop.run(make_batches(2))
    loop.save(tmp_path)
    loop.run(make_batches(2))

    def fail(*arguments: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        with pytest.raises(OSError, match="disk full"):
            loop.save(tmp_path)
    assert make_loop().resume(tmp_path) == 2
    loop.save(tmp_path)
    assert make_loop().resume(tmp_path) == 4
    assert not list(tmp_path.glob(".*"))


def test_generators_and_hidden_buffers_are_saved(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("calls", torch.zeros(()), persistent=False)

        def forward(self, inputs: Any) -> Any:
            self.calls += 1
            return self.linear(inputs)

    model = Counting()
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    loop.run([(torch.ones(1, 2), torch.tensor([0]))] * 3)
    loop.save(tmp_path)
    draws = torch.rand(2), np.random.random(), random.random()
    other = Counting()
    restored = StepLoop(other, functional.cross_entropy, torch.optim.SGD(other.parameters(), lr=0.1))
    restored.resume(tmp_path)
    assert other.calls == 3
    again = torch.rand(2), np.random.random(), random.random()
    assert torch.equal(draws[0], again[0])
    assert draws[1:] == again[1:]


def test_another_bit_generator_of_numpy_is_not_saved(
    bit_generator_of_numpy: Callable[[Any], None], tmp_path: Path
) -> None:
    loop = make_loop()
    loop.run(make_batches(2))
    bit_generator_of_numpy(np.random.PCG64(1))
    with pytest.raises(SinkError, match=r"numpy's global generator is PCG64: .*MT19937 only.*numpy\.random\.Generator"):
        loop.save(tmp_path)
    with pytest.raises(SinkError, match="numpy's global generator is PCG64"):
        list(SinkLoader(make_batches(2)))


def test_state_of_another_loop_is_refused() -> None:
    state = make_loop(ema=0.9).state_dict()
    with pytest.raises(ValueError, match=r"saved with 'average', and this loop has none"):
        make_loop().load_state_dict(state)
    with pytest.raises(ValueError, match="accumulate=1, and this loop has 2"):
        make_loop(accumulate=2, ema=0.9).load_state_dict(state)
    with pytest.raises(SinkError, match=r"ema=0\.999"):
        make_loop().ema_model()


def test_plain_optimizer_checkpoint_loads() -> None:
    plain = make_model()
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3)
    functional.cross_entropy(plain(make_batches(1)[0][0]), make_batches(1)[0][1]).backward()
    optimizer.step()
    loop = make_loop()
    loop.optimizer.load_state_dict(optimizer.state_dict())
    loop.run(make_batches(2))
    assert loop.optimizer.state_dict()["state"][0]["step"] == 3
