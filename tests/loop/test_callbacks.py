"""Callbacks: the order of events, the context's fields, executed step counts, and what those do that steer."""

from __future__ import annotations

import json
import math
import os
import random
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

from loop.reference import make_batches, make_model
from torch_sink.loop import (
    Callback,
    CheckpointConfig,
    EarlyStopping,
    Evaluation,
    LambdaCallback,
    LearningRateScheduler,
    LossMonitor,
    ModelCheckpoint,
    OnRequestExit,
    ReduceLROnPlateau,
    StepLoop,
)
from torch_sink.loop.callbacks import EVENTS, RunArguments, RunContext


class Recorder(Callback):
    """Writes down every event with the step count that it saw."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        for name in EVENTS:
            setattr(self, name, self._note(name))

    def _note(self, name: str) -> Any:
        def event(context: Any) -> None:
            self.events.append((name.removeprefix("on_"), context.original_args().cur_step_num))

        return event


def make_loop(**options: Any) -> StepLoop:
    model = make_model()
    return StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_order_of_events_and_executed_counts() -> None:
    recorder = Recorder()
    make_loop(steps_per_sync=3).run(make_batches(5), epochs=2, callbacks=[recorder])
    assert recorder.events == [
        ("train_begin", 0),
        ("train_epoch_begin", 0),
        ("train_step_begin", 3),
        ("train_step_end", 3),
        ("train_step_begin", 5),
        ("train_step_end", 5),
        ("train_epoch_end", 5),
        ("train_epoch_begin", 5),
        ("train_step_begin", 8),
        ("train_step_end", 8),
        ("train_step_begin", 10),
        ("train_step_end", 10),
        ("train_epoch_end", 10),
        ("train_end", 10),
    ]


def test_fields_of_the_context() -> None:
    seen: list[dict[str, Any]] = []
    loop = make_loop(steps_per_sync=3)
    recorder = LambdaCallback(on_train_step_end=lambda context: seen.append(dict(context.original_args())))
    history = loop.run(make_batches(5), epochs=2, callbacks=recorder)
    last = seen[-1]
    assert last["train_network"] is last["network"] is loop.model
    assert last["optimizer"] is loop.optimizer
    assert (last["epoch_num"], last["cur_epoch_num"], last["batch_num"], last["cur_step_num"]) == (2, 2, 5, 10)
    assert torch.equal(last["losses"], history.losses[8:])
    assert last["net_outputs"] == history.losses[-1]
    assert last["learning_rates"].shape == (2, 1)
    assert not last["overflows"].any()
    assert last["history"] is history
    assert last["list_callback"] == [recorder]
    assert [len(fields["losses"]) for fields in seen] == [3, 2, 3, 2]


def test_old_names_are_called() -> None:
    calls = []

    class Old(Callback):
        def begin(self, run_context: Any) -> None:
            calls.append("begin")

        def step_end(self, run_context: Any) -> None:
            calls.append("step_end")

    make_loop().run(make_batches(2), callbacks=[Old()])
    assert calls == ["begin", "step_end"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("cur_step", "did you mean cur_step_num"),
        ("loss", "did you mean losses"),
        ("eval_result", "did you mean eval_results"),
        ("__len", "its fields are accumulate, batch_num, "),
        ("something_else_entirely", "its fields are accumulate, batch_num, "),
    ],
)
def test_a_misspelled_field_names_those_that_are_near(name: str, near: str) -> None:
    def read(context: Any) -> None:
        arguments = context.original_args()
        assert not hasattr(arguments, name)
        with pytest.raises(KeyError, match=near):
            arguments[name]
        getattr(arguments, name)

    for event in ("on_train_begin", "on_train_step_end", "on_train_end"):
        with pytest.raises(AttributeError, match=f"the run context has no field '{name}'; {near}"):
            make_loop().run(make_batches(2), callbacks=[LambdaCallback(**{event: read})])


def test_callbacks_hand_each_other_fields_of_their_own() -> None:
    seen: list[Any] = []

    def write(context: Any) -> None:
        arguments = context.original_args()
        arguments.mine, arguments["yours"] = 1, 2

    def read(context: Any) -> None:
        arguments = context.original_args()
        seen.append((arguments.mine, arguments.yours, arguments.losses.shape, arguments.valid_dataset))

    make_loop().run(make_batches(2), callbacks=[LambdaCallback(on_train_begin=write, on_train_step_end=read)])
    assert seen == [(1, 2, (2,), None)]


def test_callbacks_are_entered_and_left_also_after_an_error() -> None:
    class Managed(Callback):
        def __init__(self) -> None:
            self.log: list[Any] = []

        def __enter__(self) -> Managed:
            self.log.append("enter")
            return self

        def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
            self.log.append(kind)

    def fail(context: Any) -> None:
        raise KeyError("from a callback")

    managed = Managed()
    with pytest.raises(KeyError, match="from a callback"):
        make_loop().run(make_batches(2), callbacks=[managed, LambdaCallback(on_train_step_end=fail)])
    assert managed.log == ["enter", KeyError]


def test_request_stop_ends_after_the_sink() -> None:
    stop = LambdaCallback(on_train_step_end=lambda context: context.request_stop())
    recorder = Recorder()
    history = make_loop(steps_per_sync=3).run(make_batches(9), epochs=4, callbacks=[recorder, stop])
    assert history.steps == 3
    assert history.stopped_by == "request_stop"
    assert [name for name, _ in recorder.events][-2:] == ["train_epoch_end", "train_end"]


def test_learning_rate_scheduler_acts_once_per_host_return() -> None:
    seen = []

    def halve(rate: float, step: int) -> float:
        seen.append((rate, step))
        return rate / 2

    history = make_loop(steps_per_sync=2).run(make_batches(5), callbacks=[LearningRateScheduler(halve)])
    assert seen == [(0.1, 2), (0.05, 4), (0.025, 5)]
    assert history.learning_rates.flatten().tolist() == [0.1, 0.1, 0.05, 0.05, 0.025]


class Results(Callback):
    """Pretends that an evaluation gave these values, one an epoch."""

    def __init__(self, name: str, values: list[float]) -> None:
        self._name, self._values = name, list(values)

    def on_train_epoch_end(self, run_context: Any) -> None:
        run_context.original_args().eval_results = {self._name: self._values.pop(0)}


@pytest.mark.parametrize(
    ("options", "values", "epochs"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.5, 2.5, 1.0], 4),
        ({"patience": 2}, [3.0, 2.0, 2.5, 1.5, 1.0], 5),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.8, 1.0], 2),
        ({"patience": 2, "baseline": 1.0}, [3.0, 2.0, 0.5], 2),
        ({"monitor": "accuracy", "patience": 1}, [0.5, 0.6, 0.55, 0.9], 3),
        ({"monitor": "score", "mode": "max", "patience": 1}, [1.0, 0.5, 2.0], 2),
    ],
)
def test_early_stopping(options: dict[str, Any], values: list[float], epochs: int) -> None:
    name = options.get("monitor", "eval_loss")
    loop = make_loop()
    loop.run(make_batches(2), epochs=len(values), callbacks=[Results(name, values), EarlyStopping(**options)])
    assert loop.step_count == 2 * epochs


@pytest.mark.parametrize(
    ("kind", "options"),
    [(LossMonitor, {}), (EarlyStopping, {"monitor": "loss"}), (ReduceLROnPlateau, {"monitor": "loss"})],
)
def test_a_subclass_may_begin_a_run_in_its_own_way(kind: type[Callback], options: dict[str, Any]) -> None:
    begun: list[Any] = []
    own = type("Own", (kind,), {"on_train_begin": lambda self, run_context: begun.append(self)})
    callback = own(**options)
    assert make_loop().run(make_batches(3), callbacks=[callback]).steps == 3
    assert begun == [callback]


@pytest.mark.parametrize("make_callback", [EarlyStopping, ReduceLROnPlateau])
def test_a_run_without_evaluation_says_that_nothing_was_decided(
    make_callback: Any, caplog: pytest.LogCaptureFixture
) -> None:
    callback = make_callback()
    for callbacks, told in (([callback], 1), ([Results("eval_loss", [1.0, 0.5]), callback], 0)):
        caplog.clear()
        make_loop().run(make_batches(2), epochs=2, callbacks=callbacks)
        assert caplog.text.count("monitor 'eval_loss' had no value in this run, so nothing was decided") == told
        assert caplog.text.count("add a torch_sink.Evaluation") == told


def test_early_stopping_restores_the_best_weights() -> None:
    weights = []
    loop = make_loop()
    note = LambdaCallback(on_train_epoch_end=lambda context: weights.append(loop.model[-1].weight.detach().clone()))
    stop = EarlyStopping(patience=2, restore_best_weights=True)
    loop.run(make_batches(2), epochs=9, callbacks=[note, Results("eval_loss", [3.0, 1.0, 2.0, 2.0]), stop])
    assert len(weights) == 4
    assert torch.equal(loop.model[-1].weight, weights[1])


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGUSR1])
def test_a_stopped_run_is_saved_as_it_is_and_not_with_its_best_weights(stop: int, tmp_path: Path) -> None:
    """SIGINT stops every run, SIGUSR1 by OnRequestExit; both are saved after EarlyStopping has had its turn."""
    loop = make_loop(steps_per_sync=1)
    with nullcontext() if stop == signal.SIGUSR1 else pytest.raises(KeyboardInterrupt):
        loop.run(
            make_batches(2),
            epochs=9,
            callbacks=[
                LambdaCallback(on_train_step_end=lambda c: loop.step_count == 5 and os.kill(os.getpid(), stop)),
                Results("eval_loss", [1.0, 2.0, 3.0, 4.0]),
                EarlyStopping(patience=9, restore_best_weights=True),
                ModelCheckpoint(directory=tmp_path, config=CheckpointConfig(save_checkpoint_steps=100)),
                OnRequestExit(directory=tmp_path, sig=signal.SIGUSR1),
            ],
            max_steps=7,
        )
    whole = make_loop(steps_per_sync=1)
    whole.run(make_batches(2), epochs=9, max_steps=loop.step_count)
    restored = make_loop()
    assert restored.resume(tmp_path) == loop.step_count == 5
    assert torch.equal(restored.model[-1].weight, whole.model[-1].weight)


def judged(callback: Any, optimizer: Any, values: list[float]) -> tuple[list[list[float]], int | None, list[float]]:
    """The learning rates after each epoch, the epoch after which the run ends, and the weights at its end."""
    network = nn.Linear(1, 1, bias=False)
    loop = SimpleNamespace(ranks=SimpleNamespace(gather=lambda value: [value]))
    arguments = RunArguments(optimizer=optimizer, list_callback=[Results("eval_loss", [])], loop=loop)
    arguments.update(train_network=network, history=SimpleNamespace(stopped_by=None))
    context, rates = RunContext(arguments), []
    callback.on_train_begin(context)
    for epoch, value in enumerate(values, 1):
        nn.init.constant_(network.weight, epoch)
        arguments.update(cur_epoch_num=epoch, eval_results={"eval_loss": value})
        callback.on_train_epoch_end(context)
        rates.append([group["lr"] for group in optimizer.param_groups])
        if context.get_stop_requested():
            break
    callback.on_train_end(context)
    return rates, len(rates) if context.get_stop_requested() else None, network.weight.flatten().tolist()


def random_values(draw: random.Random) -> list[float]:
    """Values on a coarse grid, so that some are equal to the best and some lie on the threshold; NaN now and then."""
    return [math.nan if draw.random() < 0.05 else draw.randint(-8, 8) / draw.choice([4, 10]) for _ in range(30)]


def test_reduce_on_plateau_is_torchs() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        values, mode = random_values(draw), draw.choice(["min", "max"])
        rates = [draw.choice([0.1, 0.02]) for _ in range(draw.randint(1, 3))]
        options: dict[str, Any] = {
            "factor": draw.choice([0.0, 0.1, 0.5]),
            "patience": draw.randint(0, 4),
            "threshold": draw.choice([0.0, 1e-4, 0.1, 0.25]),
            "threshold_mode": draw.choice(["rel", "abs"]),
            "cooldown": draw.randint(0, 3),
            "min_lr": draw.choice([0.0, 0.01, [draw.choice([0.0, 0.03]) for _ in rates]]),
            "eps": draw.choice([1e-8, 0.02]),
        }
        optimizers: list[Any] = []
        for _ in range(2):
            groups: Any = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
            optimizers.append(torch.optim.SGD(groups, lr=1.0))
        ours, _, _ = judged(ReduceLROnPlateau(mode=mode, **options), optimizers[0], values)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizers[1], mode, **options)
        expected = []
        for value in values:
            scheduler.step(value)
            expected.append([group["lr"] for group in optimizers[1].param_groups])
        assert ours == expected, (seed, mode, options, values)


def test_reduce_on_plateau_by_the_training_loss() -> None:
    """With the defaults of torch's scheduler, and by what the run computes."""
    loop, other = make_loop(), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(other, factor=0.5, patience=1)
    history = loop.run(make_batches(2), epochs=9, callbacks=[ReduceLROnPlateau("loss", factor=0.5, patience=1)])
    expected = []
    for loss in history.losses[1::2].tolist():
        expected += [other.param_groups[0]["lr"]] * 2
        scheduler.step(loss)
    assert history.learning_rates.flatten().tolist() == expected
    assert expected[-1] < 0.1


