"""A resumed run that is complete: a line says so, nothing changes, and the same call gives the same result again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from loop.reference import make_batches, make_model
from torch_sink.loop import CheckpointConfig, LambdaCallback, ModelCheckpoint, StepLoop
from torch_sink.mindspore import Model
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved

EPOCHS, BATCHES = 5, 4


def shuffled() -> DataLoader[Any]:
    images = torch.randn(4 * BATCHES, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(images, torch.arange(4 * BATCHES) % 5)
    return DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: make_batches(BATCHES),
    "DataLoader": shuffled,
    "SinkLoader": lambda: SinkLoader(shuffled()),
    "epochs of a stream": lambda: SinkLoader(shuffled(), batches_per_epoch=BATCHES),
}


def make_model_for_training() -> Model:
    network = make_model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return Model(network, functional.cross_entropy, optimizer, scheduler=scheduler, schedule="epoch")


def make_loop(**options: Any) -> StepLoop:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return StepLoop(model, functional.cross_entropy, optimizer, scheduler=scheduler, schedule="epoch", **options)


def state_of(loop: StepLoop) -> list[Any]:
    return [*(tensor.tolist() for tensor in loop.model.state_dict().values()), loop.scheduler.last_epoch]


@pytest.fixture(params=["when it had ended", "in its last step"])
def finished(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Any], Path]:
    """Saves a finished run over a loader; the last step is saved before the end of its epoch was seen."""

    def save(loader: Any) -> Path:
        torch.manual_seed(3)
        loop, last = make_loop(), CheckpointConfig(save_checkpoint_steps=EPOCHS * BATCHES)
        loop.run(loader, epochs=EPOCHS, callbacks=[ModelCheckpoint("last", tmp_path / "in", last)])
        loop.save(tmp_path / "after", loader)
        return tmp_path / ("after" if request.param.startswith("when") else "in")

    return save


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages, _ = list(caplog.messages), caplog.clear()
    return messages


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.sampled(4)
def test_the_same_call_twice_has_the_same_result_twice(
    kind: str, finished: Callable[[Any], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = finished(LOADERS[kind]())
    loop, loader = make_loop(), LOADERS[kind]()
    assert loop.resume(folder, loader, must_exist=True) == EPOCHS * BATCHES
    told(caplog)
    histories = [loop.run(loader, epochs=EPOCHS)]
    state = state_of(loop)
    assert loop.scheduler.last_epoch == EPOCHS, "the end of the last epoch is seen once"
    for options in ({"epochs": EPOCHS}, {"epochs": 3}, {"epochs": 99, "max_steps": 7}, {"epochs": 0}):
        histories.append(loop.run(loader, **options))
        assert state_of(loop) == state
    assert [history.steps for history in histories] == [0] * 5
    assert [message.split(";")[0] for message in told(caplog)] == [
        f"nothing was trained: the run that was resumed has completed epoch 5 (step 20), and this one ends after {end}"
        for end in ("epoch 5", "epoch 5", "epoch 3", "epoch 99 or step 7", "epoch 0")
    ]  # fmt: skip

    torch.manual_seed(3)
    whole = make_loop()
    expected = whole.run(LOADERS[kind](), epochs=EPOCHS + 2)
    assert torch.equal(loop.run(loader, epochs=EPOCHS + 2).losses, expected.losses[EPOCHS * BATCHES :])
    assert state_of(loop) == state_of(whole)
    assert loop.run(loader, epochs=2).steps == 2 * BATCHES, "a later run counts from zero"
    assert told(caplog) == []


def test_an_interrupted_run_is_completed_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = shuffled()
    loop = make_loop()
    loop.run(loader, epochs=EPOCHS, max_steps=9)
    loop.save(tmp_path, loader)
    again = shuffled()
    loop = make_loop()
    loop.resume(tmp_path, again)
    assert [loop.run(again, epochs=EPOCHS).steps for _ in range(2)] == [EPOCHS * BATCHES - 9, EPOCHS * BATCHES]
    assert told(caplog) == []


def test_a_stop_before_the_first_step_leaves_the_run_to_be_completed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop, loader = make_loop(), make_batches(BATCHES)
    loop.run(loader, epochs=EPOCHS, max_steps=9)
    loop.save(tmp_path, loader)
    loop = make_loop()
    loop.resume(tmp_path, loader)
    stop = LambdaCallback(on_train_begin=lambda context: context.request_stop())
    history = loop.run(loader, epochs=EPOCHS, callbacks=[stop])
    assert (history.steps, history.stopped_by) == (0, "request_stop")
    assert loop.run(loader, epochs=EPOCHS).steps == EPOCHS * BATCHES - 9
    assert told(caplog) == []


@pytest.mark.parametrize("steps", [{"sink_size": 3}, {"dataset_sink_mode": False}])
def test_the_epochs_of_model_are_those_of_its_last_one(
    steps: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`epoch` is the number of the last epoch, and `initial_epoch` that of the one before the first."""
    loader, size = make_batches(BATCHES), steps.get("sink_size", BATCHES)
    model = make_model_for_training()
    model.train(3, loader, **steps)
    model.loop.save(tmp_path, loader)

    def resumed() -> Model:
        model = make_model_for_training()
        model.loop.resume(tmp_path, loader)
        return model

    model = resumed()
    for call in (model.train, model.fit, model.train):
        assert call(2, loader, **steps).steps == 0
        (message,) = told(caplog)
        assert f"has completed epoch 3 (step {3 * size}), and this one ends after epoch 2;" in message
    assert model.train(5, loader, **steps).steps == 2 * size
    numbers: list[tuple[int, int]] = []
    note = LambdaCallback(
        on_train_epoch_end=lambda c: numbers.append((c.original_args().cur_epoch_num, c.original_args().total_steps))
    )
    model = resumed()
    assert model.train(5, loader, note, initial_epoch=3, **steps).steps == 2 * size
    assert numbers == [(4, 5 * size), (5, 5 * size)]
    assert model.train(5, loader, initial_epoch=3, **steps).steps == 2 * size, "a later run"
    assert told(caplog) == []


