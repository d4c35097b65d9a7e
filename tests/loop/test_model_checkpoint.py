"""ModelCheckpoint: at which steps it saves, what it keeps, and what an error leaves."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch.nn import functional

from loop.engines.test_on_fake_cuda import UNCOMPILED
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
    saving,
)

pytestmark = pytest.mark.halved


def make_loop(model: Any = None, **options: Any) -> StepLoop:
    model = model or make_model()
    return StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_checkpoints_at_exact_steps(tmp_path: Path) -> None:
    config = CheckpointConfig(save_checkpoint_steps=10, keep_checkpoint_max=0)
    loop = make_loop(steps_per_sync=7)
    history = loop.run(make_batches(7), epochs=5, callbacks=[ModelCheckpoint("CKP", tmp_path, config)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"CKP-{step:08d}" for step in (10, 20, 30, 35)]
    assert history.steps == 35


def steps_in(folder: Path, prefix: str = "CKP") -> list[int]:
    return sorted(int(path.name.removeprefix(f"{prefix}-")) for path in folder.glob(f"{prefix}-*"))


@pytest.mark.parametrize(
    ("when", "saved"),
    [
        ({"save_checkpoint_steps": 4}, [4, 8, 10]),
        ({"save_checkpoint_steps": 5}, [5, 10]),
        ({"save_checkpoint_steps": 25}, [10]),
        ({"save_checkpoint_steps": 4, "keep_checkpoint_max": 2}, [8, 10]),
        ({"save_checkpoint_seconds": 9999}, [10]),
    ],
)
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.sampled(6)
def test_the_end_of_a_run_is_saved_and_goes_on_as_if_it_had_been_longer(
    fake_cuda: FakeCuda, mode: str, when: dict[str, int], saved: list[int], tmp_path: Path, monkeypatch: Any
) -> None:
    def make() -> StepLoop:
        return make_loop(make_model().cuda(), mode=mode, jit_config=UNCOMPILED)

    written: list[str] = []
    write = saving.write_checkpoint
    monkeypatch.setattr(
        saving, "write_checkpoint", lambda *args, **options: written.append(str(write(*args, **options)))
    )
    batches, config = make_batches(5), CheckpointConfig(**when)
    torch.manual_seed(0)
    whole = make()
    expected = whole.run(batches, epochs=3).losses
    torch.manual_seed(0)
    loop = make()
    loop.run(batches, epochs=2, callbacks=[ModelCheckpoint(directory=tmp_path, config=config)])
    assert steps_in(tmp_path) == saved
    assert len(written) == len(set(written)), "no step is saved twice"
    count = len(written)
    resumed = make()
    assert resumed.resume(tmp_path, batches) == 10
    again = ModelCheckpoint(directory=tmp_path, config=config)
    assert resumed.run(batches, epochs=2, callbacks=[again]).steps == 0
    assert len(written) == count, "a run that was complete saves nothing"
    assert torch.equal(resumed.run(batches, epochs=3, callbacks=[again]).losses, expected[10:])
    assert steps_in(tmp_path)[-1] == 15
    for one in (whole, loop, resumed):
        one.close()


@pytest.mark.parametrize("end", ["max_steps", "request_stop", "stopping", "sigint"])
def test_a_run_that_ends_early_is_saved_at_its_last_step(end: str, tmp_path: Path) -> None:
    def act(context: Any) -> None:
        if loop.step_count == 6 and end == "request_stop":
            context.request_stop()
        if loop.step_count == 6 and end == "sigint":
            os.kill(os.getpid(), signal.SIGINT)

    loop, batches = make_loop(steps_per_sync=2, accumulate=4), make_batches(8)
    callbacks: list[Callback] = [LambdaCallback(on_train_step_end=act)]
    if end == "stopping":  # after the first epoch, whose weights it restores
        callbacks += [Scores([0.9, 0.1, 0.2, 0.3]), EarlyStopping("accuracy", restore_best_weights=True)]
    callbacks.append(ModelCheckpoint(directory=tmp_path, config=CheckpointConfig(save_checkpoint_steps=100)))
    with pytest.raises(KeyboardInterrupt) if end == "sigint" else nullcontext():
        loop.run(batches, epochs=4, max_steps=6 if end == "max_steps" else None, callbacks=callbacks)
    last = 16 if end == "stopping" else 6
    assert steps_in(tmp_path) == [last]
    whole, resumed = make_loop(accumulate=4), make_loop(accumulate=4)
    expected = whole.run(batches, epochs=4).losses
    resumed.resume(tmp_path, batches)
    assert torch.equal(resumed.run(batches, epochs=4).losses, expected[last:])
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))


def test_each_run_of_a_loop_is_saved_at_its_end(tmp_path: Path) -> None:
    loop, batches = make_loop(), make_batches(3)
    last = ModelCheckpoint(directory=tmp_path, config=CheckpointConfig(save_checkpoint_steps=4))
    for _ in range(3):
        loop.run(batches, callbacks=[last])
    assert steps_in(tmp_path) == [3, 4, 6, 8, 9]
    loop.run(batches, epochs=0, callbacks=[last])
    assert steps_in(tmp_path) == [3, 4, 6, 8, 9]


DATA = make_batches(10)


def saved_by(folder: Path, steps: int, keep: int = 2, loop: StepLoop | None = None, **options: Any) -> StepLoop:
    """A loop whose run has saved every fifth step."""
    loop = loop or make_loop()
    config = CheckpointConfig(save_checkpoint_steps=5, keep_checkpoint_max=keep)
    loop.run(DATA, epochs=steps // 10, callbacks=[ModelCheckpoint("CKP", folder, config)], **options)
    return loop


def weights_of(path: Path) -> torch.Tensor:
    return torch.load(path / "state.pt", weights_only=True)["model"]["6.weight"]


def test_a_new_run_in_the_folder_of_another_deletes_only_what_it_wrote(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = saved_by(tmp_path, 40)
    assert (steps_in(tmp_path), caplog.messages) == ([35, 40], [])
    for path in tmp_path.glob("*/*"):  # as if the clock had been set back since
        os.utime(path.parent, (4e9, 4e9))
    new = saved_by(tmp_path, 20)
    assert steps_in(tmp_path) == [15, 20, 35, 40]
    (told,) = caplog.messages
    assert "another training, the newest of them CKP-00000040" in told
    assert f"loop.resume({str(tmp_path)!r}, loader) before the run" in told
    assert "another directory, or delete what is there" in told
    assert torch.equal(weights_of(tmp_path / "CKP-00000040"), old.model[6].weight)

    resumed = make_loop()
    assert resumed.resume(tmp_path, DATA) == 20, "what was written last"
    assert torch.equal(resumed.model[6].weight, new.model[6].weight)
    saved_by(tmp_path, 30, loop=resumed)
    assert steps_in(tmp_path) == [25, 30, 35, 40], "after a resume the run has the same checkpoints"
    saved_by(tmp_path, 10, loop=resumed)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "CKP-00000035",
        "CKP-00000035.older1",
        "CKP-00000040",
        "CKP-00000040.older1",
    ], "the run has gone on to the old one's steps"
    assert torch.equal(weights_of(tmp_path / "CKP-00000040"), resumed.model[6].weight)
    assert torch.equal(weights_of(tmp_path / "CKP-00000040.older1"), old.model[6].weight)
    assert [message for message in caplog.messages if "before the run" in message] == [told]
    assert sum("another training has written, is now CKP-00000040.older1" in one for one in caplog.messages) == 1
    assert make_loop().resume(tmp_path) == 40


def test_the_same_program_run_three_times_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loops = []
    for seed in range(3):
        loops.append(make_loop(make_model(seed)))
        both = [ModelCheckpoint(name, tmp_path, CheckpointConfig(save_checkpoint_steps=9)) for name in ("A", "B")]
        loops[-1].run(make_batches(3), callbacks=both)
        assert loops[-1].save(tmp_path, prefix="A").name == "A-00000003"
    for name in ("A", "B"):
        names = [f"{name}-00000003.older1", f"{name}-00000003.older2", f"{name}-00000003"]
        for loop, path in zip(loops, names, strict=True):
            assert torch.equal(weights_of(tmp_path / path), loop.model[6].weight)
    assert sum("before the run" in message for message in caplog.messages) == 2, "one line a run"
    resumed = make_loop()
    resumed.resume(tmp_path)
    assert torch.equal(resumed.model[6].weight, loops[-1].model[6].weight)


def test_a_training_that_begins_in_the_folder_of_another_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_by(tmp_path, 10)
    loop = make_loop()
    loop.save(tmp_path)
    for _ in range(3):
        saved_by(tmp_path, 10, loop=loop)
    assert sum("the newest of them CKP-00000010" in message for message in caplog.messages) == 1
    caplog.clear()
    resumed = make_loop()
    assert resumed.resume(tmp_path, DATA) == 30
    saved_by(tmp_path, 20, loop=resumed)
    assert caplog.messages == [], "it goes on with what lies there"


def test_the_best_of_another_training_is_neither_compared_nor_deleted(tmp_path: Path) -> None:
    batches = make_batches(2)
    for values in ([0.1, 0.9], [0.5, 0.4, 0.7]):
        best = ModelCheckpoint("best", tmp_path, monitor="accuracy")
        make_loop().run(batches, epochs=len(values), callbacks=[best, Scores(values)])
    assert steps_in(tmp_path, "best") == [4, 6]


def test_trainings_that_begin_from_one_checkpoint_leave_each_other_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_by(tmp_path / "base", 10)
    forks = []
    for rate in (0.1, 0.2, 0.3):
        forks.append(make_loop())
        assert forks[-1].resume(tmp_path / "base", DATA) == 10
        forks[-1].optimizer.param_groups[0]["lr"] = rate
        saved_by(tmp_path / "out", 30, loop=forks[-1])
    names = [f"CKP-000000{step}{end}" for step in (25, 30) for end in ("", ".older1", ".older2")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert steps_in(tmp_path / "base") == [5, 10]
    for fork, end in zip(forks, (".older1", ".older2", ""), strict=True):
        assert torch.equal(weights_of(tmp_path / "out" / f"CKP-00000030{end}"), fork.model[6].weight)
    assert sum("another training, the newest of them" in message for message in caplog.messages) == 2
    again = make_loop()
    assert again.resume(tmp_path / "out", DATA) == 30
    assert torch.equal(again.model[6].weight, forks[-1].model[6].weight), "what was written last"
    saved_by(tmp_path / "out", 40, loop=again)
    names = [*[name for name in names if "older" in name], "CKP-00000035", "CKP-00000040"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names, "its own went, and no other"


def test_a_state_begins_a_new_training(tmp_path: Path) -> None:
    loop = make_loop()
    begin, folds = copy.deepcopy(loop.state_dict()), []
    for _ in range(3):
        loop.load_state_dict(copy.deepcopy(begin))
        saved_by(tmp_path, 10, keep=1, loop=loop)
        folds.append(loop.model[6].weight.clone())
    names = [f"CKP-00000010{end}" for end in (".older1", ".older2", "")]
    assert {path.name for path in tmp_path.iterdir()} == {*names}
    for fold, name in zip(folds, names, strict=True):
        assert torch.equal(weights_of(tmp_path / name), fold)


def test_two_that_resume_in_one_folder_at_once_keep_what_the_other_writes(tmp_path: Path) -> None:
    saved_by(tmp_path, 10)
    one, other = make_loop(), make_loop()
    for loop in (one, other):
        assert loop.resume(tmp_path, DATA) == 10
    saved_by(tmp_path, 20, loop=one)
    assert steps_in(tmp_path) == [15, 20], "a resumed run counts what led to it"
    saved_by(tmp_path, 30, loop=other)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "CKP-00000015.older1",
        "CKP-00000020.older1",
        "CKP-00000025",
        "CKP-00000030",
    ]


def test_the_same_crash_again_and_again_keeps_as_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The latest are in one folder and the best in another, where some of the lives write nothing."""
    last, best = tmp_path / "last", tmp_path / "best"

    class Life(Callback):
        comes_first = True

        def __init__(self, began: int, value: float) -> None:
            self.began, self.value = began, value

        def on_train_step_end(self, run_context: Any) -> None:
            arguments = run_context.original_args()
            if arguments.loop.step_count == self.began + 5:
                arguments.eval_results = {"accuracy": self.value}
            if arguments.loop.step_count == self.began + 7:
                raise RuntimeError("crash")

    began = 0
    for value in (0.5, 0.4, 0.9, 0.6):
        loop = make_loop(steps_per_sync=1)
        assert loop.resume(last, DATA) == began
        config = CheckpointConfig(save_checkpoint_steps=5, keep_checkpoint_max=1)
        both = [ModelCheckpoint("CKP", last, config), ModelCheckpoint("best", best, monitor="accuracy")]
        with pytest.raises(RuntimeError, match="crash"):
            loop.run(DATA, epochs=4, callbacks=[Life(began, value), *both])
        began += 5
        assert steps_in(last) == [began]
    assert steps_in(best, "best") == [15]
    assert not any("another training" in message for message in caplog.messages)


