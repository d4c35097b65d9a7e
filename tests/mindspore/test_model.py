"""The MindSpore-style face: Model and data_sink."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from loop.reference import assert_equal_training, make_batches, make_model, plain_loop
from loop.test_callbacks import Recorder
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from torch_sink.loop import (
    Callback,
    Evaluation,
    JitConfig,
    LambdaCallback,
    LossMonitor,
    StepLoop,
    TimeMonitor,
    jit,
    no_host_sync,
)
from torch_sink.mindspore import Model
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved


def make(metrics: Any = None, **options: Any) -> Model:
    network = make_model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    torch.manual_seed(5)
    return Model(network, functional.cross_entropy, optimizer, metrics, **options)


def test_train_equals_the_plain_loop_across_epochs_of_any_length() -> None:
    """7 batches, 3 epochs of 5 steps: the traversal continues from epoch to epoch."""
    batches = make_batches(7)
    model = make()
    recorder = Recorder()
    history = model.train(4, batches, recorder, sink_size=5, initial_epoch=1)
    assert history.steps == 15
    network = make_model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    torch.manual_seed(5)
    losses, _ = plain_loop(network, functional.cross_entropy, optimizer, (batches * 3)[:15])
    assert torch.equal(history.losses, losses)
    assert_equal_training((model.train_network, model.loop.optimizer), (network, optimizer))
    assert recorder.events == [
        ("train_begin", 0),
        *[
            event
            for step in (0, 5, 10)
            for event in (
                ("train_epoch_begin", step),
                ("train_step_begin", step + 5),
                ("train_step_end", step + 5),
                ("train_epoch_end", step + 5),
            )
        ],
        ("train_end", 15),
    ]


class Lengths(Callback):
    """Notes the step count at each epoch's end."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_epoch_end(self, run_context: Any) -> None:
        self.seen.append(run_context.original_args().loop.step_count)


class Settings(Lengths):
    """Notes as well what the loader and the loop say of themselves while a run goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: set[tuple[int, int | None, int]] = set()

    def on_train_step_end(self, run_context: Any) -> None:
        about = run_context.original_args()
        loader = about.train_dataset
        self.lengths.add((len(loader), loader.batches_per_epoch, about.loop.steps_per_sync))


def test_train_and_eval_write_into_no_loader_and_no_loop() -> None:
    loader, noted, model = SinkLoader(make_batches(7), batches_per_epoch=2), Settings(), make(metrics={"accuracy"})
    steps_per_sync = model.loop.steps_per_sync
    model.train(2, loader, noted, sink_size=3)
    model.train(2, loader, noted)
    assert noted.seen == [3, 6, 13, 20], "-1 is the whole dataset"
    model.train(1, loader, noted, dataset_sink_mode=False)
    model.fit(1, loader, loader, callbacks=noted)
    assert noted.lengths == {(2, 2, steps_per_sync)}
    assert len([*loader]) == loader.batches_per_epoch == 2
    with pytest.raises(ValueError, match="batches_per_epoch=0"):
        loader.batches_per_epoch = 0


class Noting(nn.Module):
    """A linear layer that notes which samples it is given, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2)
        self.seen: dict[bool, list[int]] = {True: [], False: []}

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen[self.training] += inputs.flatten().int().tolist()
        return self.linear(inputs / 10)


@pytest.mark.parametrize(
    ("workers", "sink_mode", "sizes"), [(0, True, (3, 10, 12, 1)), (0, False, (3, 10, 12, 1)), (1, True, (3,))]
)
def test_sink_size_minus_one_is_the_whole_dataset_after_any_other(
    workers: int, sink_mode: bool, sizes: tuple[int, ...]
) -> None:
    data = TensorDataset(torch.arange(10.0)[:, None], torch.zeros(10, dtype=torch.long))
    network = Noting()
    model = Model(network, functional.cross_entropy, torch.optim.SGD(network.parameters(), lr=0.1), {"accuracy"})
    with SinkLoader(DataLoader(data, num_workers=workers), batches_per_epoch=4) as loader:
        for size in sizes:
            model.train(2, loader, sink_size=size)
            network.seen = {True: [], False: []}
            model.eval(loader)
            assert network.seen[False] == list(range(10))
            assert loader.batches_per_epoch == 4
            assert model.train(2, loader, dataset_sink_mode=sink_mode).steps == 20
            assert network.seen[True] == [*range(10), *range(10)]


