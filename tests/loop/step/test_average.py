"""The moving average of the weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from loop.reference import make_batches, make_model
from torch_sink.amp import StaticLossScaler
from torch_sink.loop import LambdaCallback, StepLoop


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_average_equals_torch() -> None:
    batches = make_batches(8)
    model = make_model()
    torch.manual_seed(5)
    loop = StepLoop(model, functional.cross_entropy, make_optimizer(model), ema=0.9, steps_per_sync=3)
    loop.run(batches)
    model = make_model()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = make_optimizer(model)
    torch.manual_seed(5)
    for inputs, targets in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        averaged.update_parameters(model)
    ours = loop.ema_model()
    assert ours is not loop.model
    for name, value in averaged.module.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_average_stays_where_an_update_is_skipped() -> None:
    batches = make_batches(4)
    batches[2][0].fill_(float("inf"))
    weights = []
    model, scaler = make_model(), StaticLossScaler(2.0)
    loop = StepLoop(
        model, functional.cross_entropy, make_optimizer(model), ema=0.5, steps_per_sync=1, loss_scaler=scaler
    )
    note = LambdaCallback(on_train_step_end=lambda c: weights.append(loop.ema_model()[-1].weight.clone()))
    loop.run(batches, callbacks=[note])
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])


@pytest.mark.parametrize("name", ["Adagrad", "Adam"])
def test_average_begins_with_the_first_update_that_is_not_skipped(name: str) -> None:
    """Also where the optimizer's state is there before it: Adagrad makes it at once, Adam's is loaded."""
    batches = make_batches(5)
    results = []
    for skipped in (1, 0):
        model = make_model(dropout=0)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        if name == "Adam":
            other = torch.optim.Adam(make_model(1).parameters())
            functional.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
            for mine, parameter in zip(model.parameters(), other.param_groups[0]["params"], strict=True):
                parameter.grad = mine.grad
            other.step()
            optimizer.load_state_dict(other.state_dict())

        def forward(model: nn.Module, batch: Any) -> Tensor:
            return functional.cross_entropy(model(batch[0]), batch[1]) * batch[2]

        scaler = StaticLossScaler(2.0)
        loop = StepLoop(model, None, optimizer, ema=0.9, loss_scaler=scaler, steps_per_sync=2, forward=forward)
        factors = [math.inf] * skipped + [1.0] * 4
        loop.run([(*batches[1 - skipped + i], torch.tensor(factor)) for i, factor in enumerate(factors)])
        results.append([parameter.clone() for parameter in loop.ema_model().parameters()])
    assert all(torch.equal(skipped, plain) for skipped, plain in zip(*results, strict=True))
