"""Sinks, schedules, metrics, errors in order: what `StepLoop.run` promises beside the numbers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from loop.reference import make_batches, make_model, plain_loop
from torch_sink import SinkError
from torch_sink.amp import StaticLossScaler
from torch_sink.loop import LambdaCallback, StepLoop, SummaryCollector, no_host_sync
from torch_sink.mindspore import Model
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved


def make_loop(**options: Any) -> StepLoop:
    model = make_model()
    optimizer = options.pop("optimizer", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))(model.parameters())
    scheduler = options.pop("scheduler", None)
    loss_fn = options.pop("loss_fn", functional.cross_entropy)
    options.setdefault("schedule", "step")
    torch.manual_seed(5)
    return StepLoop(model, loss_fn, optimizer, scheduler=scheduler(optimizer) if scheduler else None, **options)


def sink_lengths(loop: StepLoop, batches: Any, **options: Any) -> list[int]:
    lengths: list[int] = []
    note = LambdaCallback(on_train_step_end=lambda context: lengths.append(len(context.original_args().losses)))
    loop.run(batches, callbacks=[note, *options.pop("callbacks", [])], **options)
    return lengths


@pytest.mark.parametrize(
    ("steps_per_sync", "options", "lengths"),
    [
        (4, {}, [4, 4, 2]),
        (4, {"epochs": 2}, [4, 4, 2, 4, 4, 2]),
        (-1, {"epochs": 2}, [10, 10]),
        (100, {}, [10]),
        (1, {"max_steps": 3}, [1, 1, 1]),
        (4, {"epochs": 3, "max_steps": 15}, [4, 4, 2, 4, 1]),
        (4, {"max_steps": 10, "epochs": 5}, [4, 4, 2]),
        (4, {"epochs": 0}, []),
    ],
)
def test_lengths_of_sinks(steps_per_sync: int, options: dict[str, Any], lengths: list[int]) -> None:
    loop = make_loop(steps_per_sync=steps_per_sync)
    assert sink_lengths(loop, make_batches(10), **options) == lengths
    assert loop.step_count == sum(lengths)


def test_unknown_lengths_end_when_the_data_does() -> None:
    batches = make_batches(5)
    assert sink_lengths(make_loop(steps_per_sync=4), lambda: iter(batches), epochs=2) == [4, 1, 4, 1]
    assert sink_lengths(make_loop(steps_per_sync=-1), lambda: iter(batches), epochs=2) == [5, 5]


def test_epochs_of_a_sink_loader() -> None:
    loader = SinkLoader(make_batches(10), batches_per_epoch=6)
    assert sink_lengths(make_loop(steps_per_sync=4), loader, epochs=3) == [4, 2, 4, 2, 4, 2]


@pytest.mark.parametrize("batches_per_epoch", [None, 6])
def test_a_run_goes_on_in_an_unfinished_epoch_where_the_loader_does(batches_per_epoch: int | None) -> None:
    loader, loop = SinkLoader(make_batches(6), batches_per_epoch=batches_per_epoch), make_loop(steps_per_sync=4)
    first = loop.run(loader, max_steps=2)
    second = loop.run(loader)
    model = make_model()
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = make_batches(6)
    losses, _ = plain_loop(
        model, functional.cross_entropy, optimizer, batches if batches_per_epoch == 6 else batches[:2] + batches
    )
    assert torch.equal(torch.cat([first.losses, second.losses]), losses)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 0.1, step_size_up=4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 12, 2.0),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules_equal_a_plain_loop_at_every_step(name: str, accumulate: int) -> None:
    batches = make_batches(9)
    loop = make_loop(scheduler=SCHEDULERS[name], steps_per_sync=4, accumulate=accumulate)
    history = loop.run(batches, epochs=2)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(5)
    scheduler = SCHEDULERS[name](optimizer)
    torch.manual_seed(5)
    losses, rates = plain_loop(
        model,
        functional.cross_entropy,
        optimizer,
        batches * 2,
        scheduler=scheduler,
        accumulate=accumulate,
        per_epoch=len(batches),
    )
    assert torch.equal(history.learning_rates, rates)
    assert torch.equal(history.losses, losses)
    assert loop.optimizer.param_groups[0]["momentum"] == optimizer.param_groups[0]["momentum"]


def test_schedule_by_epoch_and_by_overflowed_steps() -> None:
    loop = make_loop(scheduler=lambda o: lr_scheduler.ExponentialLR(o, 0.5), schedule="epoch", steps_per_sync=2)
    assert loop.run(make_batches(3), epochs=2).learning_rates.flatten().tolist() == [0.1] * 3 + [0.05] * 3
    batches = make_batches(3)
    batches[0][0].fill_(float("inf"))
    skipping = make_loop(scheduler=lambda o: lr_scheduler.ExponentialLR(o, 0.5), loss_scaler=StaticLossScaler(1.0))
    history = skipping.run(batches)
    assert history.overflows.tolist() == [True, False, False]
    assert history.learning_rates.flatten().tolist() == [0.1, 0.05, 0.025], "stepped for the skipped update too"


def test_accumulation_begins_anew_in_each_epoch_and_run() -> None:
    """5 batches and 3 to an update: the last two of an epoch make one as well."""
    batches = make_batches(5)
    loop = make_loop(accumulate=3, steps_per_sync=2)
    histories = [loop.run(batches, epochs=2), loop.run(batches)]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(5)
    losses, _ = plain_loop(model, functional.cross_entropy, optimizer, batches * 3, accumulate=3, per_epoch=5)
    assert torch.equal(torch.cat([history.losses for history in histories]), losses)
    assert torch.equal(loop.model[-1].weight, model[-1].weight)


def test_metrics_of_forward_are_logged_for_every_step() -> None:
    def forward(model: nn.Module, batch: Any) -> Any:
        outputs = model(batch["x"])
        loss = functional.cross_entropy(outputs, batch["y"])
        return loss, {"largest": outputs.detach().max(), "half": loss.detach() / 2}

    batches = [{"x": inputs, "y": targets} for inputs, targets in make_batches(5)]
    history = make_loop(loss_fn=None, forward=forward, steps_per_sync=2).run(batches)
    assert torch.equal(history.metrics["half"], history.losses / 2)
    assert history.metrics["largest"].shape == (5,)
    assert history.samples == 5 * 8
    assert history.samples_per_second == pytest.approx(40 / history.seconds)


@pytest.mark.parametrize("later", [["a"], ["a", "c"], ["a", "b", "c"], []])
def test_metrics_are_those_of_the_first_step(later: list[str]) -> None:
    names = iter([["a", "b"], later])

    def forward(model: nn.Module, batch: Any) -> Any:
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        return loss, {name: loss.detach() for name in next(names)}

    with pytest.raises(ValueError, match=r"returned the metrics .* after \['a', 'b'\]; return the same each step"):
        make_loop(loss_fn=None, forward=forward).run(make_batches(2))


def test_a_longer_sink_makes_the_log_longer() -> None:
    loop = make_loop(steps_per_sync=3)
    losses = [loop.run(make_batches(3)).losses]
    loop.steps_per_sync = -1
    losses.append(loop.run(make_batches(8)).losses)
    model = make_model()
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected, _ = plain_loop(model, functional.cross_entropy, optimizer, make_batches(3) + make_batches(8))
    assert torch.equal(torch.cat(losses), expected)


@pytest.mark.parametrize("loss_of", [lambda weight: weight, lambda weight: weight.view(1), lambda weight: weight * 1])
def test_a_loss_that_the_update_writes_to_is_logged_as_it_was(loss_of: Callable[[Tensor], Tensor]) -> None:
    model = nn.ParameterList([torch.tensor(1.0)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    loop = StepLoop(model, None, optimizer, forward=lambda model, batch: loss_of(model[0]))
    assert loop.run([0, 0, 0]).losses.tolist() == [1.0, 0.75, 0.5]


def test_an_error_of_the_data_comes_after_the_steps_before_it() -> None:
    def broken() -> Any:
        yield from make_batches(5)
        raise OSError("disk on fire")

    seen: list[int] = []
    loop = make_loop(steps_per_sync=4)
    note = LambdaCallback(on_train_step_end=lambda context: seen.append(context.original_args().cur_step_num))
    with pytest.raises(OSError, match="disk on fire"):
        loop.run(broken, callbacks=[note])
    assert seen == [4, 5]
    assert loop.step_count == 5


def test_an_error_of_the_model_leaves_the_executed_count() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = make_model(), 0

        def forward(self, inputs: Any) -> Any:
            self.calls += 1
            if self.calls == 6:
                raise ArithmeticError("in forward")
            return self.inner(inputs)

    model = Fails()
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), steps_per_sync=4)
    with pytest.raises(ArithmeticError, match="in forward"):
        loop.run(make_batches(9))
    assert loop.step_count == 5


def test_a_rate_changed_by_a_callback_holds_from_the_next_sink() -> None:
    loop = make_loop(steps_per_sync=2)

    def halve(context: Any) -> None:
        context.original_args().optimizer.param_groups[0]["lr"] /= 2

    history = loop.run(make_batches(5), callbacks=[LambdaCallback(on_train_step_end=halve)])
    assert history.learning_rates.flatten().tolist() == [0.1, 0.1, 0.05, 0.05, 0.025]


def test_several_groups() -> None:
    model = make_model()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[-1].parameters()}]
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(groups, lr=0.1))
    assert loop.run(make_batches(2)).learning_rates.tolist() == [[0.5, 0.1]] * 2


def test_rates_that_are_tensors() -> None:
    model, plain = make_model(), make_model()
    for ours, net in ((True, model), (False, plain)):
        optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.1))
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        torch.manual_seed(5)
        if ours:
            loop = StepLoop(
                net, functional.cross_entropy, optimizer, scheduler=scheduler, schedule="step", steps_per_sync=2
            )
            with no_host_sync():
                history = loop.run(make_batches(4))
        else:
            _, rates = plain_loop(net, functional.cross_entropy, optimizer, make_batches(4), scheduler=scheduler)
    assert torch.equal(model[-1].weight, plain[-1].weight)
    assert torch.equal(history.learning_rates, rates)


def test_rates_that_are_tensors_are_read_in_one_copy() -> None:
    """On a device each read of a single element would be a wait."""
    seen: list[str] = []

    class Reader(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    model = make_model()
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5)))
    loop.schedule.start([True] * 3)
    for _ in range(3):
        loop.schedule.before_step()
    with Reader():
        assert loop.schedule.rates(3).tolist() == [[0.5]] * 3
    assert "aten::stack" in seen
    assert "aten::_local_scalar_dense" not in seen


def test_evaluation_mode_is_the_callers(caplog: pytest.LogCaptureFixture) -> None:
    loop = make_loop()
    loop.model.eval()
    loop.run(make_batches(1))
    assert not loop.model.training
    assert "eval mode" in caplog.text


def test_close_is_idempotent_and_the_loop_goes_on() -> None:
    with make_loop() as loop:
        loop.run(make_batches(2))
    loop.close()
    assert loop.run(make_batches(2)).steps == 2


def test_summary_collector_writes_every_step(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    evaluated = {"eval_loss": 0.25, "recall": torch.tensor([0.5, 0.75])}
    results = LambdaCallback(on_train_epoch_end=lambda context: context.original_args().update(eval_results=evaluated))
    history = make_loop(steps_per_sync=3).run(make_batches(5), callbacks=[results, SummaryCollector(tmp_path)])
    written = event_accumulator.EventAccumulator(str(tmp_path))
    written.Reload()
    losses = written.Scalars("loss")
    assert [event.step for event in losses] == [1, 2, 3, 4, 5]
    assert [event.value for event in losses] == history.losses.tolist()
    assert [event.value for event in written.Scalars("learning_rate/0")] == pytest.approx([0.1] * 5)
    assert written.Scalars("eval/loss")[0].value == 0.25
    assert [written.Scalars(f"eval/recall/{place}")[0].value for place in (0, 1)] == [0.5, 0.75]


def test_summary_collector_says_how_to_get_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"torch-sink\[summary\]"):
        make_loop().run(make_batches(1), callbacks=[SummaryCollector(tmp_path)])


@pytest.mark.parametrize("kind", [StepLoop, Model])
def test_a_copy_is_refused_with_what_to_do(kind: Any) -> None:
    model = make_model()
    loop = kind(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    for send in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"cannot be pickled or copied.*loop\.save.*loop\.state_dict"):
            send(loop)


@pytest.mark.parametrize("event", ["on_train_begin", "on_train_step_end", "on_train_epoch_end", "on_train_end"])
def test_a_run_inside_of_a_run_raises_and_the_loop_goes_on_afterwards(event: str) -> None:
    batches, model = make_batches(4), make_model()
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), steps_per_sync=2)
    inside = LambdaCallback(**{event: lambda _: loop.run(batches)})
    with pytest.raises(SinkError, match="a run of this StepLoop is under way"):
        loop.run(batches, callbacks=[inside])
    steps = loop.step_count
    judged = LambdaCallback(**{event: lambda _: (loop.evaluate(batches), loop.predict(batches[0][0]))})
    assert loop.run(batches, callbacks=[judged]).steps == 4
    assert loop.step_count == steps + 4