def test_checkpoints_of_earlier_versions_are_taken_as_they_were(tmp_path: Path) -> None:
    """They do not say who wrote them: the latest is that of the highest step, and a run that resumes owns them."""
    saved_by(tmp_path, 20, keep=3)
    for path in tmp_path.iterdir():
        manifest = json.loads((path / "complete.json").read_text())
        del manifest["written"]
        (path / "complete.json").write_text(json.dumps(manifest))
    assert steps_in(tmp_path) == [10, 15, 20]
    fresh = tmp_path.with_name("fresh")
    shutil.copytree(tmp_path, fresh)
    saved_by(fresh, 10)
    assert sorted(path.name for path in fresh.glob("CKP-*")) == [
        "CKP-00000005",
        "CKP-00000010",
        "CKP-00000010.older1",
        "CKP-00000015",
        "CKP-00000020",
    ]
    assert make_loop().resume(fresh) == 10
    resumed = make_loop()
    assert resumed.resume(tmp_path, DATA) == 20
    saved_by(tmp_path, 30, loop=resumed)
    assert steps_in(tmp_path) == [25, 30]
    again = make_loop()
    assert again.resume(tmp_path, DATA) == 30
    saved_by(tmp_path, 40, loop=again)
    assert steps_in(tmp_path) == [35, 40]