def test_reduce_on_plateau_names_torchs_arguments() -> None:
    with pytest.raises(TypeError, match=r"no argument 'min_delta'; .*threshold=\.\.\., threshold_mode='abs'"):
        ReduceLROnPlateau(min_delta=0.1)
    with pytest.raises(ValueError, match="threshold_mode='relative'"):
        ReduceLROnPlateau(threshold_mode="relative")
    with pytest.raises(ValueError, match="min_lr"):  # before the first epoch, by torch
        make_loop().run(make_batches(1), callbacks=[ReduceLROnPlateau("loss", min_lr=[0.1, 0.1])])


def keras_early_stopping(values: list[float], mode: str, options: dict[str, Any]) -> tuple[int | None, float]:
    """The rule of Keras and MindSpore: the epoch after which it stops, and the epoch of the best weights."""
    delta, baseline = abs(options["min_delta"]), options["baseline"]
    delta = -delta if mode == "min" else delta
    improves = (lambda value, other: value - delta < other) if mode == "min" else lambda v, other: v - delta > other
    best, waited, weights = math.inf if mode == "min" else -math.inf, 0, 1
    for epoch, value in enumerate(values, 1):
        waited += 1
        if improves(value, best):
            best, weights = value, epoch
            if baseline is None or improves(value, baseline):
                waited = 0
                continue
        if waited >= options["patience"]:
            return epoch, weights
    return None, weights