def test_an_evaluation_leaves_the_traversal_where_it_was() -> None:
    """Trained on and evaluated in turn: 7 batches, epochs of 3, evaluated on all 7 after each."""
    batches = [(torch.full((1, 1), float(number)), torch.zeros(1, dtype=torch.long)) for number in range(7)]
    network = Noting()
    model = Model(network, functional.cross_entropy, torch.optim.SGD(network.parameters(), lr=0.1), {"accuracy"})
    loader = SinkLoader(batches)
    model.fit(4, loader, loader, sink_size=3)
    assert network.seen[True] == [number % 7 for number in range(12)]
    assert network.seen[False] == [*range(7)] * 4


def test_sink_mode_off_returns_after_every_step() -> None:
    recorder = Recorder()
    history = make().train(1, make_batches(3), recorder, dataset_sink_mode=False, sink_size=99)
    assert [event for event in recorder.events if "step" in event[0]] == [
        (name, step) for step in (1, 2, 3) for name in ("train_step_begin", "train_step_end")
    ]
    assert history.host_syncs == 3


def test_epoch_numbers_start_after_initial_epoch() -> None:
    seen = []

    class Note(Callback):
        def on_train_epoch_end(self, run_context: Any) -> None:
            arguments = run_context.original_args()
            seen.append((arguments.cur_epoch_num, arguments.epoch_num, arguments.batch_num))

    make().train(5, make_batches(2), Note(), initial_epoch=3)
    assert seen == [(4, 2, 2), (5, 2, 2)]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epoch": -1}, ValueError, "epoch=-1"),
        ({"epoch": 1.0}, TypeError, "epoch=1.0"),
        ({"epoch": 0}, ValueError, "epoch=0"),
        ({"epoch": 2, "initial_epoch": 2}, ValueError, "initial_epoch=2 is not below epoch=2"),
        ({"epoch": 2, "sink_size": 0}, ValueError, "sink_size=0"),
        ({"epoch": 2, "sink_size": -2}, ValueError, "sink_size=-2"),
        ({"epoch": 2, "sink_size": "3"}, TypeError, "sink_size='3'"),
        ({"epoch": 2, "dataset_sink_mode": 1}, TypeError, "dataset_sink_mode=1"),
        ({"epoch": 2, "callbacks": [3]}, TypeError, "callbacks holds a int"),
        ({"epoch": 2, "callbacks": 3}, TypeError, "callbacks is a int"),
        ({"epoch": 2, "train_dataset": []}, ValueError, "no batch"),
        ({"epoch": 2, "train_dataset": [torch.zeros(8)]}, TypeError, "yields a Tensor.*two columns"),
        ({"epoch": 2, "train_dataset": [(*make_batches(1)[0], 3)]}, TypeError, "yields a tuple of 3.*two columns"),
    ],
)
def test_train_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make().train(**{"train_dataset": make_batches(2), **options})


