"""Evaluation beside StepLoop and in the course of its runs, compared with a plain loop that does both."""

from __future__ import annotations

import logging
import math
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from loop.reference import assert_equal_training, make_batches, make_model, plain_loop
from torch_sink.errors import SinkError
from torch_sink.loop import (
    Callback,
    EarlyStopping,
    Evaluation,
    History,
    LossMonitor,
    ReduceLROnPlateau,
    StepLoop,
    no_host_sync,
)
from torch_sink.loop.evaluation import monitored
from torch_sink.sink import SinkLoader

VALID = [*make_batches(3, seed=40), *make_batches(1, seed=41, size=3)]


def make_loop(**options: Any) -> StepLoop:
    model = make_model()
    options.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(5)
    return StepLoop(model, options.pop("loss_fn", functional.cross_entropy), **options)


@torch.no_grad()
def by_hand(model: nn.Module, batches: list[Any] = VALID) -> dict[str, float]:
    was_training = model.training
    model.eval()
    outputs = torch.cat([model(inputs) for inputs, _ in batches])
    targets = torch.cat([targets for _, targets in batches])
    model.train(was_training)
    return {
        "accuracy": (outputs.argmax(1) == targets).double().mean().item(),
        "loss": functional.cross_entropy(outputs, targets).item(),
    }


def test_evaluate_equals_the_numbers_by_hand_with_one_sync() -> None:
    loop = make_loop()
    loop.run(make_batches(3))
    expected = by_hand(loop.model)
    with no_host_sync():
        results = loop.evaluate(VALID, metrics={"accuracy"})
    assert results == pytest.approx(expected, abs=1e-6)
    assert all(type(value) is float for value in results.values())
    assert loop.evaluate(VALID) == {"loss": results["loss"]}
    assert loop.model.training


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        partial(functional.cross_entropy, reduction="sum"),
        partial(nn.CrossEntropyLoss(reduction="sum")),
    ],
)
def test_a_loss_that_is_a_sum_over_samples_is_divided_by_all_samples(loss_fn: Any) -> None:
    loop = make_loop(loss_fn=loss_fn)
    total, samples = sum(loss_fn(loop.model.eval()(x), y).item() for x, y in VALID), sum(len(x) for x, _ in VALID)
    assert loop.evaluate(VALID)["loss"] == pytest.approx(total / samples)
    by_own = loop.evaluate(VALID, forward=lambda model, batch: (model(batch[0]).mean(), None, batch[1]))
    assert by_own["loss"] == pytest.approx(sum(loop.model(x).mean().item() * len(x) for x, _ in VALID) / samples)


@pytest.mark.parametrize("used_up", [False, True])
def test_an_evaluation_of_no_batch_says_so(used_up: bool, caplog: pytest.LogCaptureFixture) -> None:
    batches: Any = (batch for batch in VALID) if used_up else []
    assert len([*batches]) == (len(VALID) if used_up else 0)
    with caplog.at_level(logging.WARNING, "torch_sink"):
        results = make_loop().evaluate(batches, metrics={"accuracy", "top5", "miou"})
    assert results.keys() == {"accuracy", "top5", "miou", "loss"}
    assert all(map(math.isnan, results.values()))
    assert ["traversed once only" in caplog.text, "gave no batch to evaluate" in caplog.text] == [used_up, not used_up]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("loader", [[], iter([])])
def test_a_training_needs_batches(loader: Any) -> None:
    with pytest.raises(ValueError, match="gave no batch in pass 0"):
        make_loop().run(loader)
    with pytest.raises(ValueError, match=r"gave no batch|traversed only once"):
        make_loop().compile_ahead(loader)


def test_a_sink_loader_is_left_where_it_was() -> None:
    loop, batches = make_loop(), make_batches(5)
    loader = SinkLoader(batches, batches_per_epoch=2)
    first = [inputs for inputs, _ in loader]
    assert loop.evaluate(loader)["loss"] == pytest.approx(by_hand(loop.model, batches)["loss"])
    seen = [*first, *(inputs for inputs, _ in loader)]
    assert all(torch.equal(ours, inputs) for ours, (inputs, _) in zip(seen, batches, strict=False))
    assert len(loader) == 2