def test_early_stopping_is_that_of_keras_and_mindspore() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        values, mode = random_values(draw), draw.choice(["min", "max"])
        options: dict[str, Any] = {
            "min_delta": draw.choice([0.0, 0.1, 0.25, -0.1]),
            "patience": draw.randint(0, 8),
            "baseline": draw.choice([None, 0.0, 0.5]),
        }
        callback = EarlyStopping(mode=mode, restore_best_weights=True, **options)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        _, stopped, weights = judged(callback, optimizer, values)
        assert (stopped, weights[0]) == keras_early_stopping(values, mode, options), (seed, mode, options, values)


class PerClass:
    """A metric that is one number for each class."""

    def reset(self) -> None:
        self.counts = torch.zeros(3)

    def update(self, output: Any, labels: Any) -> None:
        self.counts += torch.bincount(labels, minlength=3)[:3]

    def compute(self) -> Any:
        return self.counts


@pytest.mark.parametrize("make_callback", [EarlyStopping, ReduceLROnPlateau, ModelCheckpoint])
def test_a_monitored_result_is_one_number(make_callback: Any, tmp_path: Path) -> None:
    options = {"directory": tmp_path} if make_callback is ModelCheckpoint else {}
    callback = make_callback(monitor="recall", mode="max", **options)
    evaluation = Evaluation(make_batches(2), {"recall": PerClass()})
    with pytest.raises(TypeError, match=r"monitor='recall' is a tensor of shape \[3\].*compute\(\) gives one"):
        make_loop().run(make_batches(2), callbacks=[evaluation, callback])


