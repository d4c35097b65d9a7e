"""An optimizer of one's own that puts new tensors in the place of its state, which those of torch never do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loop.engines.test_graph_logic import DirectCapture, RingLoader, capture  # noqa: F401 - a fixture
from loop.reference import assert_equal_training, make_batches, make_model
from torch_sink.amp import StaticLossScaler
from torch_sink.loop import StepLoop


class Replacing(torch.optim.Optimizer):
    """SGD with momentum, without in-place operations on the state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(parameter)) + parameter.grad
                parameter.sub_(group["lr"] * state["momentum"])


def train(batches: Any, **options: Any) -> tuple[StepLoop, nn.Module, torch.optim.Optimizer]:
    model = make_model(dropout=0)
    optimizer = Replacing(model.parameters())

    def forward(model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * batch[2] if len(batch) > 2 else loss

    loop = StepLoop(model, None, optimizer, forward=forward, **options)
    loop.run(batches)
    return loop, model, optimizer


def test_its_updates_are_skipped() -> None:
    batches = [(*batch, torch.tensor(1.0)) for batch in make_batches(5)]
    _, model, optimizer = train(batches, loss_scaler=StaticLossScaler(2.0))
    infinite = (*batches[3][:2], torch.tensor(math.inf))
    _, skipping, other = train([*batches[:3], infinite, *batches[3:]], loss_scaler=StaticLossScaler(2.0))
    for mine, expected in zip(skipping.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, expected)
        assert torch.equal(other.state[mine]["momentum"], optimizer.state[expected]["momentum"])


@pytest.mark.parametrize("mode", ["auto", "graph"])
def test_its_steps_are_not_captured(mode: str, capture: DirectCapture) -> None:  # noqa: F811
    batches = make_batches(8)
    with RingLoader(batches) as loader:
        loop, model, optimizer = train(loader, mode=mode)
    assert capture.captured == 0
    assert "the step puts new tensors in the place of momentum of Replacing" in loop.explain()
    _, plain, other = train(batches, mode="eager")
    assert_equal_training((model, optimizer), (plain, other))
