"""What a graph holds as constants: changes reach the replays, and nothing that a step makes begins anew with each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch import Tensor, nn
from torch.nn import functional

from loop.engines.test_capture_faults import Wrapped, at_step
from loop.engines.test_on_fake_cuda import OPTIMIZERS, assert_trained_alike, make_loop
from loop.reference import make_batches, make_model, plain_loop
from torch_sink.amp import DynamicLossScaler
from torch_sink.loop import StepLoop
from torch_sink.loop.engines.memory import fingerprint

pytestmark = pytest.mark.halved


def compare_after(change: Any, make: Any = Wrapped, **options: Any) -> StepLoop:
    """Train with a change after step 8, as the plain loop does."""
    batches = make_batches(16)
    torch.manual_seed(0)
    loop = make_loop(model=make().cuda(), steps_per_sync=4, **options)
    history = loop.run(batches, callbacks=at_step(8, lambda loop: change(loop.model)))
    model = make()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    first, _ = plain_loop(model, functional.cross_entropy, optimizer, batches[:8])
    change(model)
    second, _ = plain_loop(model, functional.cross_entropy, optimizer, batches[8:])
    torch.testing.assert_close(history.losses, torch.cat([first, second]), rtol=1e-5, atol=1e-6)
    assert_trained_alike(loop.model, model, rtol=1e-4, atol=1e-5)
    assert "mode: graph" in loop.explain()
    return loop


def freeze(model: Wrapped) -> None:
    for parameter in model.inner[0].parameters():
        parameter.requires_grad_(False)


def stop_averaging(model: Wrapped) -> None:
    model.inner[1].eval()


def replace_buffer(model: Wrapped) -> None:
    model.inner[1].running_var = model.inner[1].running_var * 4


def replace_layer(model: Wrapped) -> None:
    model.inner[2] = nn.Tanh()


@pytest.mark.parametrize("change", [freeze, stop_averaging, replace_buffer, replace_layer])
def test_what_a_callback_changes_reaches_the_replays(fake_cuda: FakeCuda, change: Any) -> None:
    assert "captured again" in compare_after(change).explain()


def test_a_dropout_rate_that_a_callback_sets_reaches_the_replays(fake_cuda: FakeCuda) -> None:
    def model() -> Wrapped:
        made = Wrapped()
        made.inner[3].p = 0.0
        return made

    def all_dropped(model: Wrapped) -> None:
        model.inner[3].p = 1.0

    assert "captured again" in compare_after(all_dropped, model).explain()


class Frozen(Wrapped):
    """Begins with a layer that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.inner[0].requires_grad_(False)


def thaw(model: Wrapped) -> None:
    model.inner[0].requires_grad_(True)


@pytest.mark.parametrize("scaler", [None, 16.0])
def test_state_of_layers_that_begin_to_train_later_is_not_made_by_a_graph(fake_cuda: FakeCuda, scaler: Any) -> None:
    compare_after(thaw, Frozen, loss_scaler=DynamicLossScaler(scaler) if scaler else None)


class UsesALayerLate(Wrapped):
    """A layer gets its first gradient in a step that would be captured: what Python decides, no fingerprint sees."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(5, 5)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        outputs = self.inner(inputs)
        return self.late(outputs) if self.calls > 3 else outputs


def test_state_that_is_made_inside_a_capture_is_made_again_outside(fake_cuda: FakeCuda) -> None:
    batches = make_batches(10)
    torch.manual_seed(0)
    model = UsesALayerLate()
    loop = make_loop(model=UsesALayerLate().cuda(), steps_per_sync=5)
    loop.model.load_state_dict(model.state_dict())
    history = loop.run(batches)
    losses, _ = plain_loop(model, functional.cross_entropy, OPTIMIZERS["SGD"](model.parameters()), batches)
    torch.testing.assert_close(history.losses, losses, rtol=1e-5, atol=1e-6)
    assert_trained_alike(loop.model, model, rtol=1e-4, atol=1e-5)
    assert "mode: graph" in loop.explain()


class Averaging(Wrapped):
    """Puts a new tensor in the place of a buffer in every step."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.in_place = in_place

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        mean = self.mean * 0.5 + outputs.detach().mean()
        if self.in_place:
            self.mean.copy_(mean)
        else:
            self.mean = mean
        return outputs + mean


@pytest.mark.parametrize("in_place", [False, True])
def test_buffers_that_are_replaced_in_every_step_are_not_captured(fake_cuda: FakeCuda, in_place: bool) -> None:
    batches = make_batches(10)
    loop = make_loop(model=Averaging(in_place).cuda(), steps_per_sync=4)
    history = loop.run(batches)
    model = Averaging(in_place)
    losses, _ = plain_loop(model, functional.cross_entropy, OPTIMIZERS["SGD"](model.parameters()), batches)
    torch.testing.assert_close(history.losses, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loop.model.mean.cpu(), model.mean)
    assert ("mode: graph" in loop.explain()) == in_place
    assert ("new tensors in the place of the buffer mean" in loop.explain()) != in_place


def test_a_module_in_the_place_of_another_is_seen_where_it_takes_its_memory_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = SimpleNamespace(parameters=[*model.parameters()], average=None)
    step: Any = SimpleNamespace(update=update, static_gradients=False, reduces_always=False)
    before, place = fingerprint(model, step, optimizer, set()), id(model[1])
    model._modules["1"] = None
    others = [nn.GELU()]
    while id(others[-1]) != place and len(others) < 1000:
        others.append(nn.GELU())
    model._modules["1"] = others[-1]
    assert fingerprint(model, step, optimizer, set()) != before


class Tempered(nn.Module):
    """The usual model with a temperature that is a tensor, or a number."""

    def __init__(self, temperature: Any) -> None:
        super().__init__()
        self.inner = make_model(dropout=0.0)
        if isinstance(temperature, Tensor):
            self.register_buffer("temperature", temperature)
        else:
            self.temperature = temperature

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs) / self.temperature
        return outputs

    def cool(self) -> None:
        if isinstance(self.temperature, Tensor):
            self.temperature.fill_(0.5)
        else:
            self.temperature = 0.5


@pytest.mark.parametrize("temperature", [torch.ones(()), 1.0], ids=["a buffer", "a number"])
def test_replays_see_values_of_tensors_and_no_numbers_of_a_model(fake_cuda: FakeCuda, temperature: Any) -> None:
    """As the documentation says."""
    losses = []
    for mode in ("graph", "eager"):
        loop = make_loop(model=Tempered(temperature).cuda(), steps_per_sync=4, mode=mode)
        callbacks = at_step(8, lambda loop: loop.model.cool())
        losses.append(loop.run(make_batches(12), callbacks=callbacks).losses)
        loop.close()
    assert torch.allclose(*losses) == isinstance(temperature, Tensor)
