"""What the monitors print and keep: LossMonitor, TimeMonitor, ProgressBar, History."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from loop.reference import make_batches, make_model
from loop.test_callbacks import Results
from torch_sink.amp import StaticLossScaler
from torch_sink.errors import NonFiniteLoss
from torch_sink.loop import History, LossMonitor, ProgressBar, ReduceLROnPlateau, StepLoop, TimeMonitor
from torch_sink.mindspore import Model
from torch_sink.sink import SinkLoader


def make_loop(**options: Any) -> StepLoop:
    model = make_model()
    return StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_loss_monitor_prints_executed_steps(capsys: pytest.CaptureFixture[str]) -> None:
    history = make_loop(steps_per_sync=2).run(make_batches(5), epochs=2, callbacks=[LossMonitor(4)])
    losses = history.losses.tolist()
    assert capsys.readouterr().out.splitlines() == [
        f"epoch: 1 step: 4, loss is {losses[3]}",
        f"epoch: 2 step: 4, loss is {losses[8]}",
    ]


def printed_steps(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]


def test_results_of_a_users_callback_are_shown_once_at_the_epochs_end(capsys: pytest.CaptureFixture[str]) -> None:
    """They stay in the context: in the next epoch, after its steps, they are no news."""
    callbacks = [Results("error", [0.5, 0.25]), LossMonitor(0)]
    make_loop(steps_per_sync=1).run(make_batches(3), epochs=2, callbacks=callbacks)
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Eval result")]
    assert shown == [f"Eval result: epoch {n}, metrics: {{'error': {value}}}" for n, value in ((1, 0.5), (2, 0.25))]


def test_loss_monitor_counts_from_each_epochs_start(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the length of earlier runs, known or not, in sinks of any size."""

    def batches_of_unknown_number() -> Iterator[Any]:
        yield from make_batches(4)

    loop = make_loop(steps_per_sync=3)
    loop.run(make_batches(5), callbacks=[LossMonitor()])
    assert printed_steps(capsys) == ["epoch: 1 step: 3", "epoch: 1 step: 5"]
    loop.run(make_batches(2), epochs=2, callbacks=[LossMonitor()])
    assert printed_steps(capsys) == ["epoch: 1 step: 2", "epoch: 2 step: 2"]
    loop.run(batches_of_unknown_number, epochs=3, callbacks=[LossMonitor()])
    assert printed_steps(capsys) == [f"epoch: {epoch} step: {step}" for epoch in (1, 2, 3) for step in (3, 4)]
    with SinkLoader(batches_of_unknown_number, batches_per_epoch=3) as loader:
        loop.run(loader, epochs=3, callbacks=[LossMonitor()])
    assert printed_steps(capsys) == [f"epoch: {epoch} step: 3" for epoch in (1, 2, 3)]


