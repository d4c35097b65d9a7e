"""A scheduler is stepped by the loop alone: whoever steps it too is named, in every mode, and the rest is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

from loop.reference import make_batches, make_model
from torch_sink.errors import SinkError
from torch_sink.loop import JitConfig, LambdaCallback, StepLoop
from torch_sink.loop.engines import jit as compiler
from torch_sink.mindspore import Model

pytestmark = pytest.mark.halved

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=60),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)], [3]),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)]),
}
SAYS = {"epoch": r"at each epoch's end \(schedule='epoch'\)", "step": r"after each update \(schedule='step'\)"}


def make_loop(schedule: Any, name: str = "StepLR", model: nn.Module | None = None, **options: Any) -> StepLoop:
    model = model or make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)
    options = {"steps_per_sync": 3, "loss_fn": functional.cross_entropy, **options}
    return StepLoop(model, optimizer=optimizer, scheduler=scheduler, schedule=schedule, **options)


def steps_at(loop: StepLoop, event: str) -> LambdaCallback:
    return LambdaCallback(**{event: lambda context: loop.scheduler.step()})


@pytest.fixture(params=["eager", "compile", "graph"])
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if request.param == "graph":
        request.getfixturevalue("fake_cuda")
        config = JitConfig(jit_level="O0", exc_mode="sink")
        return {"mode": "graph", "model": make_model(dropout=0.0).cuda(), "jit_config": config}
    # Compiled code is tested elsewhere; it would cost tens of seconds, and what calls it is the same.
    monkeypatch.setattr(compiler, "compile_function", lambda function, config, **_: function)
    return {"mode": request.param}


@pytest.mark.parametrize("schedule", ["epoch", "step"])
@pytest.mark.parametrize("event", ["on_train_step_end", "on_train_epoch_end"])
def test_a_callback_that_steps_the_scheduler_is_named(options: dict[str, Any], schedule: Any, event: str) -> None:
    loop = make_loop(schedule, **options)
    message = f"LambdaCallback.{event} stepped the scheduler, and the loop steps it too, {SAYS[schedule]}.*remove"
    with pytest.raises(SinkError, match=message):
        loop.run(make_batches(8), epochs=2, callbacks=[steps_at(loop, event)])
    assert loop.step_count == (3 if event == "on_train_step_end" else 8)
    assert loop.explain().startswith(f"mode: {options['mode']}")
    assert loop.run(make_batches(8)).steps == 8, "without the callback it goes on"
    loop.close()


@pytest.mark.parametrize("schedule", ["epoch", "step"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_kind_of_scheduler_is_watched_and_left_alone(name: str, schedule: Any) -> None:
    loop = make_loop(schedule, name)
    loop.run(make_batches(8), epochs=2)
    loop.run(make_batches(8))
    with pytest.raises(SinkError, match="on_train_epoch_begin stepped the scheduler"):
        loop.run(make_batches(8), callbacks=[steps_at(loop, "on_train_epoch_begin")])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("schedule", ["epoch", "step"])
def test_code_around_the_runs_and_inside_the_step(schedule: Any) -> None:
    loop = make_loop(schedule)
    loop.run(make_batches(4))
    loop.scheduler.step()
    with pytest.raises(SinkError, match="code between two runs stepped the scheduler"):
        loop.run(make_batches(4))
    assert loop.step_count == 4

    def forward(model: nn.Module, batch: Any) -> Any:
        inside.scheduler.step()
        return functional.cross_entropy(model(batch[0]), batch[1])

    inside = make_loop(schedule, loss_fn=None, forward=forward)
    with pytest.raises(SinkError, match="stepped the scheduler, and the loop steps it too"):
        inside.run(make_batches(4))


def test_the_interface_of_mindspore() -> None:
    network = make_model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    model = Model(network, functional.cross_entropy, optimizer, scheduler=scheduler, schedule="epoch")
    with pytest.raises(SinkError, match=r"LambdaCallback\.on_train_epoch_end stepped the scheduler"):
        model.train(2, make_batches(3), LambdaCallback(on_train_epoch_end=lambda context: scheduler.step()))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("schedule", ["epoch", "step"])
def test_who_may_move_the_scheduler(schedule: Any, tmp_path: Path) -> None:
    """Anybody before the first step; a checkpoint; another loop; and back, to a state that was kept."""
    batches, loop = make_batches(3), make_loop(schedule)
    for _ in range(4):
        loop.scheduler.step()
    loop.run(batches, epochs=2, callbacks=[steps_at(loop, "on_train_begin")])
    place = 5 + (2 if schedule == "epoch" else 6)
    assert loop.scheduler.last_epoch == place
    loop.save(tmp_path)
    kept = loop.scheduler.state_dict()

    def restore(context: Any) -> None:
        loop.scheduler.load_state_dict(kept)

    loop.run(batches, epochs=2, callbacks=[LambdaCallback(on_train_epoch_end=restore)])
    other = StepLoop(loop.model, functional.cross_entropy, loop.optimizer, scheduler=loop.scheduler, schedule=schedule)
    for each in (other, loop, other):
        each.run(batches)
    fresh = make_loop(schedule)
    fresh.run(batches)
    fresh.resume(tmp_path)
    fresh.run(batches, epochs=3)
    assert fresh.scheduler.last_epoch == place + (1 if schedule == "epoch" else 3)