def test_model_arguments() -> None:
    with pytest.raises(TypeError, match="network is a int"):
        Model(3)
    with pytest.raises(ValueError, match="amp_level='O2' needs an optimizer"):
        Model(make_model(), amp_level="O2")
    with pytest.raises(ValueError, match="no optimizer"):
        Model(make_model(), functional.cross_entropy).train(
            1, loader := SinkLoader(make_batches(4), batches_per_epoch=2)
        )
    assert loader.batches_per_epoch == 2, "what was refused changes nothing"
    with pytest.raises(ValueError, match="eval needs metrics"):
        make().eval(make_batches(1))
    with pytest.raises(ValueError, match="needs metrics"):
        make().fit(1, make_batches(1), make_batches(1))
    with pytest.raises(TypeError, match="valid_dataset_sink_mode=None"):
        make({"loss"}).fit(1, make_batches(1), make_batches(1), valid_dataset_sink_mode=None)
    with pytest.raises(ValueError, match="unknown metric 'speed'"):
        make({"speed"})
    with pytest.raises(TypeError, match=r"metric 'mine' \(object\) has no reset, update, compute"):
        make({"mine": object()})


class WithLoss(nn.Module):
    """Takes its two columns in the order or by the names that the dataset gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.inner(inputs), targets)


@pytest.mark.parametrize("form", ["tuple", "list", "dict", "named tuple"])
def test_a_network_without_loss_function_gets_what_the_dataset_names(form: str) -> None:
    columns = namedtuple("columns", "inputs targets")
    make_batch = {"tuple": tuple, "list": list, "named tuple": columns._make}.get(form, columns._make)
    batches = [make_batch(batch) for batch in make_batches(3)]
    if form == "dict":
        batches = [batch._asdict() for batch in batches]
    losses = []
    for one in (batches, make_batches(3)):
        network = WithLoss()
        torch.manual_seed(5)
        losses.append(Model(network, None, torch.optim.SGD(network.parameters(), lr=0.1)).train(1, one).losses)
    assert torch.equal(*losses)


def test_a_network_without_loss_function_gets_a_tensor_whole() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, values: Tensor) -> Tensor:
            assert values.shape == (2, 3)
            return (self.weight * values).square().mean()

    network = Norm()
    history = Model(network, None, torch.optim.SGD(network.parameters(), lr=0.1)).train(2, [torch.ones(2, 3)] * 2)
    assert history.losses[0] == 1
    assert history.losses[3] < history.losses[0]


def evaluate_by_hand(network: nn.Module, batches: list[Any]) -> dict[str, float]:
    network.eval()
    outputs = torch.cat([network(inputs) for inputs, _ in batches])
    targets = torch.cat([targets for _, targets in batches])
    network.train()
    ranks = outputs.argsort(dim=1, descending=True)
    return {
        "accuracy": (ranks[:, 0] == targets).double().mean().item(),
        "top5": (ranks[:, :5] == targets[:, None]).any(1).double().mean().item(),
        "loss": functional.cross_entropy(outputs, targets).item(),
    }


@torch.no_grad()
def test_eval_equals_the_metrics_by_hand() -> None:
    model = make({"accuracy", "top5"})
    batches = [*make_batches(3), *make_batches(1, size=3)]
    with no_host_sync():
        results = model.eval(batches)
    expected = evaluate_by_hand(model.train_network, batches)
    assert results == pytest.approx(expected, abs=1e-6)
    assert all(isinstance(value, float) for value in results.values())
    assert model.train_network.training, "the mode is put back"
    assert model.eval(batches) == results, "nothing is left from the pass before"


def test_eval_events() -> None:
    for sink_mode, steps in ((True, [3]), (False, [1, 2, 3])):
        recorder = Recorder()
        make({"accuracy"}).eval(make_batches(3), recorder, dataset_sink_mode=sink_mode)
        assert recorder.events == [
            ("eval_begin", 0),
            ("eval_epoch_begin", 0),
            *[(name, step) for step in steps for name in ("eval_step_begin", "eval_step_end")],
            ("eval_epoch_end", 3),
            ("eval_end", 3),
        ]


def test_metrics_of_ones_own_and_eval_network() -> None:
    class Largest:
        def reset(self) -> None:
            self.value = torch.tensor(-1.0)

        def update(self, output: Tensor, *labels: Tensor) -> None:
            self.value = torch.maximum(self.value, output.max())

        def compute(self) -> Tensor:
            return self.value

    class EvalNetwork(nn.Module):
        def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return torch.tensor(2.5), inputs.flatten(1), targets

    batches = make_batches(2)
    results = make({"largest": Largest()}, eval_network=EvalNetwork()).eval(batches)
    assert results == {"largest": max(inputs.max().item() for inputs, _ in batches), "loss": 2.5}


def test_without_loss_fn_metrics_that_cannot_be_computed_are_refused() -> None:
    """A network that returns its loss gives no scores; and a loss that nobody computes is not NaN."""

    class Losing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
            return (self.weight * inputs).mean()

    batches = make_batches(2)
    with pytest.raises(ValueError, match="metric 'loss' needs a loss, and there is no loss_fn"):
        Model(make_model(), metrics={"loss", "accuracy"}).eval(batches)
    model = Model(losing := Losing(), None, torch.optim.SGD(losing.parameters(), lr=0.1), {"loss"})
    with pytest.raises(ValueError, match="metric 'loss' needs a loss, and there is no loss_fn"):
        model.fit(1, batches, batches)
    assert model.loop.step_count == 0, "refused before the first step"
    with pytest.raises(ValueError, match=r"the output is \[\]; .*eval_network"):
        Model(Losing(), metrics={"accuracy"}).eval(batches)
    assert set(Model(make_model(), metrics={"accuracy"}).eval(batches)) == {"accuracy"}


def test_the_loop_underneath_evaluates_by_the_loss_that_the_network_returns() -> None:
    network = WithLoss()
    batches = make_batches(3)
    expected = evaluate_by_hand(network.inner, batches)["loss"]
    model = Model(network, None, torch.optim.SGD(network.parameters(), lr=0.1))
    assert model.loop.evaluate(batches) == {"loss": pytest.approx(expected, abs=1e-6)}


@pytest.mark.parametrize(("frequency", "evaluated"), [(1, [1, 2, 3, 4]), (2, [2, 4]), ([1, 4], [1, 4])])
def test_fit_evaluates_at_the_frequency(
    frequency: Any, evaluated: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    class Note(Callback):
        def on_train_epoch_end(self, run_context: Any) -> None:
            arguments = run_context.original_args()
            if arguments.eval_results:
                seen.append(arguments.cur_epoch_num)
                assert set(arguments.eval_results) == {"accuracy", "eval_loss"}

    model = make({"accuracy"})
    model.fit(4, make_batches(2), make_batches(2), frequency, [Note(), LossMonitor(), TimeMonitor()])
    assert seen == evaluated
    printed = capsys.readouterr().out
    assert printed.count("Eval result: epoch") == len(evaluated)


def test_fit_sends_eval_events_to_custom_callbacks_and_refuses_the_old_names() -> None:
    class Custom(Recorder):
        pass

    recorder, seen = Custom(), []
    note = LambdaCallback(on_eval_end=lambda context: seen.append(context.original_args().batch_num))
    make({"accuracy"}).fit(1, make_batches(2), make_batches(3), callbacks=[recorder, note])
    assert seen == [3]
    names = [name for name, _ in recorder.events]
    assert names.index("eval_begin") < names.index("train_epoch_end")
    assert names.count("eval_end") == 1

    class Old(Callback):
        def epoch_end(self, run_context: Any) -> None: ...

    seen = []
    note = LambdaCallback(on_train_begin=lambda context: seen.append(context.original_args().list_callback))
    make({"accuracy"}).fit(1, make_batches(2), callbacks=[old := Old(), note])
    assert seen == [[old, note]]
    with pytest.raises(ValueError, match=r"Old overrides epoch_end.*on_train_epoch_end"):
        make({"accuracy"}).fit(1, make_batches(2), make_batches(2), callbacks=[Old()])


def test_fit_does_not_change_training() -> None:
    trained = []
    for valid in (None, make_batches(2)):
        model = make({"accuracy"})
        model.fit(2, make_batches(3), valid)
        trained.append(model)
    first, second = ((model.train_network, model.loop.optimizer) for model in trained)
    assert_equal_training(first, second)


@torch.no_grad()
def test_predict() -> None:
    model = make()
    inputs = make_batches(1)[0][0]
    outputs = model.predict(inputs)
    assert torch.equal(outputs, model.train_network.eval()(inputs))
    assert not outputs.requires_grad
    low = make(amp_level="O2").predict(inputs)
    assert low.dtype == torch.float32
    assert not torch.equal(low, outputs)


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": True, "schedule": "step", "clip_grad_norm": 0.5},
        {"scheduler": True, "schedule": "epoch", "accumulate": 2},
        {"ema": 0.5, "mode": "eager"},
        {"amp": "O2", "amp_dtype": torch.float16},
        {"amp": "O1", "amp_dtype": torch.float16, "loss_scaler": None},
    ],
)
def test_model_takes_what_a_step_loop_takes(options: dict[str, Any]) -> None:
    """The same losses and weights, bit for bit, from the same options."""
    trained = []
    for as_model in (True, False):
        network = make_model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        chosen = dict(options)
        if chosen.pop("scheduler", False):
            chosen["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        torch.manual_seed(5)
        if as_model:
            chosen = {("amp_level" if name == "amp" else name): value for name, value in chosen.items()}
            model = Model(network, functional.cross_entropy, optimizer, **chosen)
            loop, history = model.loop, model.train(2, make_batches(5))
        else:
            loop = StepLoop(network, functional.cross_entropy, optimizer, steps_per_sync=-1, **chosen)
            history = loop.run(make_batches(5), epochs=2)
        trained.append((network, optimizer, history, loop))
    (ours, optimizer, history, loop), (expected, reference, plain, other) = trained
    assert_equal_training((ours, optimizer), (expected, reference))
    assert torch.equal(history.losses, plain.losses)
    assert torch.equal(history.learning_rates, plain.learning_rates)
    assert loop.explain() == other.explain()
    if "ema" in options:
        assert all(map(torch.equal, loop.ema_model().parameters(), other.ema_model().parameters()))
    with pytest.raises(ValueError, match="mode='fast'"):
        make(mode="fast")


def test_a_resumed_model_goes_on_in_the_middle_of_its_data(tmp_path: Path) -> None:
    """The position was that of the wrapper which `train` makes: it was lost."""
    batches, losses = make_batches(7), []
    for resumes in (False, True):
        model = make()
        if resumes:
            stop = LambdaCallback(on_train_step_end=lambda context: context.request_stop())
            first = model.train(2, batches, [stop], sink_size=5).losses
            model.loop.save(tmp_path, batches)
            model = make()
            model.loop.resume(tmp_path, batches)
            losses.append(torch.cat([first, model.train(3, batches, sink_size=5).losses]))
        else:
            losses.append(model.train(3, batches, sink_size=5).losses)
    assert torch.equal(*losses)


class Draws(TensorDataset):
    """Samples with noise, as augmentation makes them."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.randn_like(inputs), targets


