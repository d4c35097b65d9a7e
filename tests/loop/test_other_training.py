"""A state of another training: one error that names both, and everything is as it was before. All is loaded, or nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from loop.reference import make_batches, make_model
from torch_sink.amp import DynamicLossScaler, StaticLossScaler
from torch_sink.loop import StepLoop
from torch_sink.mindspore import Model
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved


def groups_of(model: nn.Module, count: int) -> Any:
    parameters = [*model.parameters()]
    return [{"params": parameters[place::count], "lr": 0.1} for place in range(count)]


def make(outputs: int = 5, **changes: Any) -> StepLoop:
    """A loop with everything that a state holds; `changes` make it another one."""
    model = make_model(changes.pop("seed", 0))
    model[6] = nn.Linear(24, outputs)
    groups = changes.pop("groups", 2)
    groups = groups(model) if callable(groups) else groups_of(model, groups)
    optimizer = changes.pop("optimizer", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))(groups)
    scheduler = changes.pop("scheduler", lambda o: lr_scheduler.CosineAnnealingLR(o, 9))
    options = {
        "scheduler": scheduler(optimizer) if scheduler else None,
        "schedule": "step" if scheduler else None,
        "loss_scaler": DynamicLossScaler(64.0),
        "accumulate": 2,
        "ema": 0.9,
        "amp": "O1",
        **changes,
    }
    return StepLoop(model, functional.cross_entropy, optimizer, **options)


def reversed_groups(model: nn.Module) -> Any:
    return [{"params": [*reversed(group["params"])]} for group in groups_of(model, 2)]


def fewer_parameters(model: nn.Module) -> Any:
    first, second = groups_of(model, 2)
    return [first, {"params": second["params"][:1]}]


def two_schedulers(optimizer: Any) -> Any:
    return lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    )


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer": ({"optimizer": torch.optim.AdamW}, "saved with the optimizer SGD, and this loop has AdamW"),
    "scheduler": (
        {"scheduler": lambda o: lr_scheduler.StepLR(o, 3)},
        "saved with the scheduler CosineAnnealingLR, and this loop has StepLR",
    ),
    "two schedulers": ({"scheduler": two_schedulers}, r"CosineAnnealingLR, .* SequentialLR\(LinearLR, ExponentialLR\)"),
    "no scheduler": ({"scheduler": None}, "saved with 'scheduler', and this loop has none"),
    "scaler": (
        {"loss_scaler": StaticLossScaler(64.0)},
        "saved with the scaler DynamicLossScaler, and this loop has StaticLossScaler",
    ),
    "no scaler": ({"loss_scaler": None}, "saved with 'scaler', and this loop has none"),
    "no average": ({"ema": None}, "saved with 'average', and this loop has none"),
    "precision": ({"amp": "O2"}, "saved with the precision O1 bfloat16, and this loop has O2 bfloat16"),
    "float32": ({"amp": "O0"}, "saved with the precision O1 bfloat16, and this loop has O0"),
    "accumulate": ({"accumulate": 3}, "saved with accumulate=2, and this loop has 3"),
    "groups": ({"groups": 3}, "saved with 2 parameter groups, and this loop has 3"),
    "fewer": ({"groups": fewer_parameters}, "saved with 2 parameters in group 1, and this loop has 1"),
    "order": ({"groups": reversed_groups}, "the parameter 0.weight in group 0, where this loop has 6.bias"),
    "shape": ({"outputs": 6}, r"average of 6.weight of shape \[5, 24\], and this loop has \[6, 24\]"),
    "several": ({"optimizer": torch.optim.AdamW, "amp": "O0"}, "optimizer SGD, .*; saved with the precision O1"),
}


def everything(loop: StepLoop) -> dict[str, Any]:
    """All that a state would change, copied."""
    state = {name: value for name, value in loop.state_dict().items() if name != "random"}
    scheduler, parts = loop.scheduler, [*loop.model.parameters()]
    state.update(gradients=[p.grad for p in parts], scheduler=scheduler.state_dict() if scheduler else None)
    state.update(draws=(torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()))
    return copy.deepcopy(
        {**state, "resumed": loop.state.is_resumed, "unbegun": getattr(loop.state.average, "_unbegun", 0)}
    )


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def trained(loop: StepLoop, steps: int = 5) -> StepLoop:
    loop.run(make_batches(6), max_steps=steps)
    return loop


def refused(loop: StepLoop, load: Callable[[], Any], kind: type[Exception], text: str) -> None:
    before = everything(loop)
    state, groups = loop.optimizer.state, loop.optimizer.param_groups
    with pytest.raises(kind, match=text):
        load()
    assert_same(everything(loop), before)
    assert loop.optimizer.state is state
    assert loop.optimizer.param_groups is groups
    assert trained(loop, 3).history.losses.isfinite().all(), "it trains on"


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.sampled(8)
def test_another_training_is_named_and_leaves_the_loop_as_it_was(name: str, tmp_path: Path) -> None:
    changes, text = OTHERS[name]
    trained(make()).save(tmp_path)
    loop = trained(make(seed=1, **changes))
    expected = f"of another training, and nothing of it was loaded: .*{text}"
    refused(loop, lambda: loop.resume(tmp_path), ValueError, expected)
    state = trained(make()).state_dict()
    refused(loop, lambda: loop.load_state_dict(state), ValueError, expected)


def test_the_same_training_is_loaded(tmp_path: Path) -> None:
    saved = trained(make())
    saved.save(tmp_path)
    loop = trained(make(seed=1), 3)
    assert loop.resume(tmp_path) == 5
    assert_same({**everything(loop), "resumed": False}, {**everything(saved)})


def test_another_model_leaves_the_loop_as_it_was() -> None:
    """torch copies what fits before it raises."""
    state = trained(make(ema=None)).state_dict()
    loop = trained(make(outputs=6, seed=1, ema=None))
    refused(loop, lambda: loop.load_state_dict(state), RuntimeError, "size mismatch for 6.weight")
    del state["model"]["1.running_mean"]
    loop = trained(make(seed=1, ema=None))
    refused(loop, lambda: loop.load_state_dict(state), RuntimeError, "Missing key.*running_mean")


@pytest.mark.parametrize("saved", [1, 4])
def test_another_shape_of_a_buffer_that_torch_does_not_save_leaves_the_loop_as_it_was(saved: int) -> None:
    def with_grid(size: int) -> StepLoop:
        loop = make(ema=None)
        loop.model.register_buffer("grid", torch.ones(size), persistent=False)
        return trained(loop)

    state, loop = with_grid(saved).state_dict(), with_grid(9)
    message = rf"the buffer grid \[{saved}\], and this loop has \[9\]"
    refused(loop, lambda: loop.load_state_dict(state), ValueError, message)
    evaluates = StepLoop(loop.model, functional.cross_entropy)
    with pytest.raises(ValueError, match=message):
        evaluates.load_state_dict(state)


def place_of(loader: SinkLoader) -> dict[str, Any]:
    """The position, without the global generators, which are the training's too."""
    return {name: value for name, value in loader.state_dict().items() if name != "random_state"}


