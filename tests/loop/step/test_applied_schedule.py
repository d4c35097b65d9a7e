"""schedule="applied": an update that is skipped for overflow leaves the scheduler where it is, in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch import Tensor, nn
from torch.optim import lr_scheduler

from loop.engines import test_graph_logic as logic
from loop.engines.test_on_fake_cuda import UNCOMPILED
from loop.overflows import batches_with_overflows, loss_with_factor, make_small_model
from torch_sink.amp import DynamicLossScaler
from torch_sink.loop import LambdaCallback, StepLoop, no_host_sync

pytestmark = pytest.mark.halved

Optimizer = torch.optim.Optimizer
capture = logic.capture
STEPS = 14
KINDS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01),
}
SCHEDULERS: dict[str, Any] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40, cycle_momentum=False),
    "two": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


def plain(kind: str, scheduler: str, infinite: set[int], accumulate: int = 1, epochs: int = 1) -> Any:
    """The recipe of Accelerate and Transformers: a scale that has fallen tells that the update was skipped."""
    model = make_small_model()
    optimizer = KINDS[kind](model.parameters())
    schedule = SCHEDULERS[scheduler](optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    losses, rates = [], []
    for _ in range(epochs):
        optimizer.zero_grad()
        for step, batch in enumerate(batches_with_overflows(infinite, STEPS), 1):
            loss = loss_with_factor(model, batch)
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
            scaler.scale(loss / accumulate).backward()
            if step % accumulate == 0 or step == STEPS:
                scaler.step(optimizer)
                before = scaler.get_scale()
                scaler.update()
                if scaler.get_scale() >= before:
                    schedule.step()
                optimizer.zero_grad()
    return model, losses, rates, schedule


def make_loop(kind: str, scheduler: str, device: str = "cpu", when: Any = "applied", **options: Any) -> StepLoop:
    model = make_small_model().to(device)
    optimizer = KINDS[kind](model.parameters())
    scaler = DynamicLossScaler(64.0, 2, 1000)
    schedule = {"scheduler": SCHEDULERS[scheduler](optimizer), "schedule": when, "loss_scaler": scaler}
    return StepLoop(model, None, optimizer, forward=loss_with_factor, **schedule, **options)


def assert_as_plain(loop: StepLoop, history: Any, expected: Any, *, exact: bool) -> None:
    model, losses, rates, schedule = expected
    assert history.learning_rates[:, 0].tolist() == rates
    finite = torch.tensor(losses).isfinite()
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(history.losses[finite], torch.tensor(losses)[finite], **tolerance)
    for mine, other in zip(loop.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), other, **tolerance)
    assert loop.scheduler.state_dict().keys() == schedule.state_dict().keys()
    assert loop.scheduler.last_epoch == schedule.last_epoch
    assert loop.optimizer.param_groups[0]["lr"] == schedule.optimizer.param_groups[0]["lr"]


INFINITE = [set(), {0, 1}, {4, 5, 9}, {3, 13}, {0, 2, 4, 6, 8, 10, 12}]


@pytest.mark.parametrize("infinite", INFINITE)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.sampled(14)
def test_as_the_plain_loop_that_looks(infinite: set[int], scheduler: str, accumulate: int) -> None:
    loop = make_loop("AdamW", scheduler, steps_per_sync=4, accumulate=accumulate)
    history = loop.run(batches_with_overflows(infinite, STEPS), epochs=2)
    assert_as_plain(loop, history, plain("AdamW", scheduler, infinite, accumulate, epochs=2), exact=True)


@pytest.mark.parametrize("infinite", INFINITE)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.sampled(12)
def test_replays_count_the_applied_updates(capture: Any, infinite: set[int], scheduler: str, stream: bool) -> None:
    """On the CPU, where a learning rate that is a tensor has the same bits."""
    loop = make_loop("AdamW", scheduler, steps_per_sync=4)
    batches = batches_with_overflows(infinite, STEPS)
    history = loop.run((lambda: iter(batches)) if stream else batches, epochs=2)
    assert_as_plain(loop, history, plain("AdamW", scheduler, infinite, epochs=2), exact=False)
    assert "mode: graph" in loop.explain(), loop.explain()
    assert capture.replayed > 0


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.sampled(4)
def test_on_a_device_without_a_wait(fake_cuda: FakeCuda, mode: str, kind: str, accumulate: int) -> None:
    infinite, options = {0, 4, 5, 9}, {"mode": mode, "jit_config": UNCOMPILED, "steps_per_sync": 5}
    syncs = []
    for when in ("applied", "step"):
        loop = make_loop(kind, "cosine", "cuda", when, accumulate=accumulate, **options)
        with no_host_sync():
            history = loop.run(batches_with_overflows(infinite, STEPS), epochs=2)
        syncs.append(history.host_syncs)
        assert f"mode: {mode}" in loop.explain(), loop.explain()
        if when == "applied":
            expected = plain(kind, "cosine", infinite, accumulate, epochs=2)
            assert_as_plain(loop, history, expected, exact=False)
        loop.close()
    assert syncs[0] == syncs[1]


def test_a_step_that_cannot_be_captured_goes_on_counting(fake_cuda: FakeCuda) -> None:
    """In the middle of a sink, when nobody on the host knows how many updates were applied."""
    infinite = {1, 6, 7}
    model = make_small_model().cuda()

    def waits(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_with_factor(model, batch)
        loss.detach().item()
        return loss

    optimizer = KINDS["SGD"](model.parameters())
    options = {"scheduler": SCHEDULERS["cosine"](optimizer), "schedule": "applied", "mode": "graph"}
    scaler = DynamicLossScaler(64.0, 2, 1000)
    loop = StepLoop(model, None, optimizer, forward=waits, loss_scaler=scaler, jit_config=UNCOMPILED, **options)
    history = loop.run(batches_with_overflows(infinite, STEPS), epochs=2)
    assert "mode: eager" in loop.explain()
    assert_as_plain(loop, history, plain("SGD", "cosine", infinite, epochs=2), exact=False)
    loop.close()


def test_an_optimizer_that_reads_its_rate_on_the_host_is_named(fake_cuda: FakeCuda) -> None:
    model = make_small_model().cuda()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.01)
    options = {"scheduler": SCHEDULERS["cosine"](optimizer), "schedule": "applied", "mode": "eager"}
    loop = StepLoop(model, None, optimizer, forward=loss_with_factor, loss_scaler=DynamicLossScaler(64.0), **options)
    loop.run(batches_with_overflows({4}, STEPS))
    assert f"the step makes the host wait for the device at {__file__}" in loop.explain()
    loop.close()


@pytest.mark.parametrize("position", [3, 5, 9, 14, 17])
def test_resumes_where_the_schedule_stood(position: int, tmp_path: Path) -> None:
    infinite = {0, 4, 5, 9}
    batches = batches_with_overflows(infinite, STEPS)
    part = make_loop("AdamW", "two", steps_per_sync=4)
    part.run(batches, epochs=2, max_steps=position)
    part.save(tmp_path, batches)
    again = make_loop("AdamW", "two", steps_per_sync=4)
    again.resume(tmp_path, batches)
    history = again.run(batches, epochs=2)
    model, _, rates, schedule = plain("AdamW", "two", infinite, epochs=2)
    assert history.learning_rates[:, 0].tolist() == rates[position:]
    assert all(map(torch.equal, again.model.parameters(), model.parameters()))
    assert again.scheduler.last_epoch == schedule.last_epoch


def test_betas_that_a_schedule_cycles_stay_too(capture: Any) -> None:
    infinite = {4, 5, 9}
    model = make_small_model()
    optimizer = KINDS["AdamW"](model.parameters())
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
    scaler = DynamicLossScaler(64.0, 2, 1000)
    options = {"scheduler": scheduler, "schedule": "applied", "loss_scaler": scaler}
    loop = StepLoop(model, None, optimizer, forward=loss_with_factor, steps_per_sync=5, **options)
    loop.run(batches_with_overflows(infinite, STEPS))
    plain_model = make_small_model()
    plain_optimizer = KINDS["AdamW"](plain_model.parameters())
    plain_scheduler = lr_scheduler.OneCycleLR(plain_optimizer, 0.1, total_steps=40)
    for step, batch in enumerate(batches_with_overflows(infinite, STEPS)):
        plain_optimizer.zero_grad()
        loss_with_factor(plain_model, batch).backward()
        if step not in infinite:
            plain_optimizer.step()
            plain_scheduler.step()
    for mine, other in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert optimizer.param_groups[0]["betas"] == plain_optimizer.param_groups[0]["betas"]
    assert "mode: graph" in loop.explain()


def test_a_rate_that_a_callback_sets_holds_and_the_loop_adds_no_wait() -> None:
    loop = make_loop("SGD", "cosine", steps_per_sync=2)
    seen: list[float] = []

    def halve(context: Any) -> None:
        for group in context.original_args().optimizer.param_groups:
            group["lr"] *= 0.5
            seen.append(group["lr"])

    with no_host_sync():
        history = loop.run(batches_with_overflows({3}, STEPS), callbacks=[LambdaCallback(on_train_step_end=halve)])
    assert history.learning_rates[2::2, 0].tolist() == seen[:-1]


def test_without_a_scaler_every_update_is_applied() -> None:
    histories = []
    for when in ("applied", "step"):
        model = make_small_model()
        optimizer = KINDS["SGD"](model.parameters())
        options = {"scheduler": SCHEDULERS["cosine"](optimizer), "schedule": when}
        histories.append(
            StepLoop(model, None, optimizer, forward=loss_with_factor, **options).run(
                batches_with_overflows(set(), STEPS)
            )
        )
    assert torch.equal(histories[0].learning_rates, histories[1].learning_rates)
