"""Eager training on the CPU equals the plain PyTorch loop, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.optim import lr_scheduler

from loop.reference import assert_equal_training, make_batches, make_model, plain_loop
from torch_sink.loop import StepLoop

pytestmark = pytest.mark.halved

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled(10)
def test_eager_equals_plain_loop(name: str, clip: float | None, accumulate: int) -> None:
    batches = make_batches(10)
    results = []
    for ours in (True, False):
        model = make_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 7)
        torch.manual_seed(5)
        if ours:
            loop = StepLoop(
                model,
                functional.cross_entropy,
                optimizer,
                steps_per_sync=4,
                scheduler=scheduler,
                schedule="step",
                clip_grad_norm=clip,
                accumulate=accumulate,
            )
            history = loop.run(batches, epochs=2)
            losses, rates = history.losses, history.learning_rates
            assert history.host_syncs == 6
        else:
            losses, rates = plain_loop(
                model,
                functional.cross_entropy,
                optimizer,
                batches * 2,
                scheduler=scheduler,
                clip=clip,
                accumulate=accumulate,
                per_epoch=len(batches),
            )
        results.append((model, optimizer, losses, rates, torch.get_rng_state()))
    ours_result, plain_result = results
    assert_equal_training(ours_result[:2], plain_result[:2])
    assert torch.equal(ours_result[2], plain_result[2])
    assert torch.equal(ours_result[3], plain_result[3])
    assert torch.equal(ours_result[4], plain_result[4])


def test_o1_equals_plain_autocast() -> None:
    batches = make_batches(6)
    results = []
    for ours in (True, False):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        torch.manual_seed(5)
        if ours:
            losses = StepLoop(model, functional.cross_entropy, optimizer, amp="O1").run(batches).losses
        else:
            losses, _ = plain_loop(
                model,
                functional.cross_entropy,
                optimizer,
                batches,
                context=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
            )
        results.append((model, optimizer, losses))
    assert_equal_training(results[0][:2], results[1][:2])
    assert torch.equal(results[0][2], results[1][2])


def test_another_seed_is_noticed() -> None:
    """The comparison above can fail: another dropout seed changes the bits."""
    losses = []
    for seed in (5, 6):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        torch.manual_seed(seed)
        losses.append(StepLoop(model, functional.cross_entropy, optimizer).run(make_batches(6)).losses)
    assert not torch.equal(losses[0], losses[1])
