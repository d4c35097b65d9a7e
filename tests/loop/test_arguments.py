"""Wrong arguments raise at once, and the message says what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

from torch_sink.loop import Callback, CheckpointConfig, JitConfig, LambdaCallback, LossMonitor, StepLoop, amp

from .reference import make_batches, make_model


def make_loop(**options: Any) -> StepLoop:
    model = make_model()
    return StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sink_size": 0}, ValueError, "sink_size=0.*at least 1, or -1"),
        ({"sink_size": -2}, ValueError, "sink_size=-2"),
        ({"sink_size": 1.5}, TypeError, "sink_size=1.5 is a float"),
        ({"sink_size": True}, TypeError, "sink_size=True"),
        ({"accumulate": 0}, ValueError, "accumulate=0"),
        ({"mode": "fast"}, ValueError, "mode='fast'.*'auto', 'eager', 'compile', 'graph'"),
        ({"amp": "O4"}, ValueError, "amp='O4'.*O0, O1, O2, O3, auto"),
        ({"amp": "O1", "amp_dtype": torch.int8}, ValueError, "amp_dtype=torch.int8.*bfloat16 or torch.float16"),
        ({"loss_scaler": "dynamic"}, TypeError, "loss_scaler='dynamic'.*StaticLossScaler"),
        ({"schedule": "batch"}, ValueError, "schedule='batch'.*'step', 'epoch'"),
        ({"clip_grad_norm": 0}, ValueError, "clip_grad_norm=0"),
        ({"clip_grad_norm": "1"}, TypeError, "clip_grad_norm='1'"),
        ({"ema": 1.5}, ValueError, "ema=1.5"),
        ({"ema": True}, TypeError, "ema=True"),
        ({"ema": "0.9"}, TypeError, "ema='0.9'"),
        ({"device": "meta"}, ValueError, "'meta', but the model is on cpu.*model.to"),
        ({"jit_config": {}}, TypeError, "JitConfig"),
        ({"forward": 3}, TypeError, "forward is a int"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_loop(**options)


def test_model_loss_and_optimizer() -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"model is a list.*torch\.nn\.Module"):
        StepLoop([], functional.cross_entropy, sgd)
    with pytest.raises(TypeError, match="loss_fn is a NoneType"):
        StepLoop(model, None, sgd)
    with pytest.raises(TypeError, match=r"optimizer is a int.*torch\.optim\.Optimizer"):
        StepLoop(model, functional.cross_entropy, 3)
    with pytest.raises(TypeError, match="LBFGS"):
        StepLoop(model, functional.cross_entropy, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="SparseAdam"):
        StepLoop(model, functional.cross_entropy, torch.optim.SparseAdam(list(model.parameters())))
    with pytest.raises(ValueError, match="none of the model's parameters"):
        StepLoop(model, functional.cross_entropy, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(ValueError, match="nothing to train"):
        StepLoop(nn.Linear(2, 2).requires_grad_(False), functional.cross_entropy, sgd)


def test_scheduler() -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"ReduceLROnPlateau.*callbacks"):
        StepLoop(model, functional.cross_entropy, sgd, scheduler=lr_scheduler.ReduceLROnPlateau(sgd))
    with pytest.raises(TypeError, match="scheduler is a str"):
        StepLoop(model, functional.cross_entropy, sgd, scheduler="cosine")
    with pytest.raises(ValueError, match="another optimizer"):
        StepLoop(model, functional.cross_entropy, sgd, scheduler=lr_scheduler.StepLR(other, 3))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epochs": -1}, ValueError, "epochs=-1"),
        ({"epochs": 1.0}, TypeError, "epochs=1.0"),
        ({"max_steps": 0}, ValueError, "max_steps=0"),
        ({"callbacks": [LossMonitor]}, TypeError, "pass an instance"),
        ({"callbacks": [print]}, TypeError, "builtin_function_or_method"),
    ],
)
def test_run_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_loop().run(make_batches(2), **options)


@pytest.mark.parametrize(
    ("forward", "error", "message"),
    [
        (lambda model, batch: model(batch[0]), ValueError, r"shape \[8, 5\].*scalar.*mean"),
        (lambda model, batch: 0.5, TypeError, "the loss is a float"),
        (lambda model, batch: batch[0].mean(), ValueError, "does not depend on any parameter"),
        (lambda model, batch: (model(batch[0]).mean(), 3), TypeError, "loss, int"),
        (lambda model, batch: (model(batch[0]).mean(), {"a": batch[0]}), ValueError, "metric 'a'"),
    ],
)
def test_losses_that_cannot_be_trained_on(forward: Callable[..., Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_loop(forward=forward).run(make_batches(2))


def test_batches() -> None:
    with pytest.raises(TypeError, match=r"tuple of 3.*forward="):
        make_loop().run([(*make_batches(1)[0], torch.ones(1))])
    with pytest.raises(TypeError, match=r"dict of 1.*forward="):
        make_loop().run([{"image": torch.ones(1)}])
    model = make_model().to("meta")
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"model is on meta, the batch on cpu.*model\.to"):
        loop.run(make_batches(1))
    with pytest.raises(ValueError, match="no batch"):
        make_loop().run([])


def test_prepared_optimizers_are_unwrapped() -> None:
    class Prepared:
        def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
            self.optimizer, self.scaler = optimizer, scaler

    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    assert StepLoop(model, functional.cross_entropy, Prepared(sgd, None), amp="O1").optimizer is sgd
    assert StepLoop(model, functional.cross_entropy, Prepared(sgd, object())).optimizer is sgd
    with pytest.raises(ValueError, match="loss scaler of its own"):
        StepLoop(model, functional.cross_entropy, Prepared(sgd, object()), amp="O1")


def test_small_parts() -> None:
    with pytest.raises(ValueError, match="jit_level='O9'"):
        JitConfig(jit_level="O9")
    with pytest.raises(ValueError, match="exc_mode='x'"):
        JitConfig(exc_mode="x")
    with pytest.raises(TypeError, match="fullgraph=1"):
        JitConfig(fullgraph=1)
    with pytest.raises(ValueError, match="save_checkpoint_steps=0"):
        CheckpointConfig(save_checkpoint_steps=0)
    with pytest.raises(TypeError, match="on_step"):
        LambdaCallback(on_step=print)
    with pytest.raises(ValueError, match="at least 1"):
        amp.StaticLossScaler(0.5)
    with pytest.raises(ValueError, match="scale_window=0"):
        amp.DynamicLossScaler(scale_window=0)
    with pytest.raises(ValueError, match="on_nonfinite='stop'"):
        LossMonitor(on_nonfinite="stop")
    assert Callback().steps_to_boundary(3) is None
