"""Plain loaders given again and again: what was made for them serves the next run, and the batches are the loader's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from loop.engines.test_on_fake_cuda import make_loop
from loop.reference import make_batches, make_model, plain_loop
from torch_sink.loop import Evaluation, LambdaCallback, StepLoop
from torch_sink.mindspore import Model
from torch_sink.sink import SinkLoader
from torch_sink.sink.kept import KEPT

pytestmark = pytest.mark.halved


class Noisy(Dataset[tuple[Tensor, int]]):
    """Samples with random augmentation."""

    size = 8

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3, self.size, self.size), index / 22) + torch.rand(3, self.size, self.size), index % 5


def make_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=4, shuffle=True, **options)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[SinkLoader]:
    """The SinkLoaders that were made."""
    found: list[SinkLoader] = []
    init = SinkLoader.__init__

    def note(sink: SinkLoader, *arguments: Any, **options: Any) -> None:
        found.append(sink)
        init(sink, *arguments, **options)

    monkeypatch.setattr(SinkLoader, "__init__", note)
    return found


def is_open(sink: SinkLoader) -> bool:
    return sink._life.ended is None


@pytest.mark.parametrize("kind", ["list", "loader", "workers"])
@pytest.mark.sampled(2)
def test_slots_and_graphs_are_made_once(fake_cuda: FakeCuda, made: list[SinkLoader], kind: str) -> None:
    train, valid = ([*make_batches(8)], [*make_batches(4)])
    if kind != "list":
        train, valid = (make_loader(drop_last=True, num_workers=2 * (kind == "workers")) for _ in range(2))
    loop = make_loop(steps_per_sync=4)
    seen = []
    for _ in range(4):
        loop.run(train, callbacks=[Evaluation(valid)])
        loop.evaluate(valid)
        slots = [place.buffer.data_ptr() for slot in made[0]._slots.slots for place in slot.places]
        seen.append((fake_cuda.graphs_begun, len(made), slots, len(fake_cuda.registered)))
    assert seen[0][:2] == seen[-1][:2] == (4, 2), "a graph for each of three slots, and one to evaluate"
    assert [one[:3] for one in seen[1:]] == [seen[1][:3]] * 3
    assert seen[-1][3] <= 4 * 8, "slabs of each worker for the batches that are under way, and hardly ever another one"
    loop.close()
    assert not any(map(is_open, made))
    assert not fake_cuda.registered


def runs_of(loader: Any, steps: list[int]) -> Iterator[Any]:
    """The batches of plain loops, each as long as the run that it stands for."""
    for count in steps:
        yield from islice((batch for _ in range(2) for batch in loader), count)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.sampled(2)
def test_each_run_sees_what_a_plain_loop_sees(made: list[SinkLoader], options: dict[str, Any], seeded: bool) -> None:
    """Runs of two epochs and less, stopped in the middle; persistent workers begin anew with each run."""
    steps, losses = [12, 3, 9, 12], []
    loaders = [make_loader(generator=torch.Generator().manual_seed(3) if seeded else None, **options) for _ in range(2)]
    model, plain = make_model(dropout=0.0), make_model(dropout=0.0)
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.05), steps_per_sync=4)
    torch.manual_seed(7)
    for count in steps:
        losses.append(loop.run(loaders[0], epochs=2, max_steps=count).losses)
    loop.close()
    torch.manual_seed(7)
    expected = []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for count in steps:
        if options.get("persistent_workers"):
            loaders[1]._iterator = None
        expected.append(plain_loop(plain, functional.cross_entropy, optimizer, runs_of(loaders[1], [count]))[0])
    assert torch.equal(torch.cat(losses), torch.cat(expected))
    assert len(made) == 1


def make_cpu_loop() -> StepLoop:
    model = make_model(dropout=0.0)
    return StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.05), steps_per_sync=4)


def test_nothing_runs_between_two_runs() -> None:
    loop, loader = make_cpu_loop(), make_loader(num_workers=2, persistent_workers=True)
    before = set(threading.enumerate())
    loop.run(loader, max_steps=2)
    assert set(threading.enumerate()) <= before
    assert torch.multiprocessing.active_children() == []
    loop.close()


def test_a_loader_that_is_gone_takes_its_slots_along(made: list[SinkLoader]) -> None:
    loop, loader = make_cpu_loop(), make_loader(num_workers=1)
    loop.run(loader)
    assert is_open(made[0])
    del loader
    assert not is_open(made[0]), "without garbage collection"
    loop.run(make_loader())
    assert not any(map(is_open, made)), "nobody else had it"
    loop.close()


def test_a_loader_that_was_changed_is_looked_at_again(made: list[SinkLoader]) -> None:
    loop, loader = make_cpu_loop(), make_loader()
    loop.run(loader)
    collated: list[int] = []
    stock = loader.collate_fn

    def collate(samples: Any) -> Any:
        collated.append(len(samples))
        return stock(samples)

    loader.collate_fn = collate
    loop.run(loader)
    assert collated == [4, 4, 4, 4, 4, 2]
    assert [is_open(sink) for sink in made] == [False, True]
    loop.close()


def test_the_latest_few_are_kept_and_one_that_failed_is_not(made: list[SinkLoader]) -> None:
    loop = make_cpu_loop()
    loaders = [make_batches(2) for _ in range(KEPT + 1)]
    for loader in loaders:
        loop.evaluate(loader)
    assert [is_open(sink) for sink in made] == [False] + [True] * KEPT
    with pytest.raises(RuntimeError, match="size of tensor"):
        loop.evaluate(loaders[-1], forward=lambda model, batch: torch.zeros(2) + torch.zeros(3))
    assert [is_open(sink) for sink in made] == [False] + [True] * (KEPT - 1) + [False]
    loop.close()
    assert not any(map(is_open, made))


def test_the_one_that_was_trained_on_last_is_kept_and_where_it_stands(made: list[SinkLoader], tmp_path: Path) -> None:
    loop, data = make_cpu_loop(), make_batches(4)
    loop.run(data, max_steps=3)
    for _ in range(KEPT + 1):
        loop.evaluate(make_batches(2))
    assert [is_open(sink) for sink in made] == [True, False] + [True] * KEPT
    state = torch.load(loop.save(tmp_path, data) / "state.pt")
    assert (state["loader"]["batches"], state["loader"]["batch_in_pass"]) == (3, 3)
    loop.close()


def test_a_position_waits_for_its_loader(tmp_path: Path) -> None:
    """Until the loader comes that it was loaded for, whatever else is trained on before."""
    loop, data, other = make_cpu_loop(), make_batches(4), make_batches(2)
    loop.run(data, max_steps=3)
    loop.save(tmp_path, data)
    seen: list[float] = []
    loop.model.register_forward_pre_hook(lambda _, inputs: seen.append(float(inputs[0].sum())))
    assert loop.resume(tmp_path, data) == 3
    loop.run(other, max_steps=4)
    loop.run(data)
    loop.run(data)
    values = [float(images.sum()) for images, _ in (other[0], data[3], *data)]
    assert seen == values, "the last step of the run that was resumed; the rest of the epoch; a run from the beginning"
    loop.close()


def test_a_loader_in_use_gets_another_one(fake_cuda: FakeCuda, made: list[SinkLoader]) -> None:
    """Training data that are evaluated in the run; the next run finds the slots that its graphs read."""
    loop, data = make_loop(steps_per_sync=4), make_batches(8)
    for _ in range(3):
        history = loop.run(data, callbacks=[Evaluation(data)])
        assert len(history.evaluations) == 1
    assert len(made) == 2
    assert fake_cuda.graphs_begun == 4
    loop.close()


@pytest.mark.parametrize("evaluates", [False, True])
def test_slots_are_made_anew_for_batches_of_another_size(fake_cuda: FakeCuda, evaluates: bool) -> None:
    """As when images grow from run to run, which a transform may decide."""

    class Averaging(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(3, 5)

        def forward(self, images: Tensor) -> Tensor:
            return self.last(images.mean((2, 3)))

    loop, loader, static = make_loop(model=Averaging().cuda(), steps_per_sync=4), make_loader(drop_last=True), []
    note = LambdaCallback(on_train_step_end=lambda run: static.append(run.original_args().train_dataset.slot_index))
    for size in (8, 16, 12):
        loader.dataset.size = size
        assert loop.run(loader, callbacks=[note]).losses.isfinite().all()
        if evaluates:
            assert loop.evaluate(loader)["loss"] < 10
    assert None not in static
    loop.close()


def test_models_keep_them_too(made: list[SinkLoader]) -> None:
    network, train, valid = make_model(dropout=0.0), make_batches(4), make_batches(2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    model = Model(network, functional.cross_entropy, optimizer, {"accuracy"})
    for _ in range(2):
        model.fit(2, train, valid)
        model.train(2, train, sink_size=3)
        model.eval(valid)
    assert len(made) == 2
    model.close()
    assert not any(map(is_open, made))
    only = Model(network, functional.cross_entropy, metrics={"accuracy"})
    only.eval(valid), only.eval(valid)
    assert len(made) == 3
    only.close()
    assert not any(map(is_open, made))
