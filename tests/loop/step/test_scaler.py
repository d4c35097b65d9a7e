"""Loss scaling on the device: the scale's rule, and skipped updates bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from loop.reference import assert_equal_training, make_batches, make_model
from torch_sink.amp import DynamicLossScaler, StaticLossScaler, all_finite
from torch_sink.errors import SinkError
from torch_sink.loop import StepLoop, no_host_sync

pytestmark = pytest.mark.halved

DENSE_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=1e-3),
    "SGD plain": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
}


def scale_in_python(scale: float, factor: float, window: int, finite: list[bool]) -> list[tuple[float, int]]:
    """The rule in plain Python numbers, rounded to float32 as the device's state is."""
    states, counter = [], 0
    for step_finite in finite:
        if not step_finite:
            scale, counter = max(1.0, scale / factor), 0
        else:
            grown = scale * factor
            if counter == window - 1 and grown <= torch.finfo(torch.float32).max:
                scale = grown
            counter = (counter + 1) % window
        scale = torch.tensor(scale, dtype=torch.float32).item()
        states.append((scale, counter))
    return states


@pytest.mark.parametrize(("scale", "factor", "window"), [(2.0**16, 2, 3), (4.0, 2, 1), (2.0**126, 2, 1), (9.0, 3, 2)])
def test_dynamic_scale_follows_the_rule(scale: float, factor: float, window: int) -> None:
    finite = [True, True, False, True, True, True, False, False, False, *[True] * 9, *[False] * 30]
    scaler = DynamicLossScaler(scale, factor, window)
    seen = []
    for step_finite in finite:
        assert scaler.adjust(torch.tensor(step_finite)) is True
        seen.append((scaler.scale_value.item(), scaler.counter.item()))
    assert seen == scale_in_python(scale, factor, window, finite)
    assert min(value for value, _ in seen) == 1.0 or scale > 2.0**100


def test_static_scale_and_nested_values() -> None:
    scaler = StaticLossScaler(8.0)
    assert scaler.adjust(torch.tensor(False)) is False
    scaled = scaler.scale({"a": [torch.tensor(2.0)], "b": (torch.tensor([1.0, -1.0], dtype=torch.float16),)})
    assert scaled["a"][0].item() == 16.0
    assert scaled["b"][0].dtype == torch.float16
    assert torch.equal(scaler.unscale(scaled)["b"][0], torch.tensor([1.0, -1.0], dtype=torch.float16))
    with pytest.raises(TypeError, match="cannot scale str"):
        scaler.scale("loss")
    with pytest.raises(TypeError, match="cannot scale float"):
        scaler.scale([torch.tensor(2.0), 1.0])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_all_finite() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan])
    assert all_finite(good).item() is True
    assert all_finite([good, bad]).item() is False
    with no_host_sync():
        all_finite([good, bad])
    assert all_finite([None, good]).item() is True
    assert all_finite(tensor for tensor in (None, good, None, bad)).item() is False
    assert all_finite([torch.tensor([math.inf], dtype=torch.float16)]).item() is False
    assert all_finite([torch.sparse_coo_tensor([[1]], [math.nan], (3,), check_invariants=True), good]).item() is False
    for nothing in ([], [None]):
        with pytest.raises(ValueError, match="at least one"):
            all_finite(nothing)


def test_scalers_say_what_they_hold() -> None:
    scaler = DynamicLossScaler(2.0**16, 2, 3)
    scaler.adjust(torch.tensor(False))
    assert repr(scaler) == "DynamicLossScaler(scale_value=32768, scale_factor=2, scale_window=3)"
    elsewhere = StaticLossScaler(8).to(torch.device("meta"))
    with no_host_sync():
        assert repr(StaticLossScaler(8)) == "StaticLossScaler(scale_value=8)"
        assert repr(elsewhere) == "StaticLossScaler(scale_value=<on meta>)", "reading it would wait"