def test_what_the_loops_own_forward_returns_is_averaged_over_samples() -> None:
    def forward(model: nn.Module, batch: Any) -> Any:
        outputs = model(batch["x"])
        return functional.cross_entropy(outputs, batch["y"]), {"largest": outputs.max(1).values.mean()}

    batches = [{"x": inputs, "y": targets} for inputs, targets in VALID]
    loop = make_loop(loss_fn=None, forward=forward)
    results = loop.evaluate(batches)
    with torch.no_grad():
        outputs = loop.model.eval()(torch.cat([inputs for inputs, _ in VALID]))
    assert results["loss"] == pytest.approx(by_hand(loop.model)["loss"], abs=1e-6)
    assert results["largest"] == pytest.approx(outputs.max(1).values.mean().item(), abs=1e-6)
    with pytest.raises(ValueError, match="metrics accuracy need outputs and labels"):
        loop.evaluate(batches, metrics={"accuracy"})

    def judge(model: nn.Module, batch: Any) -> Any:
        return None, model(batch["x"]), batch["y"]

    assert loop.evaluate(batches, metrics={"accuracy"}, forward=judge)["accuracy"] == by_hand(loop.model)["accuracy"]


def test_a_loss_in_low_precision_is_averaged_in_float32() -> None:
    """The loss of the loop's own forward is cast as in training: three times this one is no bfloat16."""
    loop = make_loop(
        loss_fn=None, amp="O1", forward=lambda net, batch: (0 * net(batch[0]).sum() + 1.0078125).bfloat16()
    )
    assert loop.evaluate(make_batches(1, size=3)) == {"loss": 1.0078125}


def test_a_forward_is_checked_in_evaluations_too() -> None:
    loop = make_loop(loss_fn=None, forward=lambda net, batch: (net(batch[0]).sum(), 3))
    with pytest.raises(TypeError, match=r"forward returned \(loss, int\); return loss, or \(loss, dict\)"):
        loop.evaluate(make_batches(1))


@pytest.mark.parametrize("amp", ["O0", "O2"])
def test_the_averaged_weights_are_evaluated(amp: str) -> None:
    loop = make_loop(ema=0.5, amp=amp)
    loop.run(make_batches(4))
    average = loop.ema_model()
    results = loop.evaluate(VALID, metrics={"accuracy"}, ema=True)
    assert results["loss"] == pytest.approx(by_hand(average)["loss"], rel=0.02 if amp == "O2" else 1e-6)
    assert results["loss"] != loop.evaluate(VALID)["loss"]
    assert loop.ema_model() is average
    assert all(parameter.dtype == torch.float32 for parameter in average.parameters())
    with pytest.raises(SinkError, match="keeps no average"):
        make_loop().evaluate(VALID, ema=True)


