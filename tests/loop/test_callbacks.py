"""Callbacks: the order of events, the context's fields, executed step counts, and what each callback does."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_sink.errors import NonFiniteLoss
from torch_sink.loop import (
    Callback,
    CheckpointConfig,
    EarlyStopping,
    History,
    LambdaCallback,
    LearningRateScheduler,
    LossMonitor,
    ModelCheckpoint,
    OnRequestExit,
    ProgressBar,
    ReduceLROnPlateau,
    StepLoop,
    TimeMonitor,
)
from torch_sink.loop.callbacks import EVENTS

from .reference import make_batches, make_model


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
    make_loop(sink_size=3).run(make_batches(5), epochs=2, callbacks=[recorder])
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
    loop = make_loop(sink_size=3)
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


def test_old_names_are_called_and_unknown_fields_are_none() -> None:
    calls = []

    class Old(Callback):
        def begin(self, run_context: Any) -> None:
            calls.append("begin")

        def step_end(self, run_context: Any) -> None:
            calls.append(run_context.original_args().no_such_field)

    make_loop().run(make_batches(2), callbacks=[Old()])
    assert calls == ["begin", None]


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
    history = make_loop(sink_size=3).run(make_batches(9), epochs=4, callbacks=[recorder, stop])
    assert history.steps == 3
    assert history.stopped_by == "request_stop"
    assert [name for name, _ in recorder.events][-2:] == ["train_epoch_end", "train_end"]


def test_loss_monitor_prints_executed_steps(capsys: pytest.CaptureFixture[str]) -> None:
    history = make_loop(sink_size=2).run(make_batches(5), epochs=2, callbacks=[LossMonitor(4)])
    losses = history.losses.tolist()
    assert capsys.readouterr().out.splitlines() == [
        f"epoch: 1 step: 4, loss is {losses[3]}",
        f"epoch: 2 step: 4, loss is {losses[8]}",
    ]


@pytest.mark.parametrize("policy", ["raise", "warn", "ignore"])
def test_loss_monitor_names_the_first_step_that_is_not_finite(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    batches = make_batches(8)
    batches[5][0].fill_(math.nan)
    loop = make_loop(sink_size=4)
    if policy == "raise":
        with pytest.raises(NonFiniteLoss, match="loss of step 6 is nan"):
            loop.run(batches, callbacks=[LossMonitor(0, on_nonfinite=policy)])
        assert loop.step_count == 8
        return
    loop.run(batches, callbacks=[LossMonitor(0, on_nonfinite=policy)])
    assert ("loss of step 6 is nan" in capsys.readouterr().err) == (policy == "warn")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_skipped_steps_do_not_count_as_not_finite(accumulate: int) -> None:
    """With accumulation the update that is skipped may belong to a later sink than the loss."""

    def forward(model: nn.Module, batch: Any) -> Any:
        return functional.cross_entropy(model(batch[0]), batch[1]) * batch[2]

    batches = [(*batch, torch.tensor(math.inf if step == 2 else 1.0)) for step, batch in enumerate(make_batches(6))]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    from torch_sink.loop.amp import StaticLossScaler

    loop = StepLoop(
        model, None, optimizer, forward=forward, sink_size=3, loss_scaler=StaticLossScaler(2.0), accumulate=accumulate
    )
    history = loop.run(batches, callbacks=[LossMonitor(0)])
    assert history.losses[2] == math.inf
    assert history.overflows.nonzero().flatten().tolist() == [2 if accumulate == 1 else 3]


def test_time_monitor(capsys: pytest.CaptureFixture[str]) -> None:
    make_loop().run(make_batches(4), epochs=2, callbacks=[TimeMonitor(data_time=True)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    total, per_step = (float(part.split(": ")[1].split(" ms")[0]) for part in lines[0].split(", ")[:2])
    assert per_step == pytest.approx(total / 4, abs=0.01)
    assert "data time:" in lines[0]


def test_progress_bar_shows_executed_steps(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tqdm.auto", None)
    make_loop(sink_size=3).run(make_batches(5), epochs=2, callbacks=[ProgressBar()], max_steps=7)
    lines = [line.split(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["step 3/7", "step 5/7", "step 7/7"]


def test_progress_bar_with_tqdm(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    make_loop(sink_size=3).run(make_batches(5), epochs=2, callbacks=[ProgressBar()])
    last = capsys.readouterr().err.split("\r")[-1]
    assert "10/10" in last
    assert "loss=" in last


def test_progress_bar_goes_on_after_a_resume(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batches = make_batches(5)
    loop = make_loop(sink_size=3)
    loop.run(batches, max_steps=2)
    loop.run(batches, epochs=2, max_steps=7)
    loop.save(tmp_path, batches)
    capsys.readouterr()
    for tqdm in (True, False):
        if not tqdm:
            monkeypatch.setitem(__import__("sys").modules, "tqdm.auto", None)
        else:
            pytest.importorskip("tqdm")
        resumed = make_loop(sink_size=3)
        resumed.resume(tmp_path, batches)
        resumed.run(batches, epochs=2, callbacks=[ProgressBar()])
        shown = capsys.readouterr().err
        assert ("7/10" in shown and "10/10" in shown) if tqdm else shown.startswith("step 10/10")


def test_checkpoints_at_exact_steps(tmp_path: Path) -> None:
    config = CheckpointConfig(save_checkpoint_steps=10, keep_checkpoint_max=0)
    loop = make_loop(sink_size=7)
    history = loop.run(make_batches(7), epochs=5, callbacks=[ModelCheckpoint("CKP", tmp_path, config)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CKP-00000010", "CKP-00000020", "CKP-00000030"]
    assert history.steps == 35


def test_checkpoints_at_each_sink_and_the_newest_are_kept(tmp_path: Path) -> None:
    config = CheckpointConfig(keep_checkpoint_max=2)
    make_loop(sink_size=2).run(make_batches(7), callbacks=[ModelCheckpoint("run", tmp_path / "new", config)])
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["run-00000006", "run-00000007"]


@pytest.mark.parametrize("failing", ["loss", "data"])
def test_an_error_between_sinks_leaves_a_checkpoint(failing: str, tmp_path: Path) -> None:
    """The run goes on behind it as if nothing had happened."""
    batches = make_batches(9)

    def source() -> Any:
        for step, batch in enumerate(batches):
            if step == 5 and failing == "data" and not tmp_path.joinpath("mended").exists():
                raise OSError("no such file")
            yield batch

    def fail(context: Any) -> None:
        if context.original_args().cur_step_num == 7 and failing == "loss":
            raise NonFiniteLoss("by a callback")

    config = CheckpointConfig(save_checkpoint_steps=4, exception_save=True)
    loop = make_loop(sink_size=3)
    with pytest.raises(NonFiniteLoss if failing == "loss" else OSError):
        loop.run(source, callbacks=[LambdaCallback(on_train_step_end=fail), ModelCheckpoint("CKP", tmp_path, config)])
    saved = 7 if failing == "loss" else 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["CKP-00000004", f"CKP_breakpoint-{saved:08d}"]
    (tmp_path / "mended").touch()
    whole = make_loop(sink_size=3)
    # The batch that failed to load was consumed: it does not come again.
    whole.run(batches if failing == "loss" else [*batches[:5], *batches[6:]])
    resumed = make_loop(sink_size=3)
    assert resumed.resume(tmp_path, source) == saved
    resumed.run(source)
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))


def test_an_error_inside_a_step_leaves_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = CheckpointConfig(save_checkpoint_steps=2, exception_save=True)
    batches = [*make_batches(3), (torch.zeros(2, 5), torch.zeros(2))]
    with pytest.raises(RuntimeError):
        make_loop(sink_size=3).run(batches, callbacks=[ModelCheckpoint("CKP", tmp_path, config)])
    assert [path.name for path in tmp_path.iterdir()] == ["CKP-00000002"]
    assert "in the middle of a sink" in caplog.text


def test_learning_rate_scheduler_acts_once_per_host_return() -> None:
    seen = []

    def halve(rate: float, step: int) -> float:
        seen.append((rate, step))
        return rate / 2

    history = make_loop(sink_size=2).run(make_batches(5), callbacks=[LearningRateScheduler(halve)])
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


def test_early_stopping_restores_the_best_weights() -> None:
    weights = []
    loop = make_loop()
    note = LambdaCallback(on_train_epoch_end=lambda context: weights.append(loop.model[-1].weight.detach().clone()))
    stop = EarlyStopping(patience=2, restore_best_weights=True)
    loop.run(make_batches(2), epochs=9, callbacks=[note, Results("eval_loss", [3.0, 1.0, 2.0, 2.0]), stop])
    assert len(weights) == 4
    assert torch.equal(loop.model[-1].weight, weights[1])


def test_reduce_on_plateau_equals_torch() -> None:
    """torch counts cooldown from the epoch after the reduction; MindSpore and Keras include that epoch."""
    values = [3.0, 2.0, 2.0, 2.0, 2.0, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9]
    loop = make_loop()
    reduce = ReduceLROnPlateau(factor=0.5, patience=2, cooldown=3, min_lr=0.02, min_delta=1e-3)
    history = loop.run(make_batches(1), epochs=len(values), callbacks=[Results("eval_loss", values), reduce])
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    torch_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=1, cooldown=2, min_lr=0.02, threshold=1e-3, threshold_mode="abs"
    )
    expected = []
    for value in values:
        expected.append(optimizer.param_groups[0]["lr"])
        torch_scheduler.step(value)
    assert history.learning_rates.flatten().tolist() == expected
    assert len(set(expected)) > 2


def test_history_keeps_a_value_an_epoch() -> None:
    history = History()
    run = make_loop().run(make_batches(2), epochs=2, callbacks=[Results("eval_loss", [0.5, 0.25]), history])
    assert history.epoch == {
        "epoch": [1, 2],
        "eval_loss": [0.5, 0.25],
        "net_output": [run.losses[1].item(), run.losses[3].item()],
    }


def test_on_request_exit_by_signal(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    loop = make_loop(sink_size=3)
    kill = LambdaCallback(on_train_step_begin=lambda context: loop.step_count == 3 and os.kill(os.getpid(), 15))
    history = loop.run(make_batches(9), callbacks=[OnRequestExit(directory=tmp_path), kill])
    assert history.steps == 6
    assert [path.name for path in tmp_path.iterdir()] == ["Net-00000006"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_on_request_exit_by_file(tmp_path: Path) -> None:
    asked = tmp_path / "exit.json"
    write = LambdaCallback(on_train_step_end=lambda context: asked.write_text(json.dumps({"GracefulExit": 1})))
    history = make_loop(sink_size=3).run(
        make_batches(9), callbacks=[write, OnRequestExit(save_ckpt=False, config_file=asked)]
    )
    assert history.steps == 6
