"""A StepLoop without an optimizer evaluates and predicts, with the weights of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from loop.reference import make_batches, make_model
from torch_sink import StepLoop
from torch_sink.amp import DynamicLossScaler

BATCHES = make_batches(5)


def train(folder: Path, **options: Any) -> StepLoop:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loop = StepLoop(model, functional.cross_entropy, optimizer, scheduler=scheduler, schedule="step", **options)
    loop.run(BATCHES)
    loop.save(folder)
    return loop


def plain_accuracy(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        hits = [model(inputs).argmax(1) == labels for inputs, labels in BATCHES]
    return float(torch.cat(hits).double().mean())


def test_it_evaluates_and_predicts_what_was_trained(tmp_path: Path) -> None:
    trained = train(tmp_path, ema=0.5, loss_scaler=DynamicLossScaler(4.0), accumulate=2)
    judge = StepLoop(make_model(), functional.cross_entropy, ema=0.5)
    draws = torch.get_rng_state()
    assert judge.resume(tmp_path) == trained.step_count == 5
    assert torch.equal(torch.get_rng_state(), draws), "the draws are those of the training"
    for ema in (False, True):
        assert judge.evaluate(BATCHES, metrics={"accuracy"}, ema=ema) == trained.evaluate(
            BATCHES, metrics={"accuracy"}, ema=ema
        )
        inputs = BATCHES[0][0]
        model = trained.ema_model() if ema else trained.model
        model.eval()
        assert torch.equal(judge.predict(inputs, ema=ema), model(inputs))
    assert judge.evaluate(BATCHES, metrics={"accuracy"})["accuracy"] == plain_accuracy(trained.model)


def test_it_needs_no_loss_function_and_no_parameter_that_trains(tmp_path: Path) -> None:
    model = make_model().requires_grad_(False)
    loop = StepLoop(model, None)
    assert loop.evaluate(BATCHES, metrics={"accuracy"}) == {"accuracy": plain_accuracy(model)}
    assert "optimizer: none" in loop.explain()
    assert StepLoop(nn.ReLU(), None).predict(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    loop.close()


def test_training_with_it_says_what_to_do(tmp_path: Path) -> None:
    loop = StepLoop(make_model(), functional.cross_entropy)
    with pytest.raises(ValueError, match=r"no optimizer.*cannot train.*StepLoop\(model, loss_fn, optimizer\)"):
        loop.run(BATCHES)
    with pytest.raises(ValueError, match="schedule= needs an optimizer"):
        StepLoop(make_model(), functional.cross_entropy, schedule="step")
    loop.save(tmp_path)
    trainer = make_model()
    training = StepLoop(trainer, functional.cross_entropy, torch.optim.SGD(trainer.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="without an optimizer"):
        training.resume(tmp_path)