def test_on_request_exit_by_signal(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    loop = make_loop(steps_per_sync=3)
    kill = LambdaCallback(on_train_step_begin=lambda context: loop.step_count == 3 and os.kill(os.getpid(), 15))
    history = loop.run(make_batches(9), callbacks=[OnRequestExit(directory=tmp_path), kill])
    assert (history.steps, history.stopped_by) == (4, "SIGTERM")
    assert [path.name for path in tmp_path.iterdir()] == ["Net-00000004"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_on_request_exit_by_file(tmp_path: Path) -> None:
    asked = tmp_path / "exit.json"
    write = LambdaCallback(on_train_step_end=lambda context: asked.write_text(json.dumps({"GracefulExit": 1})))
    history = make_loop(steps_per_sync=3).run(
        make_batches(9), callbacks=[write, OnRequestExit(save_ckpt=False, config_file=asked)]
    )
    assert (history.steps, history.stopped_by) == (4, "GracefulExit")


class OlderNames:
    """Not a callback itself."""

    def begin(self, run_context: Any) -> None:
        self.begun = True
        super().begin(run_context)  # type: ignore[misc]


def test_older_event_names_come_beside_what_a_callback_does_itself() -> None:
    """They may lie in a class of their own, call their parents' and be given to a callback that is there already."""
    seen: list[str] = []

    class Stopping(OlderNames, EarlyStopping):
        def epoch_end(self, run_context: Any) -> None:
            seen.append("hidden by EarlyStopping's own event, as in MindSpore")

    class Plain(OlderNames, Callback):
        pass

    plain, stopping = Plain(), Stopping(patience=1)
    plain.step_end = lambda run_context: seen.append("step_end")  # type: ignore[method-assign]
    loop = make_loop()
    loop.run(make_batches(2), epochs=5, callbacks=[plain, Results("eval_loss", [1.0, 2.0, 3.0, 4.0, 5.0]), stopping])
    assert loop.step_count == 4, "it stops all the same"
    assert plain.begun
    assert seen == ["step_end"] * 2


def test_a_signal_that_nobody_can_handle_leaves_the_others_as_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(OSError, match="Invalid argument"):
        make_loop().run(make_batches(1), callbacks=[OnRequestExit(sig=signal.SIGKILL)])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