def plain_with_evaluations(every: int, epochs: int = 2) -> tuple[Any, ...]:
    """The plain loop that stops after every so many steps to evaluate."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    results, losses = [], []
    for step, batch in enumerate(make_batches(7) * epochs, 1):
        losses.append(plain_loop(model, functional.cross_entropy, optimizer, [batch])[0])
        if step % every == 0:
            results.append((step, monitored(by_hand(model))))
    return model, optimizer, torch.cat(losses), results


@pytest.mark.parametrize("steps_per_sync", [1, 2, 3, 7, 100, -1])
@pytest.mark.parametrize("every", [3, 7])
@pytest.mark.sampled(6)
def test_evaluations_every_so_many_steps_equal_those_of_a_plain_loop(steps_per_sync: int, every: int) -> None:
    loop = make_loop(steps_per_sync=steps_per_sync)
    history = loop.run(make_batches(7), epochs=2, callbacks=[Evaluation(VALID, {"accuracy"}, every_steps=every)])
    model, optimizer, losses, results = plain_with_evaluations(every)
    assert torch.equal(history.losses, losses)
    assert_equal_training((loop.model, loop.optimizer), (model, optimizer))
    assert [step for step, _ in history.evaluations] == [step for step, _ in results]
    for (_, ours), (_, expected) in zip(history.evaluations, results, strict=True):
        assert ours == pytest.approx(expected, abs=1e-6)


def test_training_goes_on_as_if_the_evaluation_had_not_been_there() -> None:
    """A validation set that nobody seeded, with random transforms."""

    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return torch.randn(3, 8, 8) * random.random() * np.random.rand(), index % 5

    def train(callbacks: list[Callback]) -> Any:
        loop = make_loop()  # dropout draws
        torch.manual_seed(6)
        return loop.run(make_batches(3), epochs=2, callbacks=callbacks).losses

    loader = DataLoader(Noisy(), 2, shuffle=True)
    draws = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(train([Evaluation(loader, every_steps=2)]), train([]))
    assert np.random.get_state()[1].tolist() == draws[1]
    assert random.getstate() == draws[2]


def test_results_of_two_evaluations_of_one_step_are_seen_together() -> None:
    """By a monitor of the first one, too."""
    monitors = [EarlyStopping(name, patience=1, mode="max") for name in ("accuracy", "top5")]
    for monitor in monitors:
        history = make_loop().run(
            make_batches(2),
            epochs=9,
            callbacks=[Evaluation(VALID, {"accuracy"}), Evaluation(VALID, {"top5"}), monitor],
        )
        assert history.stopped_by == "request_stop"
        assert [sorted(results) for _, results in history.evaluations[:2]] == [
            ["accuracy", "eval_loss"],
            ["eval_loss", "top5"],
        ]


def test_every_epoch_and_both() -> None:
    for options, steps in (
        ({}, [3, 6, 9, 12]),
        ({"every_epochs": 2}, [6, 12]),
        ({"every_epochs": [1, 4]}, [3, 12]),
        ({"every_epochs": 2, "every_steps": 4}, [4, 6, 8, 12]),
    ):
        history = make_loop().run(make_batches(3), epochs=4, callbacks=[Evaluation(VALID, **options)])
        assert [step for step, _ in history.evaluations] == steps
        assert history.host_syncs == len({*steps, 3, 6, 9, 12}) + len(steps)


def test_callbacks_see_the_results_wherever_they_stand(capsys: pytest.CaptureFixture[str]) -> None:
    class Events(Callback):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_eval_begin(self, run_context: Any) -> None:
            self.seen.append("evaluation")

        def on_train_step_end(self, run_context: Any) -> None:
            self.seen.append(f"step {run_context.original_args().eval_results.get('eval_loss') is not None}")

    class Old(Callback):
        def step_end(self, run_context: Any) -> None:
            assert run_context.original_args().mode == "train"

    history, events = History(), Events()
    callbacks = [
        EarlyStopping("eval_loss", min_delta=10, patience=1),
        ReduceLROnPlateau("eval_loss", threshold=10, threshold_mode="abs", patience=0, factor=0.5),
        LossMonitor(0),
        events,
        Old(),
        history,
        Evaluation(VALID, every_steps=2),
    ]
    loop = make_loop()
    run = loop.run(make_batches(4), epochs=5, callbacks=callbacks)
    assert run.stopped_by == "request_stop"
    assert (run.steps, loop.optimizer.param_groups[0]["lr"]) == (8, 0.05), "the second epoch is no better by 10"
    assert events.seen == ["evaluation", "step True"] * 4
    assert [round(value, 9) for value in history.epoch["eval_loss"]] == [
        round(results["eval_loss"], 9) for step, results in run.evaluations if step % 4 == 0
    ]
    lines = [line.split(", metrics")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [f"Eval result: epoch {epoch} step {step}" for epoch in (1, 2) for step in (2, 4)]


def test_results_of_an_epoch_before_are_not_taken_for_new() -> None:
    """Epochs of one step, evaluated after the fourth and the eighth."""
    history = History()
    make_loop().run(make_batches(1), epochs=9, callbacks=[Evaluation(VALID, every_steps=4), history])
    assert len(history.epoch["eval_loss"]) == 2


def test_the_loader_in_training_cannot_be_evaluated_inside_its_epoch() -> None:
    loader = SinkLoader(make_batches(4))
    with pytest.raises(SinkError, match=r"serve one iterator at a time.*make one SinkLoader for each"):
        make_loop().run(loader, callbacks=[Evaluation(loader, every_steps=2)])
    loader = SinkLoader(make_batches(4))
    assert len(make_loop().run(loader, epochs=2, callbacks=[Evaluation(loader)]).evaluations) == 2


def test_evaluation_arguments() -> None:
    for options, error, message in (
        ({"every_steps": 0}, ValueError, "every_steps=0"),
        ({"every_epochs": 1.5}, TypeError, "every_epochs=1.5"),
        ({"every_epochs": [2, 0]}, ValueError, "every_epochs=0"),
        ({"ema": 1}, TypeError, "ema=1"),
    ):
        with pytest.raises(error, match=message):
            Evaluation(VALID, **options)
    loop = make_loop()
    with pytest.raises(ValueError, match="unknown metric 'speed'"):
        loop.evaluate(VALID, metrics={"speed"})
    loop.evaluate(VALID)
    with pytest.raises(TypeError, match="metrics is a str; pass a set of names"):
        loop.evaluate(VALID, metrics="accuracy")  # what is kept of the evaluation before does not pass for it
    with pytest.raises(TypeError, match=r"the batch is a Tensor; an evaluation takes \(x, y\)"):
        loop.evaluate([torch.zeros(3)])
    with pytest.raises(TypeError, match="gave a Tensor; return"):
        loop.evaluate(VALID, forward=lambda model, batch: torch.zeros(()))
    with pytest.raises(TypeError, match="this is a Dataset"):
        loop.evaluate(TensorDataset(torch.zeros(3)))


class Kept:
    """A metric that keeps every output and label, as those of torchmetrics with lists as state do."""

    def reset(self) -> None:
        self.outputs: list[Tensor] = []
        self.labels: list[Tensor] = []

    def update(self, output: Tensor, labels: Tensor) -> None:
        self.outputs.append(output)
        self.labels.append(labels)

    def compute(self) -> Tensor:
        return (torch.cat(self.outputs).argmax(1) == torch.cat(self.labels)).double().mean()


def test_metric_objects_and_workers() -> None:
    loop = make_loop()
    data = TensorDataset(*(torch.cat(column) for column in zip(*VALID, strict=True)))
    for workers in (0, 1):
        with SinkLoader(DataLoader(data, 5, num_workers=workers)) as loader:
            for _ in range(2):
                assert loop.evaluate(loader, metrics={"kept": Kept()})["kept"] == by_hand(loop.model)["accuracy"]


def test_compiled_code_is_kept_between_evaluations_and_metrics() -> None:
    loop = make_loop()
    evaluator = loop.evaluator()
    for metrics in ({"accuracy"}, {"accuracy"}, {"top5"}, None, {"kept": Kept()}):
        loop.evaluate(VALID, metrics=metrics)
    assert len(evaluator._judges) == 1
    for _ in range(20):
        loop.evaluate(VALID, forward=lambda model, batch: (None, model(batch[0]), batch[1]))
    assert len(evaluator._judges) == 8
    loop.close()
    assert loop.evaluate(VALID)["loss"] > 0, "a closed loop begins anew"


@dataclass
class Judging:
    """A forward that compares by its values, and so has no hash."""

    scale: float

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        outputs = model(batch[0]) * self.scale
        return functional.cross_entropy(outputs, batch[1]), outputs, batch[1]


def test_a_forward_needs_no_hash() -> None:
    loop = make_loop()
    same = loop.evaluate(VALID, forward=Judging(1.0))
    assert same == loop.evaluate(VALID)
    assert loop.evaluate(VALID, forward=Judging(2.0)) != same


def test_an_evaluation_that_is_refused_leaves_nothing_in_the_report() -> None:
    model = make_model()
    loop = StepLoop(model, None, torch.optim.SGD(model.parameters(), lr=0.1), forward=lambda net, batch: net(batch[0]))
    before = loop.explain()
    with pytest.raises(ValueError, match="need outputs and labels"):
        loop.evaluate(VALID, metrics={"accuracy"})
    assert loop.explain() == before


@pytest.mark.parametrize("evaluate", [StepLoop.evaluate, lambda loop, batches: loop.run(batches)])
def test_batches_of_three_are_refused_as_in_training(evaluate: Any) -> None:
    """Not inside the loss function, which takes two arguments, or takes the third for something else."""
    model = make_model()
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [(*batch, torch.ones(5)) for batch in make_batches(2)]  # the third would be class weights
    with pytest.raises(TypeError, match=r"the batch is a tuple of 3; .*\(x, y\).* forward="):
        evaluate(loop, batches)
    judge = lambda model, batch: (None, model(batch[0]), batch[1])  # noqa: E731
    assert loop.evaluate(batches, metrics={"accuracy"}, forward=judge)["accuracy"] >= 0


class Merging(nn.Linear):
    """A LoRA layer as loralib's: in evaluation mode the product of the two factors is a part of the weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight.requires_grad = False
        self.first, self.second = nn.Parameter(torch.randn(2, inputs) * 0.1), nn.Parameter(torch.zeros(outputs, 2))
        self.is_merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.is_merged:
            self.weight.data += (self.second @ self.first) * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = functional.linear(inputs, self.weight, self.bias)
        return outputs if self.is_merged else outputs + inputs @ self.first.T @ self.second.T


