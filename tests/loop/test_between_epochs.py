"""What a program changes between two epochs of a run is seen in the next one; samplers are told which epoch it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sink.conftest import wait_for
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from torch_sink.loop import Callback, LambdaCallback, StepLoop
from torch_sink.mindspore import Model
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved

COUNT, BATCH = 24, 3


class Scaled(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is i times `scale`."""

    scale = 1

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]) * self.scale, torch.zeros(1)


class Seeing(nn.Module):
    """Notes what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(1)), list[list[float]]()

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(inputs.flatten().tolist())
        return inputs * self.weight


def make_loop(**options: Any) -> StepLoop:
    model = Seeing()
    return StepLoop(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 1e-6), **options)


def distributed(**options: Any) -> DataLoader[Any]:
    sampler = DistributedSampler(range(COUNT), num_replicas=2, rank=0, seed=3)
    return DataLoader(Scaled(), BATCH, sampler=sampler, generator=torch.Generator(), **options)


def order_of(epoch: int, scale: int = 1) -> list[list[float]]:
    """The samples of an epoch, by a plain DataLoader."""
    loader = distributed()
    loader.dataset.scale = scale
    loader.sampler.set_epoch(epoch)
    return [inputs.flatten().tolist() for inputs, _ in loader]


def orders_of(*epochs: int) -> list[list[float]]:
    return [batch for epoch in epochs for batch in order_of(epoch)]


class WaitsForWorkers(Callback):
    """Steps that take longer than the workers need for the whole pass."""

    def on_train_step_end(self, run_context: Any) -> None:
        loader = run_context.original_args().train_dataset
        wait_for(loader._producer, lambda: loader._producer.current is None)


@pytest.mark.parametrize("event", ["on_train_epoch_begin", "on_train_epoch_end"])
@pytest.mark.parametrize("by_model", [False, True], ids=["StepLoop", "Model"])
@pytest.mark.sampled(2)
def test_a_callback_changes_the_dataset_of_the_next_epoch(event: str, by_model: bool) -> None:
    wrapped = distributed(num_workers=2)

    def scale(context: Any) -> None:
        wrapped.dataset.scale = context.original_args().cur_epoch_num + 1

    callbacks = [LambdaCallback(**{event: scale}), WaitsForWorkers()]
    loop = make_loop(steps_per_sync=1)
    model, train = loop.model, loop.run
    if by_model:
        train = Model(model, nn.functional.mse_loss, loop.optimizer).train
    with SinkLoader(wrapped, slots=8) as loader:
        if by_model:
            train(3, loader, callbacks, dataset_sink_mode=False)
        else:
            train(loader, epochs=3, callbacks=callbacks)
    scales = (1, 2, 3) if event.endswith("end") else (2, 3, 4)
    assert model.seen == [batch for epoch, by in enumerate(scales) for batch in order_of(epoch, by)]


# --- set_epoch


@pytest.mark.parametrize("wraps", [False, True], ids=["DataLoader", "SinkLoader"])
def test_runs_go_on_from_the_program_s_own_value(wraps: bool) -> None:
    source = distributed()
    loader = SinkLoader(source) if wraps else source
    loop = make_loop()
    source.sampler.set_epoch(5)
    loop.run(loader, epochs=2)
    assert loop.model.seen == orders_of(5, 6)
    loop.run(loader)
    assert loop.model.seen == orders_of(5, 6, 7)
    loop.run(loader, max_steps=2)
    loop.run(loader)
    assert loop.model.seen == [*orders_of(5, 6, 7), *order_of(8)[:2], *order_of(9)], "an epoch that was left is over"
    source.sampler.set_epoch(1)
    loop.run(loader, epochs=2)
    assert loop.model.seen[-8:] == orders_of(1, 2)
    assert source.sampler.epoch == 3, "that of the next pass"


@pytest.mark.parametrize("event", ["on_train_epoch_begin", "on_train_step_end", "on_train_epoch_end"])
def test_what_a_callback_sets_holds(event: str) -> None:
    """In the middle of an epoch it is for the next one."""
    source = distributed()

    def tell(context: Any) -> None:
        source.sampler.set_epoch(10 * context.original_args().cur_epoch_num)

    loop = make_loop(steps_per_sync=-1)
    loop.run(source, epochs=3, callbacks=[LambdaCallback(**{event: tell})])
    assert loop.model.seen == (orders_of(10, 20, 30) if event.endswith("begin") else orders_of(0, 10, 20))


def test_each_pass_of_a_long_epoch_is_told_its_number() -> None:
    """Epochs of six batches, of passes of four."""
    loop = make_loop()
    with SinkLoader(distributed(), batches_per_epoch=6) as loader:
        loop.run(loader, epochs=2)
    assert loop.model.seen == orders_of(0, 1, 2)


def test_evaluations_and_a_look_at_a_batch_change_nothing() -> None:
    source, loop = distributed(), make_loop()
    with SinkLoader(source) as loader:
        next(iter(loader))
        loop.evaluate(loader)
        loop.model.seen.clear()
        loop.run(loader, epochs=2, callbacks=[LambdaCallback(on_train_epoch_end=lambda _: evaluate(loop, loader))])
    assert loop.model.seen == orders_of(0, 1)


def evaluate(loop: StepLoop, loader: SinkLoader) -> None:
    steps = len(loop.model.seen)
    loop.evaluate(loader)
    del loop.model.seen[steps:]


def test_initial_epoch_is_where_an_untold_sampler_begins() -> None:
    loop = make_loop()
    model = Model(loop.model, nn.functional.mse_loss, loop.optimizer)
    source = distributed()
    model.train(3, source)
    model.train(5, source, initial_epoch=3)
    assert loop.model.seen == orders_of(0, 1, 2, 3, 4)
    loop.model.seen.clear()
    model.train(8, distributed(), initial_epoch=7)
    source.sampler.set_epoch(2)
    model.train(8, source, initial_epoch=7)
    assert loop.model.seen == orders_of(7, 2)


Restart = Callable[[Any], object]
RESTARTS: dict[str, Restart] = {
    "untold": lambda loader: None,
    "told before": lambda loader: loader.sampler.set_epoch(1),  # what holds is in the checkpoint
}


@pytest.mark.parametrize("wraps", [False, True], ids=["DataLoader", "SinkLoader"])
@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.sampled(4)
def test_it_is_resumed_at_every_step(wraps: bool, restart: str, num_workers: int, tmp_path: Path) -> None:
    """In the middle of a pass, at its last batch, whose end nobody has seen, and between two passes."""

    def make() -> tuple[DataLoader[Any], Any]:
        source = distributed(num_workers=num_workers)
        return source, SinkLoader(source) if wraps else source

    def save(place: str) -> Callable[[Any], object]:
        return lambda _: loop.save(tmp_path / f"{loop.step_count} {place}", loader)

    source, loader = make()
    source.sampler.set_epoch(5)
    loop = make_loop(steps_per_sync=1)
    saving = LambdaCallback(on_train_step_end=save("inside"), on_train_epoch_end=save("between"))
    loop.run(loader, epochs=2, callbacks=[saving])
    expected = loop.model.seen
    assert expected == orders_of(5, 6)
    for name, step in [("1 inside", 1), ("3 inside", 3), ("4 inside", 4), ("4 between", 4), ("6 inside", 6)]:
        source, loader = make()
        RESTARTS[restart](source)
        loop = make_loop(steps_per_sync=1)
        assert loop.resume(tmp_path / name, loader) == step
        loop.run(loader, epochs=2)
        assert loop.model.seen == expected[step:], name
        if wraps:
            loader.close()


def test_a_program_that_sets_another_epoch_after_resume_is_heard(tmp_path: Path) -> None:
    source, loop = distributed(), make_loop()
    loop.run(source, epochs=1)
    loop.save(tmp_path, source)
    source, loop = distributed(), make_loop()
    loop.resume(tmp_path, source)
    assert source.sampler.epoch == 1
    source.sampler.set_epoch(7)
    loop.run(source, epochs=2)
    assert loop.model.seen == orders_of(7)


def test_a_resume_that_fails_leaves_the_epochs_alone(tmp_path: Path) -> None:
    source, loop = distributed(), make_loop()
    loop.run(source, epochs=1)
    loop.save(tmp_path, source)
    source, loop = distributed(), make_loop()
    loop.model.other = nn.Parameter(torch.zeros(1))
    source.sampler.set_epoch(3)
    with pytest.raises(RuntimeError, match="other"):
        loop.resume(tmp_path, source)
    assert source.sampler.epoch == 3


# --- what changes in callbacks of a run that is resumed at an epoch's last step


@pytest.mark.parametrize("event", ["on_train_epoch_begin", "on_train_epoch_end"])
def test_the_next_epoch_of_a_resumed_run_begins_behind_the_callbacks(event: str, tmp_path: Path) -> None:
    def change(source: Any) -> Any:
        def scale(context: Any) -> None:
            source.dataset.scale = context.original_args().cur_epoch_num + 1

        return LambdaCallback(**{event: scale})

    source = distributed(num_workers=1)
    whole = make_loop(steps_per_sync=1)
    save = LambdaCallback(on_train_step_end=lambda _: whole.step_count == 4 and whole.save(tmp_path, source))
    whole.run(source, epochs=3, callbacks=[change(source), save])
    source = distributed(num_workers=1)
    resumed = make_loop()
    assert resumed.resume(tmp_path, source) == 4
    resumed.run(source, epochs=3, callbacks=[change(source)])
    assert resumed.model.seen == whole.model.seen[4:]