def loss_with_infinities(inject: Tensor) -> Callable[[nn.Module, Any], Tensor]:
    """A loss whose gradients become infinite, and not only large, where the third part of the batch says so."""

    def forward(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets, poison = batch
        return functional.cross_entropy(model(inputs), targets) + (model[-1].bias * poison).sum()

    return forward


def poisoned_batches(infinite_steps: set[int], count: int = 10) -> list[Any]:
    return [
        (*batch, torch.tensor(math.inf if step in infinite_steps else 0.0))
        for step, batch in enumerate(make_batches(count))
    ]


def host_checked_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], scale: float, window: int, accumulate: int
) -> tuple[list[bool], list[float]]:
    """The reference: looks at the gradients on the host, and simply does not call step()."""
    forward = loss_with_infinities(torch.zeros(()))
    counter, skipped, scales = 0, [], []
    for step, batch in enumerate(batches):
        if step % accumulate == 0:
            optimizer.zero_grad()
        (forward(model, batch) / accumulate * scale).backward()
        if (step + 1) % accumulate:
            skipped.append(False)
            continue
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient.mul_(1 / scale)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        skipped.append(not finite)
        if finite:
            optimizer.step()
            scale, counter = (scale * 2 if counter == window - 1 else scale), (counter + 1) % window
        else:
            scale, counter = max(1.0, scale / 2), 0
        scales.append(scale)
    return skipped, scales


@pytest.mark.parametrize("name", DENSE_OPTIMIZERS)
@pytest.mark.parametrize("infinite_steps", [{0, 1, 5}, {3, 4, 9}])
@pytest.mark.sampled(14)
def test_skipped_updates_bit_for_bit(name: str, infinite_steps: set[int]) -> None:
    batches = poisoned_batches(infinite_steps)
    results = []
    for ours in (True, False):
        model = make_model()
        optimizer = DENSE_OPTIMIZERS[name](model.parameters())
        torch.manual_seed(3)
        if ours:
            scaler = DynamicLossScaler(2.0**10, 2, 3)
            loop = StepLoop(
                model,
                None,
                optimizer,
                forward=loss_with_infinities(torch.zeros(())),
                loss_scaler=scaler,
                clip_grad_norm=0.5,
                steps_per_sync=4,
            )
            # Adagrad makes its state at once and plain SGD has none, so that even their first update can be masked.
            checks = 0 if optimizer.state or name == "SGD plain" else min(set(range(10)) - infinite_steps) + 1
            history = loop.run(batches)
            skipped, scale = history.overflows.tolist(), scaler.scale_value.item()
            assert history.host_syncs == 3 + checks
        else:
            skipped, scales = host_checked_loop(model, optimizer, batches, 2.0**10, 3, 1)
            scale = scales[-1]
        results.append((model, optimizer, skipped, scale))
    assert_equal_training(results[0][:2], results[1][:2])
    assert results[0][2:] == results[1][2:]
    assert [step for step, flag in enumerate(results[0][2]) if flag] == sorted(infinite_steps)


def test_skipped_update_of_an_accumulation() -> None:
    batches = poisoned_batches({4})
    results = []
    for ours in (True, False):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters())
        torch.manual_seed(3)
        if ours:
            loop = StepLoop(
                model,
                None,
                optimizer,
                forward=loss_with_infinities(torch.zeros(())),
                loss_scaler=DynamicLossScaler(4.0, 2, 3),
                clip_grad_norm=0.5,
                accumulate=2,
                steps_per_sync=3,
            )
            skipped = loop.run(batches).overflows.tolist()
        else:
            skipped, _ = host_checked_loop(model, optimizer, batches, 4.0, 3, 2)
        results.append((model, optimizer, skipped))
    assert_equal_training(results[0][:2], results[1][:2])
    # The infinity came in iteration 4, the update that was skipped is that of iteration 5.
    assert results[0][2] == results[1][2] == [step == 5 for step in range(10)]