@pytest.mark.parametrize("kind", ["list", "unseeded", "seeded", "workers", "sink", "sink in use"])
def test_build_leaves_nothing_behind(kind: str) -> None:
    """Weights, statistics, gradients, random draws and the order of the data are those of a model that was not built."""
    results = []
    for builds in (False, True):
        torch.manual_seed(11)
        data = Draws(torch.randn(12, 3, 8, 8), torch.arange(12) % 5)
        seeded = torch.Generator().manual_seed(3) if kind != "unseeded" else None
        train: Any = DataLoader(data, 2, True, generator=seeded, num_workers=kind == "workers")
        valid: Any = DataLoader(data, 5)
        model = make({"accuracy"}, ema=0.9)
        if kind.startswith("sink"):
            train, valid = SinkLoader(train), SinkLoader(valid)
        if kind == "sink in use":
            next(iter(train))
        if kind == "list":
            train, valid = make_batches(4), make_batches(2, size=3)
        before = torch.get_rng_state()
        if builds:
            model.build(train, valid)
            assert torch.equal(torch.get_rng_state(), before)
            assert all(parameter.grad is None for parameter in model.train_network.parameters())
            assert model.loop.step_count == 0
        torch.manual_seed(12)
        history = model.fit(2, train, valid)
        results.append((model.train_network, model.loop.optimizer, history))
    (first, optimizer, plain), (second, other, built) = results
    assert_equal_training((first, optimizer), (second, other))
    assert torch.equal(plain.losses, built.losses)
    assert plain.evaluations == built.evaluations


