"""ModelCheckpoint: at which steps it saves, what it keeps, and what an error leaves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from loop.reference import make_batches, make_model
from torch_sink.errors import NonFiniteLoss
from torch_sink.loop import (
    Callback,
    CheckpointConfig,
    EarlyStopping,
    Evaluation,
    LambdaCallback,
    ModelCheckpoint,
    ReduceLROnPlateau,
    StepLoop,
)


def make_loop(**options: Any) -> StepLoop:
    model = make_model()
    return StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_checkpoints_at_exact_steps(tmp_path: Path) -> None:
    config = CheckpointConfig(save_checkpoint_steps=10, keep_checkpoint_max=0)
    loop = make_loop(steps_per_sync=7)
    history = loop.run(make_batches(7), epochs=5, callbacks=[ModelCheckpoint("CKP", tmp_path, config)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CKP-00000010", "CKP-00000020", "CKP-00000030"]
    assert history.steps == 35


def test_checkpoints_at_each_sink_and_the_newest_are_kept(tmp_path: Path) -> None:
    config = CheckpointConfig(keep_checkpoint_max=2)
    make_loop(steps_per_sync=2).run(make_batches(7), callbacks=[ModelCheckpoint("run", tmp_path / "new", config)])
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
    loop = make_loop(steps_per_sync=3)
    with pytest.raises(NonFiniteLoss if failing == "loss" else OSError):
        loop.run(source, callbacks=[LambdaCallback(on_train_step_end=fail), ModelCheckpoint("CKP", tmp_path, config)])
    saved = 7 if failing == "loss" else 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["CKP-00000004", f"CKP_breakpoint-{saved:08d}"]
    (tmp_path / "mended").touch()
    whole = make_loop(steps_per_sync=3)
    # The batch that failed to load was consumed: it does not come again.
    whole.run(batches if failing == "loss" else [*batches[:5], *batches[6:]])
    resumed = make_loop(steps_per_sync=3)
    assert resumed.resume(tmp_path, source) == saved
    resumed.run(source)
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))


def test_an_error_inside_a_step_leaves_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = CheckpointConfig(save_checkpoint_steps=2, exception_save=True)
    batches = [*make_batches(3), (torch.zeros(2, 5), torch.zeros(2))]
    with pytest.raises(RuntimeError):
        make_loop(steps_per_sync=3).run(batches, callbacks=[ModelCheckpoint("CKP", tmp_path, config)])
    assert [path.name for path in tmp_path.iterdir()] == ["CKP-00000002"]
    assert "in the middle of a sink" in caplog.text


class Scores(Callback):
    """Stands for evaluations: a value an epoch."""

    comes_first = True

    def __init__(self, values: list[float], name: str = "accuracy") -> None:
        self._values, self._name = values, name

    def on_train_epoch_begin(self, run_context: Any) -> None:
        run_context.original_args().eval_results = {}

    def on_train_epoch_end(self, run_context: Any) -> None:
        arguments = run_context.original_args()
        arguments.eval_results = {self._name: self._values[arguments.cur_epoch_num - 1]}


SCORES = [0.5, 0.7, math.nan, 0.6, 0.9, 0.1, 0.7]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"mode": "max"}, [5]),
        ({"mode": "max", "keep": 3}, [2, 5, 7]),
        ({"mode": "min", "keep": 2}, [1, 6]),
        ({"mode": "max", "keep": 9}, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
@pytest.mark.parametrize("interrupted", [0, 1, 4])
def test_the_best_by_a_value_are_kept(
    options: dict[str, Any], kept: list[int], interrupted: int, tmp_path: Path
) -> None:
    """In one run, or in two: the second one resumes from the newest of the best."""
    best = lambda: ModelCheckpoint("best", tmp_path, monitor="accuracy", **options)  # noqa: E731
    batches = make_batches(2)
    if interrupted:
        loop = make_loop()
        loop.run(batches, epochs=7, max_steps=2 * interrupted, callbacks=[best(), Scores(SCORES)])
        loop.save(tmp_path, batches, prefix="last")
    loop = make_loop()
    if interrupted:
        assert loop.resume(tmp_path, batches, must_exist=True) == 2 * interrupted
    loop.run(batches, epochs=7, callbacks=[best(), Scores(SCORES)])
    expected = sorted(SCORES, key=lambda value: (math.isnan(value), -value if options["mode"] == "max" else value))
    names = sorted(path.name for path in tmp_path.glob("best-*"))
    values = [SCORES[int(name.removeprefix("best-")) // 2 - 1] for name in names]
    assert len(names) == min(options.get("keep", 1), len(SCORES))
    assert sorted(map(str, values)) == sorted(map(str, expected[: len(names)]))
    manifests = [json.loads((tmp_path / name / "complete.json").read_text())["monitored"] for name in names]
    assert [str(manifest["accuracy"]) for manifest in manifests] == [str(value) for value in values]
    assert names == [f"best-{2 * epoch:08d}" for epoch in kept]


def test_the_best_by_a_real_evaluation(tmp_path: Path) -> None:
    """A moved rate makes the model worse: the best is an early one, with its weights."""
    batches, loop = make_batches(4), make_loop()
    spoil = LambdaCallback(on_train_epoch_end=lambda c: c.original_args().cur_epoch_num == 2 and _spoil(loop))
    best = ModelCheckpoint("best", tmp_path, monitor="eval_loss")
    history = loop.run(batches, epochs=4, callbacks=[Evaluation(batches), best, spoil])
    values = {step: results["eval_loss"] for step, results in history.evaluations}
    step = min(values, key=values.__getitem__)
    assert [path.name for path in tmp_path.iterdir()] == [f"best-{step:08d}"]
    other = make_loop()
    assert other.resume(tmp_path) == step
    assert other.evaluate(batches)["loss"] == pytest.approx(values[step], rel=1e-6)


def test_a_later_checkpoint_of_another_kind_is_not_asked_for_its_value(tmp_path: Path) -> None:
    """A run keeps the best of the checkpoints up to its own step: a new one none of those of another run."""
    for steps, values in ((4, [1.0, 2.0]), (2, [0.5])):
        best = ModelCheckpoint("best", tmp_path, monitor="accuracy", mode="max", keep=9)
        run = make_loop().run(make_batches(2), epochs=len(values), callbacks=[best, Scores(values)])
        assert run.steps == steps
        manifest = tmp_path / "best-00000004" / "complete.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "monitored": [["accuracy", 2.0]]}))


def test_what_another_callback_saved_is_not_removed(tmp_path: Path) -> None:
    """Where a step has two results, the second is that of a checkpoint that is there."""

    def judge(context: Any) -> None:
        arguments = context.original_args()
        arguments.eval_results = {"rank": next(ranks)}

    ranks = iter([9, 8, 7, 6])
    judges = LambdaCallback(on_train_step_end=judge, on_train_epoch_end=judge)
    best = ModelCheckpoint("best", tmp_path, monitor="rank")
    all_of_them = ModelCheckpoint("CKP", tmp_path, CheckpointConfig(keep_checkpoint_max=0))
    make_loop(steps_per_sync=2).run(make_batches(2), epochs=2, callbacks=[judges, best, all_of_them])
    assert next(ranks, None) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CKP-00000002", "CKP-00000004", "best-00000004"]


def _spoil(loop: StepLoop) -> None:
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.mul_(30.0)


@pytest.mark.parametrize("callback", [ModelCheckpoint, EarlyStopping, ReduceLROnPlateau])
def test_a_misspelled_monitor_is_found_before_the_first_step(
    callback: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    loop, batches = make_loop(), make_batches(2)
    evaluation = Evaluation(batches, metrics={"accuracy"})
    with pytest.raises(ValueError, match=r"monitor='acuracy' is no result.*which are accuracy, eval_loss"):
        loop.run(batches, callbacks=[evaluation, callback(monitor="acuracy")])
    assert loop.step_count == 0
    loop.run(batches, callbacks=[evaluation, callback(monitor="of a callback of mine")])
    assert "monitor='of a callback of mine' is no result of this run's evaluations" in caplog.text


@pytest.mark.parametrize("callback", [ModelCheckpoint, EarlyStopping, ReduceLROnPlateau])
def test_a_monitor_that_nothing_evaluates_is_told_at_the_start(
    callback: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    begun: list[int] = []
    note = LambdaCallback(
        on_train_step_end=lambda context: begun.append(caplog.text.count("nothing evaluates monitor="))
    )
    make_loop().run(make_batches(2), callbacks=[callback(monitor="accuracy"), note])
    assert begun == [1]
    caplog.clear()
    own = type("Own", (LambdaCallback,), {})()  # which may give results
    make_loop().run(make_batches(2), callbacks=[callback(monitor="accuracy"), own])
    assert "nothing evaluates" not in caplog.text


def test_the_best_checkpoint_is_one_by_an_evaluation(tmp_path: Path) -> None:
    """The loss of the steps is no result of one: nothing would be saved."""
    batches = make_batches(2)
    best = ModelCheckpoint("best", tmp_path, monitor="loss")
    with pytest.raises(ValueError, match=r"monitor='loss' is no result.*which are eval_loss"):
        make_loop().run(batches, callbacks=[Evaluation(batches), best])


def test_arguments_of_the_monitor() -> None:
    with pytest.raises(ValueError, match=r"pass two ModelCheckpoint, with a prefix each"):
        ModelCheckpoint(monitor="accuracy", config=CheckpointConfig())
    with pytest.raises(ValueError, match="mode='auto': allowed are 'min', 'max'"):
        ModelCheckpoint(monitor="accuracy", mode="auto")
    with pytest.raises(ValueError, match="keep=0"):
        ModelCheckpoint(monitor="accuracy", keep=0)


def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    loop = make_loop()
    with pytest.raises(OSError, match="file"):
        loop.run(make_batches(2), callbacks=[ModelCheckpoint(directory=tmp_path / "file" / "checkpoints")])
    assert loop.step_count == 0


def test_prefixes_that_begin_alike_leave_each_other_alone(tmp_path: Path) -> None:
    """Another process writes to the same folder."""
    unfinished = [tmp_path / f".{name}-00000007.tmp" for name in ("CKP-ema", "CKP", "XCKP")]
    for folder in unfinished:
        folder.mkdir()
    make_loop().save(tmp_path)
    assert [folder.exists() for folder in unfinished] == [True, False, True]


def test_a_full_disk_leaves_nothing_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(state: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        make_loop().save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_resuming_from_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = make_loop()
    assert loop.resume(tmp_path / "a typo") == 0
    assert "no complete checkpoint" in caplog.text
    assert "a typo: training begins at step 0" in caplog.text
    with pytest.raises(FileNotFoundError, match="a typo; check the path"):
        loop.resume(tmp_path / "a typo", must_exist=True)
