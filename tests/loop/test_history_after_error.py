"""After an error the history has the steps before it, as after Ctrl-C."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch.nn import functional
from torch.optim import lr_scheduler

from loop.engines.test_on_fake_cuda import UNCOMPILED
from loop.reference import make_batches, make_model, plain_loop
from torch_sink.loop import LambdaCallback, StepLoop

pytestmark = pytest.mark.halved

SHAPE = "mat1 and mat2 shapes cannot be multiplied"


def make_loop(device: str, **options: Any) -> StepLoop:
    model = make_model(dropout=0.0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "schedule": "step"}
    return StepLoop(model, functional.cross_entropy, optimizer, **schedule, **options)


def expected_of(batches: list[Any]) -> tuple[Any, Any, Any]:
    model = make_model(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses, rates = plain_loop(model, functional.cross_entropy, optimizer, batches, scheduler=scheduler)
    return losses, rates, scheduler


def assert_history(loop: StepLoop, steps: int, batches: list[Any]) -> None:
    losses, rates, scheduler = expected_of(batches[:steps])
    history: Any = loop.history
    assert (history.steps, loop.step_count, history.samples) == (steps, steps, 8 * steps)
    torch.testing.assert_close(history.losses, losses.reshape(-1), rtol=1e-5, atol=1e-6)
    assert torch.equal(history.learning_rates, rates.reshape(-1, 1))
    assert loop.scheduler.last_epoch == scheduler.last_epoch, "the schedule is where the steps have led"


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("failing", [1, 3, 8, 12])
@pytest.mark.parametrize("steps_per_sync", [-1, 5])
@pytest.mark.sampled(8)
def test_an_error_inside_a_step(fake_cuda: FakeCuda, mode: str, failing: int, steps_per_sync: int) -> None:
    """In graph mode the batch of another shape runs uncaptured, behind replays that the device has not finished."""
    good = make_batches(12)
    batches = [*good]
    batches[failing - 1] = (torch.randn(8, 3, 16, 16), good[0][1])
    loop = make_loop("cuda", mode=mode, steps_per_sync=steps_per_sync, jit_config=UNCOMPILED)
    with pytest.raises(RuntimeError, match=SHAPE):
        loop.run(batches)
    assert_history(loop, failing - 1, good)
    loop.run(good[failing - 1 :])
    torch.testing.assert_close(loop.history.losses, expected_of(good)[0][failing - 1 :], rtol=1e-5, atol=1e-6)
    loop.close()


@pytest.mark.parametrize("event", ["data", "on_train_step_begin", "on_train_step_end"])
def test_errors_of_the_data_and_of_callbacks(event: str) -> None:
    good = make_batches(12)

    def stream() -> Any:
        yield from good[:7]
        raise KeyError("data")

    def fail(context: Any) -> None:
        if loop.step_count == 7:
            raise KeyError(event)

    loop = make_loop("cpu", steps_per_sync=7)
    callbacks = [] if event == "data" else [LambdaCallback(**{event: fail})]
    with pytest.raises(KeyError):
        loop.run(stream if event == "data" else good, callbacks=callbacks)
    assert_history(loop, 7, good)


def test_a_device_that_has_failed_gives_nothing(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the step is raised, and not that of reading the results."""
    loop = make_loop("cuda", mode="eager")
    loop.run(make_batches(2))

    def lost(*arguments: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(loop.engine.log, "read", lost)
    batches = [*make_batches(3), (torch.randn(8, 3, 16, 16), torch.zeros(8).long())]
    with pytest.raises(RuntimeError, match=SHAPE):
        loop.run(batches)
    assert loop.history.steps == 0
    loop.close()