def test_loss_monitor_counts_on_after_a_resume(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    batches = make_batches(5)
    loop = make_loop(steps_per_sync=2)
    loop.run(batches, epochs=2, max_steps=7)
    loop.save(tmp_path, batches)
    resumed = make_loop(steps_per_sync=2)
    resumed.resume(tmp_path, batches)
    resumed.run(batches, epochs=2, callbacks=[LossMonitor()])
    assert printed_steps(capsys) == ["epoch: 2 step: 4", "epoch: 2 step: 5"]


def test_lines_are_printed_above_a_running_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one terminal a line must not begin in the middle of the bar."""
    pytest.importorskip("tqdm")
    terminal = io.StringIO()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    monitors = [ProgressBar(), LossMonitor(), TimeMonitor(), ReduceLROnPlateau("loss", patience=0, verbose=True)]
    make_loop(steps_per_sync=2).run(make_batches(4), epochs=2, callbacks=monitors)
    lines = [line for part in terminal.getvalue().splitlines() for line in part.split("\r")]
    ours = [line for line in lines if "loss is" in line or "epoch time" in line or "reduced" in line]
    assert len(ours) >= 6
    assert all(line.startswith(("epoch", "Train epoch")) and "it/s" not in line for line in ours)
    assert not any("step/s" in line and "loss is" in line for line in lines)


@pytest.mark.parametrize("policy", ["raise", "warn", "ignore"])
def test_loss_monitor_names_the_first_step_that_is_not_finite(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    batches = make_batches(8)
    batches[5][0].fill_(math.nan)
    loop = make_loop(steps_per_sync=4)
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
    loop = StepLoop(
        model,
        None,
        optimizer,
        forward=forward,
        steps_per_sync=3,
        loss_scaler=StaticLossScaler(2.0),
        accumulate=accumulate,
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


def test_time_monitor_tells_training_and_evaluation_apart(capsys: pytest.CaptureFixture[str]) -> None:
    network = make_model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model = Model(network, functional.cross_entropy, optimizer, metrics={"accuracy"})
    monitor = TimeMonitor(data_time=True)
    model.fit(1, make_batches(4), make_batches(2), callbacks=[monitor])
    model.eval(make_batches(3), callbacks=[monitor])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["Eval", "Train", "Eval"]
    totals = [float(line.split(": ")[1].split(" ms")[0]) for line in lines]
    steps = [float(line.split("per step time: ")[1].split(" ms")[0]) for line in lines]
    assert [total / step for total, step in zip(totals, steps, strict=True)] == pytest.approx([2, 4, 3], rel=0.01)
    assert totals[1] > totals[0], "the epoch's time includes its evaluation"


def test_progress_bar_shows_executed_steps(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tqdm.auto", None)
    make_loop(steps_per_sync=3).run(make_batches(5), epochs=2, callbacks=[ProgressBar()], max_steps=7)
    lines = [line.split(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["step 3/7", "step 5/7", "step 7/7"]


def test_progress_bar_with_tqdm(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    make_loop(steps_per_sync=3).run(make_batches(5), epochs=2, callbacks=[ProgressBar()])
    last = capsys.readouterr().err.split("\r")[-1]
    assert "10/10" in last
    assert "loss=" in last


def test_progress_bar_is_one_line_in_a_log_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tqdm")
    # Between two looks at the clock so much time passes that a bar in a terminal is drawn anew.
    monkeypatch.setattr("tqdm.std.time", map(float, itertools.count()).__next__)
    make_loop(steps_per_sync=1).run(make_batches(5), epochs=2, callbacks=[ProgressBar()])
    states = capsys.readouterr().err.strip().split("\r")
    assert [re.search(r"\d+/10", state)[0] for state in states if state] == ["0/10", "10/10"]


def test_progress_bar_goes_on_after_a_resume(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batches = make_batches(5)
    loop = make_loop(steps_per_sync=3)
    loop.run(batches, max_steps=2)
    loop.run(batches, epochs=2, max_steps=7)
    loop.save(tmp_path, batches)
    capsys.readouterr()
    for tqdm in (True, False):
        if not tqdm:
            monkeypatch.setitem(__import__("sys").modules, "tqdm.auto", None)
        else:
            pytest.importorskip("tqdm")
        resumed = make_loop(steps_per_sync=3)
        resumed.resume(tmp_path, batches)
        resumed.run(batches, epochs=2, callbacks=[ProgressBar()])
        shown = capsys.readouterr().err
        assert ("7/10" in shown and "10/10" in shown) if tqdm else shown.startswith("step 10/10")


def test_history_keeps_a_value_an_epoch() -> None:
    history = History()
    run = make_loop().run(make_batches(2), epochs=2, callbacks=[Results("eval_loss", [0.5, 0.25]), history])
    assert history.epoch == {
        "epoch": [1, 2],
        "eval_loss": [0.5, 0.25],
        "net_output": [run.losses[1].item(), run.losses[3].item()],
    }