class Moody(torch.optim.SGD):
    """Fails in the middle of loading."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        raise KeyError("mood")


def test_an_error_in_the_middle_undoes_what_was_loaded() -> None:
    moody = lambda p: Moody(p, lr=0.1, momentum=0.9)  # noqa: E731
    state = trained(make(optimizer=moody)).state_dict()
    loop = trained(make(seed=1, optimizer=moody))
    refused(loop, lambda: loop.load_state_dict(state), ValueError, r"Moody, which cannot load it \(KeyError: 'mood'\)")


def test_a_state_without_names_is_compared_by_what_it_holds() -> None:
    """As earlier versions wrote it."""
    state = trained(make(ema=None)).state_dict()
    del state["made_of"]
    for changes, text in (
        ({"optimizer": torch.optim.AdamW}, r"another optimizer than AdamW, which cannot load it \(KeyError: 'step'\)"),
        ({"optimizer": torch.optim.RMSprop}, "another optimizer than RMSprop, which cannot load it"),
        ({"groups": 3}, r"parameter groups of \[3, 2\] parameters, and this loop has \[2, 2, 1\]"),
        ({"loss_scaler": StaticLossScaler(2.0)}, None),
    ):
        loop = trained(make(seed=1, ema=None, **changes))
        if text is not None:
            refused(loop, lambda loop=loop: loop.load_state_dict(state), ValueError, text)
    loop = trained(make(seed=1, ema=None))
    loop.load_state_dict(state)
    assert loop.step_count == 5


def test_a_position_that_does_not_fit_leaves_loop_and_loader_as_they_were(tmp_path: Path) -> None:
    def loader_of(samples: int) -> SinkLoader:
        data = TensorDataset(torch.randn(samples, 3, 8, 8), torch.arange(samples) % 5)
        generator = torch.Generator().manual_seed(2)
        return SinkLoader(DataLoader(data, batch_size=4, shuffle=True, generator=generator))

    saved, data = make(), loader_of(24)
    saved.run(data, max_steps=3)
    saved.save(tmp_path, data)
    loop, others = trained(make(seed=1)), loader_of(40)
    next(iter(others))
    position = place_of(others)
    refused(loop, lambda: loop.resume(tmp_path, others), ValueError, "24 samples")
    assert_same(place_of(others), position)
    loop, others = trained(make(seed=1, amp="O0")), loader_of(24)
    next(iter(others))
    position = place_of(others)
    refused(loop, lambda: loop.resume(tmp_path, others), ValueError, "precision")
    assert_same(place_of(others), position)


def test_a_model_of_mindspores_kind_says_the_same(tmp_path: Path) -> None:
    def model_of(kind: Any) -> Model:
        network = make_model()
        return Model(network, functional.cross_entropy, kind(network.parameters(), lr=0.1))

    first = model_of(torch.optim.SGD)
    first.train(1, make_batches(3))
    first.loop.save(tmp_path)
    other = model_of(torch.optim.Adam)
    with pytest.raises(ValueError, match="saved with the optimizer SGD, and this loop has Adam"):
        other.loop.resume(tmp_path)
    assert other.loop.step_count == 0


def test_a_loop_that_evaluates_takes_what_it_needs(tmp_path: Path) -> None:
    """In any precision, whatever optimizer, scheduler and scaler there were."""
    trained(make()).save(tmp_path)
    model = make_model(3)
    judge = StepLoop(model, functional.cross_entropy, amp="O2", ema=0.9)
    assert judge.resume(tmp_path) == 5
