"""`scaler.step(optimizer)` in a step of one's own, against torch.amp.GradScaler, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from loop.reference import assert_equal_training, make_batches, make_model
from loop.step.test_scaler import DENSE_OPTIMIZERS
from torch_sink.amp import DynamicLossScaler, StaticLossScaler, auto_mixed_precision, grads_finite
from torch_sink.errors import UnsupportedOperation
from torch_sink.loop import jit, no_host_sync
from torch_sink.loop.engines import jit as compiler
from torch_sink.mindspore import data_sink

pytestmark = pytest.mark.halved

SCALE, WINDOW = 2.0**10, 3


def poisoned_batches(infinite: set[int], count: int = 10) -> list[Any]:
    return [(*batch, torch.tensor(math.inf if i in infinite else 0.0)) for i, batch in enumerate(make_batches(count))]


def make_forward(model: nn.Module) -> Callable[..., Tensor]:
    """A loss under float16 autocast; the last part of the batch makes its gradients infinite."""

    def forward(inputs: Tensor, targets: Tensor, poison: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            outputs = model(inputs)
        return functional.cross_entropy(outputs.float(), targets) + (model[-1].bias * poison).sum()

    return forward


Training = tuple[nn.Module, torch.optim.Optimizer]


def make(name: str) -> Training:
    model = make_model()
    torch.manual_seed(3)
    return model, DENSE_OPTIMIZERS[name](model.parameters())


def recipe(name: str, batches: list[Any], *, clip: float | None, compiled: Any = lambda forward: forward) -> Any:
    """As in torch's documentation."""
    model, optimizer = make(name)
    forward = compiled(make_forward(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=WINDOW)
    scales = []
    for batch in batches:
        optimizer.zero_grad()
        scaler.scale(forward(*batch)).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return (model, optimizer), scales


def ours(
    name: str, *, clip: float | None, compiled: Any = lambda forward: forward
) -> tuple[Training, Callable[..., Tensor]]:
    """A training step that returns the scale; nothing in it asks the host."""
    model, optimizer = make(name)
    forward = compiled(make_forward(model))
    scaler = DynamicLossScaler(SCALE, 2, WINDOW)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        scaler.scale(forward(*batch)).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.adjust(scaler.step(optimizer))
        return scaler.scale_value.clone()

    return (model, optimizer), step


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("infinite", [{0, 1, 5}, {3, 4, 9}])
@pytest.mark.parametrize("name", DENSE_OPTIMIZERS)
@pytest.mark.sampled(30)
def test_eager_steps_equal_the_recipe(name: str, infinite: set[int], clip: float | None) -> None:
    if name == "SGD fused":
        infinite = infinite - {0, 1}  # torch leaves momentum that was never written after a first step that is skipped
    batches = poisoned_batches(infinite)
    expected, scales = recipe(name, batches, clip=clip)
    training, step = ours(name, clip=clip)
    torch.manual_seed(3)
    with no_host_sync():
        seen = [step(*batch) for batch in batches]
    assert [scale.item() for scale in seen] == scales
    assert_equal_training(training, expected)


@pytest.mark.parametrize("sink_size", [1, 3, 10])
def test_in_a_data_sink(sink_size: int) -> None:
    batches = poisoned_batches({0, 4, 5})
    expected, scales = recipe("AdamW", batches + batches[:2], clip=None)
    training, step = ours("AdamW", clip=None)
    torch.manual_seed(3)
    sink = data_sink(step, batches, sink_size=sink_size)
    with no_host_sync():
        seen = [sink() for _ in range(12 // sink_size)]
    if sink_size != 10:
        assert [scale.item() for scale in seen] == scales[sink_size - 1 :: sink_size]
        assert_equal_training(training, expected)
    else:
        assert seen[0].item() == scales[9]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("clip", [None, 0.5])
def test_under_jit(clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole step is jitted; in the recipe the forward is."""
    graphs: list[Any] = []
    monkeypatch.setattr(
        compiler,
        "inductor_backend",
        lambda graph, inputs, *, options: graphs.append(graph) or graph.forward,
    )
    torch._dynamo.reset()
    batches = poisoned_batches({0, 4})
    expected, scales = recipe("Adam", batches, clip=clip, compiled=jit)
    training, step = ours("Adam", clip=clip)
    torch.manual_seed(3)
    graphs.clear()
    compiled = jit(step)
    assert [compiled(*batch).item() for batch in batches] == scales
    assert graphs
    assert_equal_training(training, expected)


def test_several_optimizers_and_levels() -> None:
    torch.manual_seed(0)
    model = auto_mixed_precision(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "O2", torch.float16)
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[1].parameters())]
    scaler = DynamicLossScaler(4.0, 2, 1)
    for poison, expected in ((0.0, 8.0), (math.inf, 4.0), (0.0, 8.0)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model.zero_grad()
        scaler.scale(model(torch.ones(1, 4)).sum() + (model[1].bias * poison).sum()).backward()
        assert grads_finite(optimizers[0]).item() is True
        assert grads_finite(model).item() is grads_finite(model.parameters()).item() is (poison == 0.0)
        first, second = (scaler.step(optimizer) for optimizer in optimizers)
        assert (first.item(), second.item()) == (True, poison == 0.0)
        scaler.adjust(first & second)
        assert scaler.scale_value.item() == expected
        moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
        assert moved == [True, True] + [poison == 0.0] * 2


def test_a_float16_loss_does_not_overflow_by_its_scale() -> None:
    loss = torch.tensor(2.0, dtype=torch.float16)
    scaled = DynamicLossScaler(2.0**16).scale(loss)
    assert scaled.item() == 2.0**17
    assert scaled.dtype == torch.amp.GradScaler("cpu").scale(loss).dtype


class Counting(torch.optim.SGD):
    """Counts in Python numbers."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = 1


def test_what_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), StaticLossScaler(2.0)
    with pytest.raises(ValueError, match="no parameter of the optimizer has a gradient"):
        scaler.step(optimizer)
    with pytest.raises(ValueError, match="no gradient"):
        grads_finite(optimizer)
    with pytest.raises(TypeError, match="optimizer is a list"):
        scaler.step([parameter])
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="since its last step"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert torch.equal(parameter.detach(), torch.full((2,), 0.9))
    with pytest.raises(UnsupportedOperation, match="Python numbers"):
        scaler.step(Counting([parameter], lr=0.1))
