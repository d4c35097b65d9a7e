"""What a program does to the optimizer's state between two sinks: the updates are those of a loop with a GradScaler."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch import Tensor, nn

from loop.engines.test_on_fake_cuda import UNCOMPILED
from loop.overflows import batches_with_overflows, loss_with_factor, make_small_model
from torch_sink.amp import DynamicLossScaler
from torch_sink.loop import LambdaCallback, StepLoop

pytestmark = pytest.mark.halved

Optimizer = torch.optim.Optimizer
KINDS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1),
    "SGD plain": lambda p: torch.optim.SGD(p, 0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
}


def clear(optimizer: Optimizer, first: dict[str, Any]) -> None:
    optimizer.state.clear()


def load_fresh(optimizer: Optimizer, first: dict[str, Any]) -> None:
    optimizer.load_state_dict(first)


def load_a_copy(optimizer: Optimizer, first: dict[str, Any]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def forget_one(optimizer: Optimizer, first: dict[str, Any]) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"][1], None)


def forget_entries(optimizer: Optimizer, first: dict[str, Any]) -> None:
    """The owners stay, as `state[p].clear()` and `defaultdict` leave them."""
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter].clear()


def add_an_entry(optimizer: Optimizer, first: dict[str, Any]) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    if optimizer.state:
        optimizer.state[parameter]["mine"] = torch.zeros_like(parameter)


CHANGES = [clear, load_fresh, load_a_copy, forget_one, forget_entries, add_an_entry]


def plain(change: Any, name: str, infinite: set[int]) -> tuple[nn.Module, Optimizer, Tensor]:
    model = make_small_model()
    optimizer = KINDS[name](model.parameters())
    first = copy.deepcopy(optimizer.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for step, batch in enumerate(batches_with_overflows(infinite, 12)):
        if step % 4 == 0:
            change(optimizer, first)
        optimizer.zero_grad()
        scaler.scale(loss_with_factor(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model, optimizer, torch.tensor(scaler.get_scale())


def ours(change: Any, name: str, infinite: set[int], device: str, **options: Any) -> tuple[StepLoop, Any]:
    model = make_small_model().to(device)
    optimizer = KINDS[name](model.parameters())
    first = copy.deepcopy(optimizer.state_dict())
    scaler = DynamicLossScaler(64.0, 2, 3)
    loop = StepLoop(model, None, optimizer, forward=loss_with_factor, loss_scaler=scaler, steps_per_sync=4, **options)
    begin = LambdaCallback(on_train_step_begin=lambda context: change(optimizer, first))
    return loop, loop.run(batches_with_overflows(infinite, 12), callbacks=[begin])


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("infinite", [set(), {0, 4, 5, 10}], ids=["finite", "overflow"])
@pytest.mark.sampled(30)
def test_state_that_goes_or_comes_between_sinks(change: Any, name: str, infinite: set[int]) -> None:
    model, optimizer, scale = plain(change, name, infinite)
    loop, history = ours(change, name, infinite, "cpu")
    assert history.overflows.nonzero().flatten().tolist() == sorted(infinite)
    assert all(map(torch.equal, loop.model.parameters(), model.parameters()))
    assert torch.equal(loop.scaler.scale_value, scale)
    for mine, other in zip(loop.model.parameters(), model.parameters(), strict=True):
        entries, expected = loop.optimizer.state.get(mine, {}), optimizer.state.get(other, {})
        assert entries.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(torch.as_tensor(entries[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
@pytest.mark.sampled(8)
def test_state_that_goes_or_comes_between_replays(fake_cuda: FakeCuda, change: Any, name: str) -> None:
    infinite = {0, 4, 5, 10}
    model, _, scale = plain(change, name, infinite)
    loop, history = ours(change, name, infinite, "cuda", mode="graph", jit_config=UNCOMPILED)
    assert history.overflows.nonzero().flatten().tolist() == sorted(infinite)
    assert "mode: graph" in loop.explain(), loop.explain()
    assert torch.equal(loop.scaler.scale_value.cpu(), scale)
    for mine, other in zip(loop.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-4, atol=1e-5)
    loop.close()


class UsesALayerLate(nn.Module):
    """Its second layer gets the first gradients in a step that would be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = make_small_model(), nn.Linear(6, 3), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self.first(inputs)
        return outputs + self.second(inputs) if self.calls > 3 else outputs


def test_state_that_a_scaled_step_would_make_inside_a_capture(fake_cuda: FakeCuda) -> None:
    torch.manual_seed(2)
    model, plain_model = UsesALayerLate().cuda(), UsesALayerLate()
    plain_model.load_state_dict(model.state_dict())
    optimizer, batches = KINDS["SGD"](model.parameters()), batches_with_overflows({3, 5}, 12)
    options = {"loss_scaler": DynamicLossScaler(64.0, 2, 3), "mode": "graph", "jit_config": UNCOMPILED}
    loop = StepLoop(model, None, optimizer, forward=loss_with_factor, steps_per_sync=6, **options)
    loop.run(batches)
    assert "mode: graph" in loop.explain(), loop.explain()
    optimizer = KINDS["SGD"](plain_model.parameters())
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss_with_factor(plain_model, batch).backward()
        if step not in (3, 5):
            optimizer.step()
    for mine, other in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-4, atol=1e-5)
    loop.close()
