"""The page on callbacks of one's own: its table lists every field, and each is there when the table says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from loop.reference import make_batches, make_model
from torch_sink.loop import Callback, CheckpointConfig, Evaluation, ModelCheckpoint, StepLoop
from torch_sink.loop.callbacks import EVENTS, RunArguments, RunContext
from torch_sink.mindspore import Model

pytestmark = pytest.mark.once

PAGE = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| .* \| (.*?) \|$", PAGE, flags=re.MULTILINE)


class Noted(Callback):
    """Which fields are there, and of those which have a value, at each event in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, set[str], set[str]]] = []
        for name in EVENTS:
            setattr(self, name, self._note(name))

    def _note(self, name: str) -> Callable[[RunContext], None]:
        def event(run_context: RunContext) -> None:
            fields = run_context.original_args()
            names = {field for field in fields if not field.startswith("_")}
            self.seen.append((name, names, {field for field in names if fields[field] is not None}))

        return event


def at_events(noted: Noted, field: str, phase: str) -> list[tuple[str, bool]]:
    return [(name, field in there) for name, _, there in noted.seen if name.startswith(f"on_{phase}")]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Noted]:
    """Of a StepLoop with an evaluation and checkpoints, and of a Model that evaluates as it trains."""
    folder, batches = tmp_path_factory.mktemp("checkpoints"), make_batches(4)

    def forward(model: Any, batch: Any) -> Any:
        outputs = model(batch[0])
        return functional.cross_entropy(outputs, batch[1]), {"largest": outputs.max()}

    model, noted = make_model(), {"loop": Noted(), "model": Noted()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = StepLoop(model, functional.cross_entropy, optimizer, forward=forward, steps_per_sync=2)
    judge = Evaluation(batches, forward=lambda model, batch: (None, model(batch[0]), batch[1]), every_epochs=2)
    save = ModelCheckpoint(directory=folder, config=CheckpointConfig(save_checkpoint_steps=4))
    loop.run(batches, epochs=2, callbacks=[noted["loop"], judge, save])
    trainer = Model(make_model(), functional.cross_entropy, metrics={"accuracy"})
    trainer.eval(batches, noted["model"], dataset_sink_mode=False)
    return noted


def test_the_table_lists_every_field() -> None:
    assert [name for name, _ in ROWS] == [*RunArguments.__annotations__]


def test_no_event_has_a_field_that_the_table_lacks(seen: dict[str, Noted]) -> None:
    for noted in seen.values():
        assert {event for event, _, _ in noted.seen} >= {"on_eval_begin", "on_eval_end"}
        for event, names, _ in noted.seen:
            assert names == {name for name, _ in ROWS}, event


WHEN: dict[str, Callable[[str, int, int], bool]] = {
    # (phase, number of sinks or batches that have begun, number that have ended) -> whether the field has a value
    "always": lambda phase, begun, ended: True,
    "training": lambda phase, begun, ended: phase == "train",
    "evaluation": lambda phase, begun, ended: phase == "eval",
    "`Model`, evaluation": lambda phase, begun, ended: phase == "eval",
    "from the first `on_train_step_begin`": lambda phase, begun, ended: phase == "train" and begun > 0,
    "after the first sink": lambda phase, begun, ended: phase == "train" and ended > 0,
    "after the first sink or batch": lambda phase, begun, ended: ended > 0,
}


@pytest.mark.parametrize(("field", "when"), ROWS, ids=lambda text: text if text.isidentifier() else "")
def test_a_field_is_there_when_the_table_says_so(field: str, when: str, seen: dict[str, Noted]) -> None:
    for noted in seen.values():
        for phase in ("train", "eval"):
            events, begun, ended = at_events(noted, field, phase), 0, 0
            if when.startswith("from the first epoch on"):
                first = [name for name, is_there in events if is_there][:1]
                assert not events or first == ["on_train_epoch_begin" if phase == "train" else "on_eval_epoch_end"]
                continue
            if when == "after a checkpoint":
                found = [is_there for _, is_there in events]
                assert found == sorted(found)
                assert any(found) == (phase == "train" and bool(events))
                continue
            for name, is_there in events:
                begun += name.endswith("step_begin")
                ended += name.endswith("step_end")
                assert is_there == WHEN[when](phase, begun, ended), f"{field} at {name}"
