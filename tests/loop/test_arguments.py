"""Wrong arguments raise at once, and the message says what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import Subset, TensorDataset

import torch_sink
from loop.reference import make_batches, make_model
from torch_sink import amp
from torch_sink.loop import Callback, CheckpointConfig, JitConfig, LambdaCallback, LossMonitor, StepLoop
from torch_sink.mindspore import Model, data_sink
from torch_sink.sink import SinkLoader


def make_loop(**options: Any) -> StepLoop:
    model = make_model()
    return StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps_per_sync": 0}, ValueError, "steps_per_sync=0.*at least 1, or -1"),
        ({"steps_per_sync": -2}, ValueError, "steps_per_sync=-2"),
        ({"steps_per_sync": 1.5}, TypeError, "steps_per_sync=1.5 is a float"),
        ({"steps_per_sync": True}, TypeError, "steps_per_sync=True"),
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
        ({"criterion": 1}, TypeError, "StepLoop has no argument 'criterion'; pass loss_fn="),
        ({"lr_scheduler": 1}, TypeError, "'lr_scheduler'; pass scheduler="),
        ({"grad_clip": 1}, TypeError, "'grad_clip'; pass clip_grad_norm="),
        ({"amp_level": "O1"}, TypeError, "'amp_level'; pass amp="),
        ({"callbacks": []}, TypeError, r"'callbacks'; it belongs to the run: .*run\(loader.*callbacks="),
        ({"metrics": {"loss"}}, TypeError, r"'metrics'; it belongs to an evaluation: .*evaluate\(loader, metrics="),
        ({"sink_size": 3}, TypeError, "StepLoop has no argument 'sink_size'; pass steps_per_sync="),
        ({"stepspersync": 3}, TypeError, "'stepspersync'; did you mean steps_per_sync="),
        ({"color": 3}, TypeError, "'color'; its arguments are model, loss_fn, optimizer, steps_per_sync"),
        ({"device": "meta"}, ValueError, "'meta', but the model is on cpu.*model.to"),
        ({"jit_config": {}}, TypeError, "JitConfig"),
        ({"forward": 3}, TypeError, "forward is a int"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_loop(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amp": "O1"}, "Model has no argument 'amp'; pass amp_level="),
        ({"loss_scale_manager": None}, "pass loss_scaler="),
        ({"keep_batchnorm_fp32": True}, "pass amp_level="),
        ({"sink_size": 10}, r"it belongs to the call: .*train\(epoch, train_dataset, sink_size="),
        ({"callbacks": []}, r"it belongs to the call: .*callbacks="),
        ({"boost_level": "O1"}, "no boost levels"),
        ({"criterion": 1}, "pass loss_fn="),
    ],
)
def test_arguments_of_model_under_other_names(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Model(make_model(), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch_sink.LossMonitor, "LossMonitor has no argument 'every'; pass per_print_times="),
        (torch_sink.SummaryCollector, "pass collect_freq="),
        (torch_sink.ProgressBar, "its arguments are every_rank"),
    ],
)
def test_how_often_is_no_rank(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make(every=2)


def test_reprs_say_what_trains_and_how() -> None:
    loop = make_loop(steps_per_sync=7, accumulate=2)
    loop.run(make_batches(3))
    assert repr(loop) == (
        "StepLoop(Sequential, SGD, steps_per_sync=7, amp='O0', mode='auto', accumulate=2, device='cpu', step_count=3)"
    )
    network = make_model()
    model = Model(network, functional.cross_entropy, torch.optim.SGD(network.parameters()), {"top5", "accuracy"})
    assert repr(model) == f"Model({model.loop!r}, metrics=['accuracy', 'top5'])"
    assert repr(Model(network)) == "Model(Sequential, metrics=[])"


@pytest.mark.parametrize("dataset", [TensorDataset(torch.zeros(40, 3)), Subset(TensorDataset(torch.zeros(9)), [1])])
def test_a_dataset_of_samples_is_refused(dataset: Any) -> None:
    class Numbers:
        """What torch.utils.data takes for a dataset, without its base class; raises no IndexError."""

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(3)

        def __len__(self) -> int:
            return 40

    message = r"this is a Dataset; wrap it in a DataLoader\(dataset, batch_size=\.\.\.\)"
    network = make_model()
    model = Model(network, functional.cross_entropy, torch.optim.SGD(network.parameters(), lr=0.1), {"loss"})
    for one in (dataset, Numbers()):
        for use in (make_loop().run, SinkLoader, model.eval, lambda data: data_sink(print, data)):
            with pytest.raises(TypeError, match=message):
                use(one)
        with pytest.raises(TypeError, match=message):
            model.train(1, one)


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


@pytest.mark.parametrize("made_by", [StepLoop, Model])
def test_a_scheduler_needs_a_schedule(made_by: Callable[..., Any]) -> None:
    """Tutorials step by epoch, recipes by update: either as a default would train the other one wrongly in silence."""
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(sgd, 7)
    with pytest.raises(
        ValueError, match=r"StepLR\(...\) needs schedule=.*'epoch' at each epoch's end.*'step' after each"
    ):
        made_by(model, functional.cross_entropy, sgd, scheduler=scheduler)
    with pytest.raises(ValueError, match="schedule='batch': allowed are 'step', 'epoch'"):
        made_by(model, functional.cross_entropy, sgd, scheduler=scheduler, schedule="batch")


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


def test_a_loss_function_beside_forward_is_not_called_and_explain_says_so() -> None:
    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1]) * 2

    losses, explained = [], []
    for options in ({"forward": forward}, {}):
        loop = make_loop(**options)
        torch.manual_seed(5)
        losses.append(loop.run(make_batches(1)).losses)
        explained.append("loss_fn is not called" in loop.explain())
    assert torch.equal(losses[0], losses[1] * 2)
    assert explained == [True, False]


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