def test_an_error_in_a_run_saves_no_end(tmp_path: Path) -> None:
    batches = [*make_batches(3), (torch.zeros(2, 5), torch.zeros(2))]
    last = ModelCheckpoint(directory=tmp_path, config=CheckpointConfig(save_checkpoint_steps=100))
    with pytest.raises(RuntimeError):
        make_loop(steps_per_sync=1).run(batches, callbacks=[last])
    assert steps_in(tmp_path) == []


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
        ({}, [5]),
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
    expected = sorted(SCORES, key=lambda value: (math.isnan(value), value if options.get("mode") == "min" else -value))
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
    best = ModelCheckpoint("best", tmp_path, monitor="rank", mode="min")
    all_of_them = ModelCheckpoint("CKP", tmp_path, CheckpointConfig(keep_checkpoint_max=0))
    make_loop(steps_per_sync=2).run(make_batches(2), epochs=2, callbacks=[judges, best, all_of_them])
    assert next(ranks, None) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CKP-00000002", "CKP-00000004", "best-00000004"]


BEST = {
    **dict.fromkeys(("accuracy", "top5", "Acc@1", "eval_acc", "miou"), 1),
    **dict.fromkeys(("eval_loss", "error", "top5_error", "accuracy_loss"), 0),
}


@pytest.mark.parametrize("name", BEST)
def test_the_best_value_is_the_same_for_all_that_monitor_it(name: str, tmp_path: Path) -> None:
    """Values rise for three epochs: a larger one is better (1), or a smaller one (0)."""
    best = ModelCheckpoint("best", tmp_path, monitor=name)
    stop, reduce = EarlyStopping(name, patience=2), ReduceLROnPlateau(name, factor=0.5, patience=0)
    loop = make_loop()
    loop.run(make_batches(1), epochs=3, callbacks=[Scores([1.0, 2.0, 3.0], name), best, stop, reduce])
    assert [path.name for path in tmp_path.iterdir()] == [f"best-{3 if BEST[name] else 1:08d}"]
    assert loop.history.stopped_by == (None if BEST[name] else "request_stop")
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 if BEST[name] else 0.1 * 0.5**2)


