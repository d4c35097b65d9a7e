"""What Accelerate and Lightning Fabric prepared trains as in a loop of theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from loop.reference import make_batches, make_model
from torch_sink.amp import DynamicLossScaler
from torch_sink.common import integrations as prepared
from torch_sink.loop import StepLoop


class Prepared(NamedTuple):
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any
    backward: Callable[[Tensor], None]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], torch.optim.lr_scheduler.LRScheduler]:
    model = make_model(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = make_batches(1, size=40)[0]
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=6, shuffle=True, generator=generator)
    return model, optimizer, loader, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)


def accelerate() -> Prepared:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    return Prepared(*accelerator.prepare(*parts()), accelerator.backward)


def fabric(precision: Any = "32-true") -> Prepared:
    made = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1, precision=precision)
    model, optimizer, loader, scheduler = parts()
    return Prepared(*made.setup(model, optimizer), made.setup_dataloaders(loader), scheduler, made.backward)


KINDS: dict[str, Callable[[], Prepared]] = {
    "accelerate": accelerate,
    "fabric": fabric,
    "fabric bf16": lambda: fabric("bf16-mixed"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_the_library_does_and_resumes(kind: str, tmp_path: Path) -> None:
    theirs, ours = KINDS[kind](), KINDS[kind]()
    losses = []
    for _ in range(2):
        for inputs, targets in theirs.loader:
            theirs.optimizer.zero_grad()
            loss = functional.cross_entropy(theirs.model(inputs), targets)
            theirs.backward(loss)
            theirs.optimizer.step()
            theirs.scheduler.step()
            losses.append(loss.item())

    def make_loop(made: Prepared) -> StepLoop:
        return StepLoop(
            made.model,
            functional.cross_entropy,
            made.optimizer,
            scheduler=made.scheduler,
            schedule="step",
            steps_per_sync=3,
            ema=0.9,
        )

    loop = make_loop(ours)
    assert type(loop.optimizer) is torch.optim.AdamW
    history = loop.run(ours.loader, epochs=2, max_steps=9)
    loop.save(tmp_path, ours.loader)
    assert torch.equal(history.losses, torch.tensor(losses[:9]))
    again = KINDS[kind]()
    resumed = make_loop(again)
    assert resumed.resume(tmp_path, again.loader) == 9
    assert torch.equal(resumed.run(again.loader, epochs=2).losses, torch.tensor(losses[9:]))
    for mine, plain in zip(again.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, plain)


def test_the_short_window_at_an_epochs_end_is_accelerates() -> None:
    """Seven batches of an epoch, accumulated by four: the loss is divided by four, and the last three have an update."""
    library = pytest.importorskip("accelerate")

    def prepared_parts(steps: int) -> Any:
        accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=steps)
        return accelerator, accelerator.prepare(*parts())

    accelerator, (model, optimizer, loader, scheduler) = prepared_parts(4)
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    library.state.GradientState._reset_state()
    _, (ours, own_optimizer, loader, own_scheduler) = prepared_parts(1)
    options = {"scheduler": own_scheduler, "schedule": "step", "accumulate": 4}
    StepLoop(ours, functional.cross_entropy, own_optimizer, **options).run(loader, epochs=2)
    assert all(map(torch.equal, ours.parameters(), model.parameters()))
    assert own_scheduler.scheduler.last_epoch == scheduler.scheduler.last_epoch == 4


class Wrapper:
    """The shape of both libraries' optimizers."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        self.optimizer, self.scaler = optimizer, scaler


def test_a_scaler_of_ones_own_is_taken_over_or_refused() -> None:
    """Neither library scales on the CPU, so the scaler is put in by hand."""
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    scaler = StepLoop(model, functional.cross_entropy, Wrapper(sgd, own)).scaler
    assert type(scaler) is DynamicLossScaler
    assert (scaler.scale_value.item(), scaler.scale_factor, scaler.scale_window) == (64.0, 2.0, 5)
    assert StepLoop(model, functional.cross_entropy, Wrapper(sgd, None)).scaler is None
    assert StepLoop(model, functional.cross_entropy, Wrapper(sgd, own), loss_scaler=None).scaler is None
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    assert StepLoop(model, functional.cross_entropy, Wrapper(sgd, disabled)).scaler is None
    with pytest.raises(ValueError, match="loss scaler of its own"):
        StepLoop(model, functional.cross_entropy, Wrapper(sgd, own), amp="O1")


def test_accelerates_schedulers_step_once_for_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made = accelerate()
    assert prepared.scheduler_repeats(made.scheduler) == 1
    monkeypatch.setattr(prepared.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(prepared.distributed, "get_world_size", lambda: 4)
    assert prepared.scheduler_repeats(made.scheduler) == 4
    assert prepared.scheduler_repeats(made.scheduler.scheduler) == 1
    loop = StepLoop(made.model, functional.cross_entropy, made.optimizer, scheduler=made.scheduler, schedule="step")
    monkeypatch.undo()
    loop.run(make_batches(2))
    assert made.scheduler.scheduler.last_epoch == 8
