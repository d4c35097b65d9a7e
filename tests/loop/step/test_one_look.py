"""Between the loader and the step, the containers of a batch are looked through once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch.nn import functional

from loop.reference import assert_equal_training, make_batches, make_model
from torch_sink.loop import JitConfig, LambdaCallback, StepLoop
from torch_sink.loop.engines import build, jit
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved

STEPS = 12


class Counted(dict):
    """A batch that counts how often somebody asks for all that it holds."""

    looks = 0

    def values(self) -> Any:
        Counted.looks += 1
        return super().values()


def make_loop(mode: str, device: str, steps_per_sync: int = STEPS, jit_level: str = "O0") -> StepLoop:
    model = make_model(dropout=0.0).to(device)
    return StepLoop(
        model,
        None,
        torch.optim.SGD(model.parameters(), lr=0.05),
        forward=lambda model, batch: functional.cross_entropy(model(batch["inputs"]), batch["labels"]),
        mode=mode,
        steps_per_sync=steps_per_sync,
        jit_config=JitConfig(jit_level=jit_level, exc_mode="sink"),
    )


def counted_batches() -> list[Any]:
    return [Counted(inputs=inputs, labels=labels) for inputs, labels in make_batches(STEPS)]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_batch_is_looked_through_once(fake_cuda: FakeCuda, mode: str) -> None:
    loop = make_loop(mode, "cuda")
    with SinkLoader(counted_batches()) as loader:
        loop.run(loader)  # allocates the slots and records the graphs
        Counted.looks = 0
        loop.run(loader)
        assert Counted.looks == STEPS
    assert f"mode: {mode}" in loop.explain()
    loop.close()


def test_a_batch_that_stays_on_the_host_is_looked_through_once() -> None:
    with SinkLoader(counted_batches(), device="cpu") as loader:
        Counted.looks = 0
        make_loop("eager", "cpu").run(loader)
    assert Counted.looks == STEPS


def test_a_compiled_step_looks_through_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for the shapes of every batch."""
    monkeypatch.setattr(jit, "compile_function", lambda function, config: function)
    monkeypatch.setattr(build, "compiler_problem", lambda: None)
    loop = make_loop("compile", "cpu", jit_level="O1")
    with SinkLoader(counted_batches(), device="cpu") as loader:
        Counted.looks = 0
        loop.run(loader)
    assert Counted.looks == STEPS
    assert "mode: compile" in loop.explain()


class Reversed(SinkLoader):
    """Changes its batches on the way to the loop."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            batch["inputs"] = batch["inputs"].flip(0)
            yield batch


class Wrapped:
    """Passes on all but the batches of an iterator, which it changes: in place, or in a container of its own."""

    def __init__(self, iterator: Iterator[Any], change: Callable[[Any], Any]) -> None:
        self.iterator, self.change = iterator, change

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.change(next(self.iterator))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterator, name)


def doubled(batch: Any) -> Any:
    return Counted(inputs=torch.cat([batch["inputs"]] * 2), labels=torch.cat([batch["labels"]] * 2))


def double_in_place(batch: Any) -> Any:
    batch.update(doubled(batch))
    return batch


@pytest.mark.parametrize("change", [doubled, double_in_place])
def test_an_iterator_of_a_subclass_is_not_asked_for_what_its_batches_hold(change: Callable[[Any], Any]) -> None:
    class Changing(SinkLoader):
        def _epoch(self, batches: int | None, **options: bool) -> Any:
            return Wrapped(super()._epoch(batches, **options), change)

    with Changing(counted_batches(), device="cpu") as loader:
        history = make_loop("eager", "cpu").run(loader)
    assert history.samples == 2 * sum(len(batch["labels"]) for batch in counted_batches())


def reverse(context: Any) -> None:
    batch = context.original_args().train_dataset_element
    batch["inputs"] = batch["inputs"].flip(0)


def reverse_and_fail(context: Any) -> None:
    reverse(context)
    raise KeyError("a callback")


@pytest.mark.parametrize("place", ["loader", "callback", "callback that fails"])
def test_what_is_put_into_a_batch_later_is_what_the_step_trains_on(fake_cuda: FakeCuda, place: str) -> None:
    """A graph reads the slots, which do not hold it."""
    loops = {mode: make_loop(mode, "cuda", steps_per_sync=1) for mode in ("graph", "eager")}
    for loop in loops.values():
        with (Reversed if place == "loader" else SinkLoader)(counted_batches(), batches_per_epoch=STEPS) as loader:
            if place == "callback that fails":  # its batch is given back, and is the first one of the second epoch
                loop.run(loader)
                with pytest.raises(KeyError, match="a callback"):
                    loop.run(loader, callbacks=[LambdaCallback(on_train_step_begin=reverse_and_fail)])
            loop.run(loader, callbacks=[LambdaCallback(on_train_step_begin=reverse)] if place == "callback" else [])
    graph, eager = loops["graph"], loops["eager"]
    assert_equal_training((graph.model, graph.optimizer), (eager.model, eager.optimizer))
    assert "mode: graph" in graph.explain()
    for loop in loops.values():
        loop.close()