@pytest.mark.parametrize("callback", [ModelCheckpoint, EarlyStopping, ReduceLROnPlateau])
@pytest.mark.parametrize("name", ["f1", "mIoU", "perplexity"])
def test_a_name_that_does_not_tell_what_is_better_needs_a_mode(
    callback: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loop = make_loop()
    with pytest.raises(ValueError, match=f"monitor='{name}': the name does not tell.*mode='min' or mode='max'"):
        loop.run(make_batches(2), callbacks=[Scores([1.0], name), callback(monitor=name)])
    assert loop.step_count == 0
    loop.run(make_batches(2), callbacks=[Scores([1.0], name), callback(monitor=name, mode="max")])


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
    with pytest.raises(ValueError, match=r"monitor='acc' is no result.*which are accuracy, eval_loss"):
        loop.run(batches, callbacks=[evaluation, callback(monitor="acc")])
    assert loop.step_count == 0
    own = LambdaCallback(on_train_epoch_end=lambda context: context.original_args().eval_results)
    loop.run(batches, callbacks=[evaluation, callback(monitor="of a callback of mine", mode="min"), own])
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


def test_a_run_in_which_the_monitor_had_no_value_says_that_nothing_was_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = make_batches(2)
    best = ModelCheckpoint("best", tmp_path, monitor="accuracy")
    make_loop().run(batches, callbacks=[Evaluation(batches, {"accuracy"}, every_steps=5), best])
    assert (
        "monitor 'accuracy' had no value in this run, so no checkpoint was saved; the results were none" in caplog.text
    )
    assert not list(tmp_path.iterdir())
    caplog.clear()
    make_loop().run(batches, callbacks=[Evaluation(batches, {"accuracy"}, every_steps=2), best])
    assert not caplog.text


def test_the_best_checkpoint_is_one_by_an_evaluation(tmp_path: Path) -> None:
    """The loss of the steps is no result of one: nothing would be saved."""
    batches = make_batches(2)
    best = ModelCheckpoint("best", tmp_path, monitor="loss")
    with pytest.raises(ValueError, match=r"monitor='loss' is no result.*which are eval_loss"):
        make_loop().run(batches, callbacks=[Evaluation(batches), best])


def test_arguments_of_the_monitor() -> None:
    with pytest.raises(ValueError, match=r"pass two ModelCheckpoint, with a prefix each"):
        ModelCheckpoint(monitor="accuracy", config=CheckpointConfig())
    with pytest.raises(ValueError, match="mode='largest': allowed are 'auto', 'min', 'max'"):
        ModelCheckpoint(monitor="accuracy", mode="largest")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"monitor=\['accuracy'\] is a list; pass the name of a result"):
        ModelCheckpoint(monitor=["accuracy"])  # type: ignore[arg-type]
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