def test_build_arguments() -> None:
    with pytest.raises(ValueError, match="build with a valid_dataset needs metrics"):
        make().build(valid_dataset=make_batches(1))
    with pytest.raises(ValueError, match="no optimizer"):
        Model(make_model()).build(make_batches(1))
    with pytest.raises(ValueError, match="a generator object can be traversed only once"):
        make().build(batch for batch in make_batches(2))
    make({"loss"}).build()


def test_jit_level_o0_leaves_the_function_alone() -> None:
    def function(x: int) -> int:
        return x + 1

    assert jit(function, jit_level="O0") is function
    assert jit(jit_level="O0")(function) is function
    with pytest.raises(ValueError, match="jit_level='O7'"):
        jit(function, jit_level="O7")
    with pytest.raises(TypeError, match="jit got int"):
        jit(3)
    assert make(jit_config=JitConfig(jit_level="O0")).train(1, make_batches(1)).steps == 1


@pytest.mark.parametrize("sink_mode", [True, False])
def test_step_numbers_begin_anew_with_each_call(sink_mode: bool) -> None:
    """As in MindSpore; checkpoints, evaluations and a StepLoop go by all steps of the loop."""
    network = make_model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model = Model(network, functional.cross_entropy, optimizer, metrics={"accuracy"})
    seen: list[tuple[str, int]] = []

    class Numbers(Callback):
        def on_train_begin(self, run_context: Any) -> None:
            seen.append(("begin", run_context.original_args().cur_step_num))

        def on_train_step_begin(self, run_context: Any) -> None:
            seen.append(("step_begin", run_context.original_args().cur_step_num))

        def on_train_step_end(self, run_context: Any) -> None:
            seen.append(("step_end", run_context.original_args().cur_step_num))

    evaluation = Evaluation(make_batches(1), every_steps=4)
    histories = []
    for _ in range(2):
        histories.append(
            model.train(2, make_batches(4), callbacks=[Numbers(), evaluation], dataset_sink_mode=sink_mode)
        )
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    steps = [4, 8] if sink_mode else range(1, 9)
    assert seen[: len(seen) // 2] == [
        ("begin", 0),
        *((event, n) for n in steps for event in ("step_begin", "step_end")),
    ]
    assert [step for history in histories for step, _ in history.evaluations] == [4, 8, 12, 16]


def test_step_numbers_of_a_resumed_call_go_on(tmp_path: Path) -> None:
    def make() -> Model:
        network = make_model()
        return Model(network, functional.cross_entropy, torch.optim.SGD(network.parameters(), lr=0.1))

    seen: list[int] = []
    note = LambdaCallback(on_train_step_end=lambda context: seen.append(context.original_args().cur_step_num))
    stop = LambdaCallback(on_train_epoch_end=lambda context: context.request_stop())
    first, again = make(), make()
    first.train(3, make_batches(4))
    first.train(3, make_batches(4), callbacks=[note, stop])
    first.loop.save(tmp_path)
    assert again.loop.resume(tmp_path) == 16
    again.train(3, make_batches(4), callbacks=[note])
    assert seen == [4, 8, 12]


def test_explain_tells_of_evaluations_too() -> None:
    model = make({"accuracy"})
    model.fit(1, make_batches(3), make_batches(2))
    assert "evaluation: mode eager, batches of the latest: " in model.loop.explain()