class NormsStayFrozen(nn.Sequential):
    """Keeps its statistics as they are in training mode too, as detection models do."""

    def train(self, mode: bool = True) -> NormsStayFrozen:
        super().train(mode)
        self[0].eval()
        return self


def make_merging() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    frozen, free = (nn.Sequential(nn.BatchNorm1d(8), Merging(8, 8)) for _ in range(2))
    model = nn.Sequential(Merging(4, 8), NormsStayFrozen(nn.BatchNorm1d(8)), frozen, free, Merging(8, 3))
    model.train()
    frozen.eval()  # by the program
    return model, torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.5)


@pytest.mark.parametrize("judges", ["evaluate", "predict"])
def test_training_mode_comes_back_as_by_train(judges: str) -> None:
    """Modules override train() to change more than a flag; the program may have frozen others."""
    data = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(4)]

    def plain() -> tuple[list[float], nn.Module]:
        model, optimizer = make_merging()
        losses = []
        for _ in range(3):
            losses += plain_loop(model, functional.cross_entropy, optimizer, data)[0].tolist()
            model.eval()
            with torch.no_grad():
                model(data[0][0])
            model.train()
            model[2].eval()
        return losses, model

    expected, plain_model = plain()
    model, optimizer = make_merging()
    flags = [module.training for module in model.modules()]
    loop, losses = StepLoop(model, functional.cross_entropy, optimizer), []
    for _ in range(3):
        losses += loop.run(data).losses.tolist()
        loop.evaluate(data) if judges == "evaluate" else loop.predict(data[0][0])
        assert [module.training for module in model.modules()] == flags
    assert losses == expected
    assert all(map(torch.equal, model.state_dict().values(), plain_model.state_dict().values()))


def test_a_module_that_was_merged_stays_merged() -> None:
    model, _ = make_merging()
    model.eval()
    weight = model[0].weight.clone()
    StepLoop(model, functional.cross_entropy).evaluate([(torch.randn(8, 4), torch.randint(0, 3, (8,)))])
    assert all(module.is_merged and not module.training for module in model.modules() if isinstance(module, Merging))
    assert torch.equal(model[0].weight, weight)


def test_a_module_with_two_parents_gets_its_own_mode_back() -> None:
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared, nn.Dropout()))
    model.train()
    model[1].eval()
    model[0].train()  # and so the module that both hold
    modes = [module.training for module in model.modules()]
    StepLoop(model, None).predict(torch.randn(4, 3))
    assert [module.training for module in model.modules()] == modes


def test_evaluations_in_a_run_leave_merging_modules_as_they_were() -> None:
    data = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(4)]
    model, optimizer = make_merging()
    StepLoop(model, functional.cross_entropy, optimizer).run(data, epochs=2, callbacks=[Evaluation(data)])
    assert [module.is_merged for module in model.modules() if isinstance(module, Merging)] == [
        False,
        True,
        False,
        False,
    ]
