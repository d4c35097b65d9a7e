"""A checkpoint holds what a training changes outside of its model: a loss function with state, further parameters."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from loop.reference import make_batches, make_model
from torch_sink.loop import StepLoop

EPOCH, ACCUMULATE = 5, 2


class Learned(nn.Module):
    """A loss with a temperature that is trained, a count of its calls, and one that `state_dict()` leaves out."""

    def __init__(self, classes: int = 1) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(classes))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(()), persistent=False)

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        self.hidden += 0.5
        return functional.cross_entropy(scores * self.scale.exp() + self.hidden * self.scale, labels)


class AndModel(Learned):
    """A loss that reads the model's weights, as penalties do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return super().forward(scores, labels) + 0.1 * self.model[6].weight.square().sum()


def with_loss(seed: int = 0, kind: Callable[[nn.Module], nn.Module] = lambda _: Learned()) -> tuple[StepLoop, Any]:
    model = make_model(seed)
    loss = kind(model)
    outside = [loss.scale]
    optimizer = torch.optim.Adam([{"params": [*model.parameters()]}, {"params": outside}], lr=0.05)
    return StepLoop(model, loss, optimizer, accumulate=ACCUMULATE, steps_per_sync=1), outside


def with_penalty(seed: int = 0) -> tuple[StepLoop, Any]:
    return with_loss(seed, AndModel)


def with_projector(seed: int = 0) -> tuple[StepLoop, Any]:
    model = make_model(seed)
    projector = nn.Linear(5, 4)
    parameters = [*projector.parameters(), *model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    loop = StepLoop(
        model,
        None,
        optimizer,
        forward=lambda network, batch: projector(network(batch[0])).square().mean(),
        accumulate=ACCUMULATE,
        steps_per_sync=1,
    )
    return loop, [*projector.parameters()]


MAKERS = [with_loss, with_penalty, with_projector]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("stop", [3, 4, 7], ids=["inside an accumulation", "after an update", "in the second epoch"])
def test_a_resumed_run_goes_on_with_the_same_bits(make: Callable[..., Any], stop: int, tmp_path: Path) -> None:
    data = make_batches(EPOCH)
    loop, outside = make()
    expected = loop.run(data, epochs=3).losses

    first, _ = make()
    first.run(data, epochs=3, max_steps=stop)
    first.save(tmp_path, data)
    resumed, ours = make(seed=7)
    with torch.no_grad():
        for parameter in ours:
            parameter.fill_(5.0)
    assert resumed.resume(tmp_path, data) == stop
    assert torch.equal(resumed.run(data, epochs=3).losses, expected[stop:])
    assert all(map(torch.equal, ours, outside))
    if isinstance(loop.state.loss_fn, Learned):
        theirs = dict(loop.state.loss_fn.named_buffers())
        assert all(torch.equal(buffer, theirs[name]) for name, buffer in resumed.state.loss_fn.named_buffers())


def test_the_model_is_not_saved_a_second_time() -> None:
    loop, _ = with_penalty()
    assert loop.state_dict()["loss_fn"].keys() == {"scale"}
    loop.run(make_batches(2))
    assert loop.state_dict()["loss_fn"].keys() == {"scale", "calls"}


def test_the_loss_loads_without_a_loop(tmp_path: Path) -> None:
    loop, outside = with_loss()
    loop.run(make_batches(2))
    loss = Learned()
    loss.load_state_dict(torch.load(loop.save(tmp_path) / "state.pt", weights_only=True)["loss_fn"])
    assert torch.equal(loss.scale, outside[0])


def test_a_loop_that_evaluates_takes_the_loss_if_it_is_the_same(tmp_path: Path) -> None:
    loop, outside = with_loss()
    loop.run(make_batches(2))
    loop.save(tmp_path)
    loss = Learned()
    StepLoop(make_model(), loss).resume(tmp_path, must_exist=True)
    assert torch.equal(loss.scale, outside[0])
    for other in (functional.cross_entropy, Learned(5), nn.CrossEntropyLoss(weight=torch.ones(5))):
        StepLoop(make_model(), other).resume(tmp_path, must_exist=True)


def other_shape(seed: int = 0) -> tuple[StepLoop, Any]:
    return with_loss(seed, lambda _: Learned(5))


def stateless(seed: int = 0) -> tuple[StepLoop, Any]:
    loop, outside = with_loss(seed)
    return StepLoop(loop.model, functional.cross_entropy, loop.optimizer, accumulate=ACCUMULATE), outside


def wider_projector(seed: int = 0) -> tuple[StepLoop, Any]:
    loop, outside = with_projector(seed)
    outside[0].data = torch.zeros(9, 5)
    return loop, outside


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        (with_loss, other_shape, r"loss_fn holds scale \[1\], and in this loop it is \[5\]"),
        (with_loss, stateless, "a loss_fn that holds calls, scale, and the one of this loop holds nothing"),
        (with_projector, wider_projector, r"outside of the model, parameter 0.0 \[4, 5\], .* it is \[9, 5\]"),
    ],
)
def test_another_loss_or_parameter_is_named_and_nothing_is_loaded(saved: Any, here: Any, message: str) -> None:
    first, _ = saved()
    first.run(make_batches(2))
    loop, _ = here(seed=3)
    before = copy.deepcopy(loop.model.state_dict())
    with pytest.raises(ValueError, match=message):
        loop.load_state_dict(first.state_dict())
    assert all(map(torch.equal, loop.model.state_dict().values(), before.values()))


