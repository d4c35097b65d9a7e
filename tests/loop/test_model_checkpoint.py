"""ModelCheckpoint: at which steps it saves, what it keeps, and what an error leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from torch_sink.errors import NonFiniteLoss
from torch_sink.loop import CheckpointConfig, LambdaCallback, ModelCheckpoint, StepLoop

from .reference import make_batches, make_model


def make_loop(**options: Any) -> StepLoop:
    model = make_model()
    return StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), **options)


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