class TwoBranches(nn.Module):
    """The second branch gets its first gradients at the fourth call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(4, 3), nn.Linear(4, 3), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.first(inputs) + (self.second(inputs) if self.calls > 3 else 0)


def test_parameters_that_join_late_are_checked_on_the_host() -> None:
    """Their optimizer state does not exist yet, so a mask would have nothing to put back."""

    def train(ours: bool) -> nn.Module:
        torch.manual_seed(0)
        model = TwoBranches()
        optimizer = torch.optim.NAdam(model.parameters())
        batches = [(torch.full((2, 4), math.inf if step == 3 else 1.0), torch.tensor([0, 1])) for step in range(6)]
        if ours:
            StepLoop(model, functional.cross_entropy, optimizer, loss_scaler=StaticLossScaler(2.0)).run(batches)
            return model
        for inputs, targets in batches:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            if all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
                optimizer.step()
        return model

    for ours, plain in zip(train(True).parameters(), train(False).parameters(), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_gradients_are_unscaled_and_skipped() -> None:
    def train(ours: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 3))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        forward = loss_with_infinities(torch.zeros(()))
        poison = torch.tensor([0.0, 0.0, 0.0, math.inf, 0.0, 0.0])
        batches = [
            (torch.tensor([[step, 1, 1], [2, step, 8]]), torch.tensor([0, 2]), poison[step]) for step in range(6)
        ]
        if ours:
            history = StepLoop(model, None, optimizer, forward=forward, loss_scaler=StaticLossScaler(8.0)).run(batches)
            assert history.overflows.nonzero().flatten().tolist() == [3]
            return model
        for batch in batches:
            optimizer.zero_grad()
            forward(model, batch).backward()
            if batch[2].isfinite():
                optimizer.step()
        return model

    for ours, plain in zip(train(True).parameters(), train(False).parameters(), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("scaler", [None, StaticLossScaler(2.0)])
@pytest.mark.parametrize("options", [{}, {"dampening": 0.4, "weight_decay": 0.1}, {"dampening": 0.4, "maximize": True}])
def test_parameters_may_join_late_under_fused_sgd(scaler: StaticLossScaler | None, options: dict[str, Any]) -> None:
    """torch's fused kernel takes momentum buffers for all parameters or for none, and raises otherwise."""
    models = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = TwoBranches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused, **options)
        batches = [(torch.randn(2, 4), torch.tensor([0, 1])) for _ in range(8)]
        StepLoop(model, functional.cross_entropy, optimizer, loss_scaler=scaler).run(batches)
        models.append(model)
    for ours, plain in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, plain)


def test_float16_scales_by_default_and_bfloat16_does_not() -> None:
    for dtype, expected in ((torch.float16, DynamicLossScaler), (torch.bfloat16, type(None))):
        model = make_model()
        loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters()), amp="O1", amp_dtype=dtype)
        assert type(loop.scaler) is expected
        assert loop.run(make_batches(4)).losses.isfinite().all()


def test_endless_overflow_aborts() -> None:
    model = nn.Linear(2, 2)
    loop = StepLoop(
        model,
        functional.cross_entropy,
        torch.optim.SGD(model.parameters()),
        loss_scaler=DynamicLossScaler(),
        steps_per_sync=400,
    )
    batch = (torch.full((1, 2), math.inf), torch.tensor([0]))
    with pytest.raises(SinkError, match="1000 optimizer updates in a row overflowed, the last at step 1000"):
        loop.run([batch] * 1500)
    assert loop.step_count == 1200


def test_no_sync_once_warm() -> None:
    model = make_model()
    loop = StepLoop(
        model, functional.cross_entropy, torch.optim.AdamW(model.parameters()), loss_scaler=DynamicLossScaler(), ema=0.9
    )
    with no_host_sync():
        history = loop.run(make_batches(5))
    assert history.host_syncs == 2