def test_a_state_that_fails_later_leaves_the_loss_as_it_was() -> None:
    first, _ = with_loss()
    first.run(make_batches(2))
    state = first.state_dict()
    del state["model"]["1.running_mean"]
    loop, outside = with_loss(seed=3)
    with pytest.raises(RuntimeError, match="running_mean"):
        loop.load_state_dict(state)
    assert outside[0].item() == 0
    assert loop.state.loss_fn.calls.item() == 0


@pytest.mark.parametrize("make", MAKERS)
def test_a_state_of_an_earlier_version_loads_and_says_what_it_lacks(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = make()
    first.run(make_batches(2))
    state = first.state_dict()
    for name in ("loss_fn", "loss_fn_buffers", "other_parameters"):
        del state[name]
    state["made_of"]["groups"] = [
        ["?" if name.startswith("loss_fn.") else name for name in group] for group in state["made_of"]["groups"]
    ]
    loop, outside = make(seed=3)
    before = [parameter.detach().clone() for parameter in outside]
    with caplog.at_level(logging.WARNING, "torch_sink"):
        loop.load_state_dict(state)
    assert f"{len(outside)} that the optimizer trains" in caplog.text
    assert loop.step_count == 2
    assert all(map(torch.equal, outside, before))


def training_by(loss: nn.Module, seed: int = 0) -> StepLoop:
    """A loop that trains the model, and the parameters of the loss function that require a gradient."""
    model = make_model(seed)
    trained = [one for one in loss.parameters() if one.requires_grad]
    return StepLoop(model, loss, torch.optim.SGD([*model.parameters(), *trained], lr=0.05))


def saved_by(loss: nn.Module, folder: Path) -> dict[str, Any]:
    loop = training_by(loss)
    loop.run(make_batches(3))
    return torch.load(loop.save(folder) / "state.pt", weights_only=True)


class Weighted(Learned):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.register_buffer("weight", torch.full((5,), weight))
        self.fixed = nn.Parameter(torch.full((5,), weight), requires_grad=False)


@pytest.mark.parametrize("trains", [True, False])
def test_class_weights_are_those_of_the_program_that_resumes(trains: bool, tmp_path: Path) -> None:
    assert saved_by(nn.CrossEntropyLoss(weight=torch.ones(5)), tmp_path)["loss_fn"] == {}
    for weight in (torch.arange(5.0), None):
        loss = nn.CrossEntropyLoss(weight=weight)
        loop = training_by(loss) if trains else StepLoop(make_model(), loss)
        assert loop.resume(tmp_path) == 3
        assert loss.weight is weight is None or torch.equal(loss.weight, torch.arange(5.0))


def test_class_weights_may_be_added(tmp_path: Path) -> None:
    saved_by(nn.CrossEntropyLoss(), tmp_path)
    loss = nn.CrossEntropyLoss(weight=torch.arange(5.0))
    assert training_by(loss).resume(tmp_path) == 3
    assert torch.equal(loss.weight, torch.arange(5.0))


def test_settings_of_a_loss_that_is_trained_stay_and_the_rest_is_loaded(tmp_path: Path) -> None:
    first = Weighted(1.0)
    assert saved_by(first, tmp_path)["loss_fn"].keys() == {"scale", "calls"}
    loss = Weighted(2.0)
    loop = training_by(loss)
    loop.resume(tmp_path)
    assert (loss.weight[0], loss.fixed[0], loss.calls, loss.hidden) == (2, 2, 3, 1.5)
    assert torch.equal(loss.scale, first.scale)
    assert loop.state_dict()["loss_fn"].keys() == {"scale", "calls"}, "before its first step too"


class Averaging(nn.Module):
    """Without a parameter that trains: running statistics, and a teacher that a step changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(5))
        self.teacher = nn.Linear(5, 5).requires_grad_(False)
        self.frozen = nn.Linear(1000, 10).requires_grad_(False)

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        self.center.lerp_(scores.detach().mean(0), 0.1)
        self.teacher.weight.data.lerp_(scores.detach().mean(0), 0.1)
        return functional.cross_entropy(scores - self.center, labels) + self.teacher(scores).square().mean()


def test_what_steps_change_in_place_is_saved_and_a_frozen_network_is_not(tmp_path: Path) -> None:
    first = Averaging()
    assert saved_by(first, tmp_path)["loss_fn"].keys() == {"center", "teacher.weight"}
    loss = Averaging()
    frozen = copy.deepcopy(loss.frozen.state_dict())
    training_by(loss).resume(tmp_path)
    assert torch.equal(loss.center, first.center)
    assert torch.equal(loss.teacher.weight, first.teacher.weight)
    assert all(map(torch.equal, loss.frozen.state_dict().values(), frozen.values()))


def test_a_state_from_before_the_first_step_takes_changes_back() -> None:
    loss = Averaging()
    loop, before = training_by(loss), copy.deepcopy(loss.state_dict())
    state = copy.deepcopy(loop.state_dict())
    loop.run(make_batches(3))
    assert not torch.equal(loss.center, before["center"])
    loop.load_state_dict(state)
    assert all(map(torch.equal, loss.state_dict().values(), before.values()))


def test_a_later_run_goes_on_saving_what_an_earlier_one_changed(tmp_path: Path) -> None:
    loss = Learned()
    loop = training_by(loss)
    loop.resume(tmp_path)
    loop.run(make_batches(2))
    loop.save(tmp_path)
    again = Learned()
    loop = training_by(again)
    loop.resume(tmp_path)
    again.forward = lambda scores, labels: functional.cross_entropy(scores * again.scale.exp(), labels)
    loop.run(make_batches(2))
    assert loop.state_dict()["loss_fn"]["calls"] == 2


class OfAKind(Learned):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_is_loaded(tmp_path: Path) -> None:
    saved_by(OfAKind({"number": 1}), tmp_path)
    loss = OfAKind({"number": 2})
    training_by(loss).resume(tmp_path)
    assert loss.extra == {"number": 1}


@pytest.mark.parametrize("extra", [OfAKind, lambda: None])
def test_a_part_that_would_not_load_is_left_out_with_one_warning(
    extra: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loss = OfAKind(extra)
    loop = training_by(loss)
    loop.run(make_batches(2))
    with caplog.at_level(logging.WARNING, "torch_sink"):
        loop.save(tmp_path)
        loop.save(tmp_path)
    assert caplog.text.count("_extra_state of loss_fn's state is not saved: it holds") == 1
    resumed = OfAKind("own")
    assert training_by(resumed).resume(tmp_path) == 2
    assert resumed.extra == "own"
    assert torch.equal(resumed.scale, loss.scale)


class Silent(Learned):
    """Keeps its parameter out of its state."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return None


def test_what_the_optimizer_trains_is_saved_where_the_loss_leaves_it_out(tmp_path: Path) -> None:
    first, loss = Silent(), Silent()
    saved_by(first, tmp_path)
    training_by(loss).resume(tmp_path)
    assert first.scale.item() != 0
    assert torch.equal(loss.scale, first.scale)
