"""The moving average of the weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from loop.reference import make_batches, make_model
from torch_sink.amp import StaticLossScaler
from torch_sink.loop import LambdaCallback, StepLoop
from torch_sink.loop.step.update import WeightAverage


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


@pytest.mark.parametrize("decay", [0.9, 0.25])
def test_average_with_a_scaler_equals_that_without_one_in_a_handful_of_calls(decay: float) -> None:
    model = make_model()
    model.append(nn.Linear(5, 5).bfloat16()).append(nn.Linear(5, 5, dtype=torch.float64))
    ours, plain = WeightAverage(model, decay), WeightAverage(model, decay)
    for step, skips in enumerate((0.0, 0.0, 1.0, 0.0)):
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number + 9 * step)))
        if not skips:
            plain.update()
        with CountCalls() as calls:
            ours.update(torch.tensor(skips))
        for name, value in plain.model().state_dict().items():
            assert torch.equal(ours.model().state_dict()[name], value), name
    assert len(calls.names) < 20, "for ten parameters and three types of data"
    assert calls.names.count("aten::_foreach_lerp_") == 1
    assert "aten::lerp_" not in calls.names


class CountCalls(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


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


@pytest.mark.filterwarnings("ignore:`torch.jit.script", "ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("kind", ["scripted", "lazy", "lazy, with buffers"])
@pytest.mark.parametrize("scaler", [None, StaticLossScaler(2.0)])
def test_average_of_scripted_and_lazy_models(kind: str, scaler: StaticLossScaler | None) -> None:
    """The layers of a lazy model have no weights before the first step."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        if kind == "lazy, with buffers":
            layers = nn.LazyLinear(7), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(5)
            return nn.Sequential(nn.Flatten(), *layers)
        if kind == "lazy":
            return nn.Sequential(nn.Flatten(), nn.LazyLinear(7), nn.ReLU(), nn.LazyLinear(5))
        return torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(192, 7), nn.ReLU(), nn.Linear(7, 5)))

    batches, model, plain = make_batches(6), make(), make()
    torch.manual_seed(1)
    loop = StepLoop(model, functional.cross_entropy, make_optimizer(model), ema=0.9, loss_scaler=scaler)
    loop.run(batches)
    torch.manual_seed(1)
    optimizer, averages = make_optimizer(plain), list[Tensor]()
    for inputs, targets in batches:
        optimizer.zero_grad()
        functional.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
        now = [parameter.detach().clone() for parameter in plain.parameters()]
        averages = [old.lerp(new, 1 - 0.9) for old, new in zip(averages, now, strict=True)] if averages else now
    assert all(map(torch.equal, loop.ema_model().parameters(), averages))
    assert loop.ema_model()(batches[0][0]).shape == (8, 5)
    restored = StepLoop(make(), functional.cross_entropy, ema=0.9)
    restored.load_state_dict(loop.state_dict())
    assert all(map(torch.equal, restored.ema_model().parameters(), averages))


@pytest.mark.parametrize("scaler", [None, StaticLossScaler(2.0)])
def test_average_of_frozen_integers_is_that_of_torch(scaler: StaticLossScaler | None) -> None:
    """As a quantized layer has them."""

    def make() -> nn.Module:
        model = make_model()
        model.codes = nn.Parameter(torch.arange(-5, 5, dtype=torch.int8), requires_grad=False)
        return model

    model, plain = make(), make()
    loop = StepLoop(model, functional.cross_entropy, make_optimizer(model), ema=0.9, loss_scaler=scaler)
    loop.run(make_batches(3))
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        averaged.update_parameters(plain)
    assert torch.equal(loop.ema_model().codes, averaged.module.codes)
