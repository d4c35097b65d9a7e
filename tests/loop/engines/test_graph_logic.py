"""The graph engine's logic on the CPU: a stand-in does nothing at capture and calls the function at replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.optim import lr_scheduler

from loop.reference import assert_equal_training, make_batches, make_model, plain_loop, step_loop
from torch_sink.amp import DynamicLossScaler
from torch_sink.errors import UnsupportedOperation
from torch_sink.loop import LambdaCallback, StepLoop
from torch_sink.loop.core.batches import UsualShape, batch_tensors
from torch_sink.loop.engines import build
from torch_sink.loop.engines.memory import GraphMemory
from torch_sink.sink import SinkLoader


class DirectCapture:
    """Like a CUDA capture, executes nothing at capture; a replay calls the function."""

    def __init__(self) -> None:
        self.captured = self.replayed = self.resets = 0
        self.fails = False
        self.memory = GraphMemory()  # which no graph holds

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def trial(self, problems: list[str]) -> AbstractContextManager[Any]:
        return nullcontext()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            function()

        return replay

    def reset(self) -> None:
        self.resets += 1


class RingLoader(SinkLoader):
    """Delivers its batches in static slots, as on an accelerator; odd shapes in none."""

    def __init__(self, batches: list[Any], slots: int = 3) -> None:
        super().__init__(batches)
        self._ring = [tuple(tensor.clone() for tensor in batches[0]) for _ in range(slots)]
        self._slot: int | None = None
        self.pauses = 0

    @property
    def slot_index(self) -> int | None:
        return self._slot

    def _static_batches(self, batch: Any) -> dict[int, Any]:
        return dict(enumerate(self._ring))

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self.pauses += 1
        yield

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            self._slot = number % len(self._ring)
            slot = self._ring[self._slot]
            if slot[0].shape != batch[0].shape:
                self._slot = None
                yield batch
                continue
            for target, source in zip(slot, batch, strict=True):
                target.copy_(source)
            yield slot


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> DirectCapture:
    """Makes mode "auto" mean "graph" on the CPU, without a compiler."""
    made = DirectCapture()
    monkeypatch.setattr(build, "make_capture", lambda device, memory: made)
    monkeypatch.setattr(build, "compiler_problem", lambda: "switched off by the test")
    return made


def make_loop(**options: Any) -> StepLoop:
    model = make_model()
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.05)
    torch.manual_seed(5)
    return step_loop(model, optimizer, **options)


def reference(batches: list[Any], **options: Any) -> tuple[Any, ...]:
    model = make_model()
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.05)
    scheduler = options.pop("scheduler", None)
    torch.manual_seed(5)
    losses, rates = plain_loop(
        model,
        functional.cross_entropy,
        optimizer,
        batches,
        scheduler=scheduler(optimizer) if scheduler else None,
        **options,
    )
    return model, optimizer, losses, rates


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_replays_equal_the_plain_loop(capture: DirectCapture, optimizer: Any, accumulate: int) -> None:
    batches = make_batches(12)
    options = {"optimizer": optimizer, "accumulate": accumulate}
    schedule = {"scheduler": lambda o: lr_scheduler.CosineAnnealingLR(o, 7)}
    loop = make_loop(steps_per_sync=5, **options, **schedule)
    loader = RingLoader(batches)
    history = loop.run(loader, epochs=2)
    plain = reference(batches * 2, **options, **schedule)
    assert_equal_training((loop.model, loop.optimizer), plain[:2])
    assert torch.equal(history.losses, plain[2])
    assert torch.equal(history.learning_rates, plain[3])
    # Three slots, and with accumulation two graphs for each; three steps of warm-up, a trial of each kind among them.
    assert capture.captured == 3 * accumulate
    assert loader.pauses == accumulate + accumulate, "all slots are captured in one pause"
    assert capture.replayed == 24 - max(3, 2 + accumulate)
    assert history.host_syncs == 6 + capture.captured
    assert "mode: graph" in loop.explain()
    assert all(isinstance(group["lr"], float) for group in loop.optimizer.param_groups)


def test_odd_shapes_run_uncaptured(capture: DirectCapture) -> None:
    batches = [*make_batches(7), *make_batches(1, size=3)]
    loop = make_loop(steps_per_sync=4)
    loop.run(RingLoader(batches), epochs=2)
    plain = reference(batches * 2)
    assert_equal_training((loop.model, loop.optimizer), plain[:2])
    assert capture.replayed == 16 - 3 - 2
    assert "another shape" in loop.explain()
    assert "(2 times)" in loop.explain()


def test_a_run_may_begin_with_an_odd_shape(capture: DirectCapture) -> None:
    """As one does that is resumed before the last batch of an epoch."""
    batches = [*make_batches(1, size=3), *make_batches(8)]
    loop = make_loop(steps_per_sync=4)
    loop.run(batches)
    assert_equal_training((loop.model, loop.optimizer), reference(batches)[:2])
    assert capture.replayed == 9 - 4, "the shape is known from its second batch on, the trial is the third"
    assert "5 captured, 0 compiled, 4 eager; 1 had batches of another shape" in loop.explain()
    assert "note: batches of another shape" not in loop.explain()


def test_the_usual_shape_is_the_first_unless_another_comes_twice_in_a_row() -> None:
    shape = UsualShape()
    assert [shape.accepts(name) for name in "abcabbb"] == [True, False, False, True, False, False, False]
    shape = UsualShape()
    assert [shape.accepts(name) for name in "abccab"] == [True, False, False, True, False, False]
    assert shape.knows("c")


def test_batches_in_no_slot_are_staged(capture: DirectCapture) -> None:
    batches = make_batches(9)
    loop = make_loop(steps_per_sync=4)
    loop.run(batches)
    assert_equal_training((loop.model, loop.optimizer), reference(batches)[:2])
    assert capture.captured == 1
    assert capture.replayed == 9 - 3
    assert "no static slot" in loop.explain()


@dataclass(frozen=True)
class Fields:
    inputs: Any
    labels: Any


@pytest.mark.parametrize(
    "container",
    [Fields, lambda inputs, labels: [Fields(inputs, [Fields(labels, None)])]],
    ids=["dataclass", "dataclasses in lists"],
)
def test_staging_writes_to_no_batch_of_the_dataset(capture: DirectCapture, container: Any) -> None:
    def forward(model: Any, batch: Any) -> Any:
        inputs, labels = batch_tensors(batch)
        return functional.cross_entropy(model(inputs), labels)

    batches = make_batches(6)
    given = [container(*(tensor.clone() for tensor in batch)) for batch in batches]
    loop = make_loop(steps_per_sync=3, forward=forward)
    loop.run(given)
    for batch, expected in zip(given, batches, strict=True):
        assert all(map(torch.equal, batch_tensors(batch), expected))
    assert capture.replayed > 0
    assert_equal_training((loop.model, loop.optimizer), reference(batches)[:2])


class Box:
    """A container that nothing opens."""

    def __init__(self, *tensors: Any) -> None:
        self.tensors = tensors


def test_batches_of_the_users_own_classes_run_uncaptured(capture: DirectCapture) -> None:
    """What they hold could be anything, and a graph would go on with that of one batch."""
    batches = make_batches(9)
    loop = make_loop(
        steps_per_sync=3, forward=lambda model, box: functional.cross_entropy(model(box.tensors[0]), box.tensors[1])
    )
    loop.run([Box(*batch) for batch in batches])
    assert_equal_training((loop.model, loop.optimizer), reference(batches)[:2])
    assert capture.replayed == 0
    assert "another shape or with other numbers" in loop.explain()


class WeightedRing(RingLoader):
    """Delivers ([images, labels], weight): as many tensors as members, and a number that changes after six batches."""

    def _static_batches(self, batch: Any) -> dict[int, Any]:
        return {slot: (list(tensors), batch[1]) for slot, tensors in enumerate(self._ring)}

    def __iter__(self) -> Iterator[Any]:
        for number, tensors in enumerate(super().__iter__()):
            yield list(tensors), 1 + number // 6


def test_a_number_beside_nested_tensors_is_not_frozen(capture: DirectCapture) -> None:
    def forward(model: Any, batch: Any) -> Any:
        (inputs, labels), weight = batch
        return weight * functional.cross_entropy(model(inputs), labels)

    losses = []
    for mode in ("graph", "eager"):
        loop = make_loop(steps_per_sync=4, forward=forward, mode=mode)
        losses.append(loop.run(WeightedRing(make_batches(12))).losses)
    assert torch.equal(*losses)
    assert capture.replayed > 0


def test_changed_group_option_captures_again(capture: DirectCapture) -> None:
    def change(context: Any) -> None:
        arguments = context.original_args()
        if arguments.loop.step_count == 8:
            arguments.optimizer.param_groups[0]["weight_decay"] = 0.5
        arguments.optimizer.param_groups[0]["lr"] *= 0.5  # in the table: no new capture

    batches = make_batches(12)
    loop = make_loop(steps_per_sync=4)
    loop.run(RingLoader(batches), callbacks=[LambdaCallback(on_train_step_end=change)])
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(5)
    for step in range(0, 12, 4):
        optimizer.param_groups[0]["weight_decay"] = 0.5 if step == 8 else 0
        plain_loop(model, functional.cross_entropy, optimizer, batches[step : step + 4])
        optimizer.param_groups[0]["lr"] *= 0.5
    assert all(torch.equal(a, b) for a, b in zip(loop.model.parameters(), model.parameters(), strict=True))
    assert capture.captured == 6
    assert "captured again" in loop.explain()


def test_failed_capture_steps_down(capture: DirectCapture) -> None:
    capture.fails = True
    batches = make_batches(9)
    loop = make_loop(steps_per_sync=4)
    loop.run(RingLoader(batches))
    assert_equal_training((loop.model, loop.optimizer), reference(batches)[:2])
    assert "mode: eager" in loop.explain()
    assert "cannot be captured" in loop.explain()


@pytest.mark.parametrize("rate", [0.05, torch.tensor(0.05, dtype=torch.float64)], ids=["number", "tensor"])
def test_cut_sink_rewinds_the_schedule(capture: DirectCapture, rate: Any) -> None:
    """A generator has no length: the sink planned for 8 steps ends after 5."""
    batches = make_batches(5)

    def schedule_of(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        for group in optimizer.param_groups:
            group["lr"] = rate.clone() if isinstance(rate, torch.Tensor) else rate
        return lr_scheduler.ExponentialLR(optimizer, 0.9)

    schedule = {"scheduler": schedule_of}
    loop = make_loop(steps_per_sync=8, **schedule)
    history = loop.run(lambda: iter(batches), epochs=3)
    plain = reference(batches * 3, **schedule)
    assert torch.equal(history.learning_rates, plain[3])
    assert torch.equal(history.losses, plain[2])
    assert loop.optimizer.param_groups[0]["lr"] == plain[1].param_groups[0]["lr"]


def test_scaler_waits_for_a_finite_update(capture: DirectCapture) -> None:
    batches = make_batches(12)
    for inputs, _ in batches[:4]:
        inputs.fill_(float("inf"))
    loop = make_loop(steps_per_sync=6, amp="O1", loss_scaler=DynamicLossScaler(2.0**4), optimizer=torch.optim.Adam)
    history = loop.run(RingLoader(batches))
    assert history.overflows.tolist()[:4] == [True] * 4
    assert capture.replayed == 12 - 6, "the trial follows the first finite update"
    assert history.host_syncs == 2 + 5 + 3


def test_python_state_is_refused(capture: DirectCapture) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1

    with pytest.raises(UnsupportedOperation, match=r"Counting keeps Python numbers.*count"):
        make_loop(mode="graph", optimizer=Counting).run(make_batches(6))
    loop = make_loop(mode="auto", optimizer=Counting)
    loop.run(make_batches(6))
    assert "Counting keeps count on the host" in loop.explain()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_cycled_betas_are_read_from_the_table(capture: DirectCapture, accumulate: int) -> None:
    """As tensors they are rounded to float32 before they are subtracted from 1: not the same bits."""
    schedule = {"scheduler": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20)}
    options = {"optimizer": torch.optim.AdamW, "accumulate": accumulate, **schedule}
    batches = make_batches(16)
    loop = make_loop(steps_per_sync=5, **options)
    history = loop.run(RingLoader(batches))
    model, optimizer, losses, rates = reference(batches, **options)
    for ours, plain in zip(loop.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(history.losses, losses, rtol=1e-4, atol=1e-6)
    assert torch.equal(history.learning_rates, rates)
    assert capture.captured == 3 * accumulate, "a beta from the table asks for no new capture"
    assert loop.optimizer.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]
    frozen = reference(batches, **{**options, "scheduler": _without_momentum})
    assert not torch.allclose(losses, frozen[2], rtol=1e-4, atol=1e-6), "cycling makes a difference here"


def _without_momentum(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False)


def test_momentum_that_only_the_host_can_read_is_not_frozen(capture: DirectCapture) -> None:
    schedule = {"scheduler": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20)}
    optimizer = lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)  # noqa: E731 - a constructor
    batches = make_batches(12)
    loop = make_loop(steps_per_sync=5, optimizer=optimizer, **schedule)
    loop.run(RingLoader(batches))
    assert_equal_training((loop.model, loop.optimizer), reference(batches, optimizer=optimizer, **schedule)[:2])
    assert capture.captured == 0
    assert "cycles momentum" in loop.explain()