def test_a_run_that_began_at_an_epoch_is_completed(tmp_path: Path) -> None:
    """Interrupted in its second epoch of three, by the same program; by a newer one that gives another number."""
    loader = make_batches(BATCHES)
    model = make_model_for_training()
    stop = LambdaCallback(on_train_epoch_end=lambda c: c.original_args().cur_epoch_num == 4 and c.request_stop())
    model.train(6, loader, stop, initial_epoch=3)
    model.loop.save(tmp_path, loader)
    for options, epochs in (
        ({"epoch": 6, "initial_epoch": 3}, 2),
        ({"epoch": 6, "initial_epoch": 4}, 2),
        ({"epoch": 9}, 5),
    ):
        model = make_model_for_training()
        model.loop.resume(tmp_path, loader)
        assert model.train(train_dataset=loader, **options).steps == epochs * BATCHES


class Stream(IterableDataset[Any]):
    """Knows no length."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        images = torch.randn(4 * BATCHES, 3, 8, 8, generator=torch.Generator().manual_seed(1)) + self.epoch
        return iter([(image, number % 5) for number, image in enumerate(images)])


class LongerSays(Stream):
    """Gives fewer samples than its length says."""

    def __len__(self) -> int:
        return 4 * BATCHES + 4


ENDS: dict[str, Callable[[], Any]] = {
    "list": LOADERS["list"],
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "wrong length": lambda: DataLoader(LongerSays(), batch_size=4),
}


def fails(context: Any) -> None:
    raise RuntimeError("no space left")


def in_the_first_sink(what: Callable[[Any], Any]) -> Any:
    return LambdaCallback(on_train_step_end=lambda c: what(c) if c.original_args().loop.step_count == BATCHES else None)


@pytest.mark.parametrize("saves", ["default", "by hand", "stop", "error"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.sampled(10)
def test_an_epoch_whose_end_a_sink_has_seen_is_not_trained_again(
    kind: str, accumulate: int, saves: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint is written at the end of that sink, before the run counts the epoch."""
    whole = make_loop(accumulate=accumulate)
    expected = whole.run(ENDS[kind](), epochs=3)
    loop, loader = make_loop(accumulate=accumulate), ENDS[kind]()
    callbacks: dict[str, list[Any]] = {
        "default": [ModelCheckpoint(directory=tmp_path)],
        "by hand": [in_the_first_sink(lambda c: loop.save(tmp_path, loader))],
        "stop": [
            ModelCheckpoint(directory=tmp_path, config=CheckpointConfig(save_checkpoint_steps=99)),
            in_the_first_sink(lambda c: c.request_stop()),
        ],
        "error": [
            ModelCheckpoint(directory=tmp_path, config=CheckpointConfig(99, exception_save=True)),
            in_the_first_sink(fails),
        ],
    }
    with pytest.raises(RuntimeError, match="no space") if saves == "error" else nullcontext():
        loop.run(loader, epochs=1, callbacks=callbacks[saves])
    loop, loader = make_loop(accumulate=accumulate), ENDS[kind]()
    assert loop.resume(tmp_path, loader, must_exist=True) == BATCHES
    told(caplog)
    assert loop.run(loader, epochs=1).steps == 0
    assert told(caplog)[0].startswith("nothing was trained: the run that was resumed has completed epoch 1 (step 4)")
    rest = loop.run(loader, epochs=3)
    assert torch.equal(rest.losses, expected.losses[BATCHES:])
    assert torch.equal(rest.learning_rates, expected.learning_rates[BATCHES:])
    assert state_of(loop) == state_of(whole)


@pytest.mark.parametrize("kind", ENDS)
def test_a_stop_in_the_sink_that_ends_an_epoch_counts_the_epoch(kind: str) -> None:
    loop, loader = make_loop(), ENDS[kind]()
    loop.run(loader, epochs=3, callbacks=[in_the_first_sink(lambda c: c.request_stop())])
    assert (loop.progress.epochs, loop.progress.epoch_steps, loop.scheduler.last_epoch) == (1, 0, 1)
    if kind != "list":
        assert loader.dataset.epoch == 1, "the next run begins the next pass"
