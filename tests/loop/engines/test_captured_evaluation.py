"""Evaluation and prediction from captured graphs, on a CUDA device that is none, compared with the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch import Tensor, nn
from torch.nn import functional

from loop.reference import make_batches, make_model
from loop.test_evaluation import Kept, by_hand
from torch_sink.loop import Callback, Evaluation, JitConfig, StepLoop, jit, no_host_sync
from torch_sink.loop.metrics import Accuracy
from torch_sink.mindspore import Model
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved

UNCOMPILED = JitConfig(jit_level="O0", exc_mode="sink")
both_releases = pytest.mark.parametrize("fake_cuda", [{"release": "2.11"}, {"release": "2.15"}], indirect=True)
VALID = [*make_batches(6, seed=40), *make_batches(1, seed=41, size=3)]


def make(metrics: Any = None, model: nn.Module | None = None, **options: Any) -> Model:
    network = model if model is not None else make_model(dropout=0.0).cuda()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    options = {"jit_config": UNCOMPILED, "mode": "graph", **options}
    return Model(network, functional.cross_entropy, optimizer, metrics or {"accuracy"}, **options)


def on_cpu(model: Model, batches: list[Any] = VALID) -> dict[str, float]:
    network = make_model(dropout=0.0)
    network.load_state_dict({name: value.cpu() for name, value in model.train_network.state_dict().items()})
    return by_hand(network, batches)


def graphs(evaluator: Any) -> int:
    """Graphs that are kept."""
    return sum(len(judge._graphs) for judge in evaluator._judges.values())


def opened(kind: str, batches: list[Any]) -> Any:
    return SinkLoader(batches, slots=3) if kind == "sink" else batches


@pytest.mark.parametrize("kind", ["list", "sink"])
def test_one_graph_and_one_wait_a_pass(fake_cuda: FakeCuda, kind: str) -> None:
    model, data = make(), opened(kind, VALID)
    expected = on_cpu(model)
    with no_host_sync():
        assert model.eval(data) == pytest.approx(expected, abs=1e-6)
    assert graphs(model._evaluator) == 1
    fake_cuda.host_waits_seen.clear()
    fake_cuda.calls.clear()
    with no_host_sync():
        results = model.eval(data)
    assert fake_cuda.calls["aten::convolution"] == 1, "only the last batch, which is of another size, runs uncaptured"
    assert set(fake_cuda.host_waits_seen) == {"event.synchronize"}, "for the results, and for memory of batches before"
    assert results == pytest.approx(expected, abs=1e-6)
    if kind == "sink":
        data.close()
    model.close()


def test_an_evaluation_over_another_loader_is_captured(fake_cuda: FakeCuda) -> None:
    """Its batches have another size; with each change one batch runs as before, one settles it, one is the trial."""
    model, other = make(), make_batches(7, seed=50, size=5)
    for batches, captured in ((VALID, 4), (other, 4), (other, 7), (VALID, 3)):
        assert model.eval(batches) == pytest.approx(on_cpu(model, batches), abs=1e-6)
        about = f"evaluation: mode graph, batches of the latest: {captured} captured, 0 compiled, {7 - captured} eager"
        assert about in "\n".join(model._evaluator.explain())
    model.close()


def test_metrics_that_keep_outputs_and_labels_get_their_own(fake_cuda: FakeCuda) -> None:
    """The next replay writes where the last one did, and the next batch lies where the last one lay."""
    model = make({"kept": Kept(), "accuracy": Accuracy(1)})
    with SinkLoader(VALID, slots=3) as loader:
        for _ in range(2):
            results = model.eval(loader)
            assert results["kept"] == results["accuracy"] == pytest.approx(on_cpu(model)["accuracy"])

    class Outputs(Callback):
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def on_eval_step_end(self, run_context: Any) -> None:
            self.seen.append(run_context.original_args().net_outputs)

    outputs = Outputs()
    model.eval(VALID, outputs, dataset_sink_mode=False)
    assert len({output.sum().item() for output in outputs.seen}) == len(VALID)
    model.close()


@pytest.mark.parametrize("kind", ["list", "sink"])
@pytest.mark.parametrize("steps_per_sync", [2, 5, -1])
@pytest.mark.sampled(2)
def test_training_and_evaluating_from_graphs(fake_cuda: FakeCuda, kind: str, steps_per_sync: int) -> None:
    """Both kinds of graph, on one stream, against the same run on the CPU."""
    outcomes = []
    for device in ("cuda", "cpu"):
        network = make_model(dropout=0.0).to(device)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        options = {"mode": "graph", "jit_config": UNCOMPILED} if device == "cuda" else {}
        loop = StepLoop(network, functional.cross_entropy, optimizer, steps_per_sync=steps_per_sync, **options)
        valid = SinkLoader(VALID, device=device) if kind == "sink" else VALID
        every = Evaluation(valid, metrics={"accuracy", "top5"}, every_steps=4)
        epochs = Evaluation(valid, every_epochs=1)
        outcomes.append(loop.run(make_batches(9), epochs=2, callbacks=[every, epochs]))
        if kind == "sink":
            valid.close()
        loop.close()
    captured, plain = outcomes
    torch.testing.assert_close(captured.losses, plain.losses, rtol=1e-4, atol=1e-5)
    assert [step for step, _ in captured.evaluations] == [4, 8, 9, 12, 16, 18]
    for (_, ours), (_, expected) in zip(captured.evaluations, plain.evaluations, strict=True):
        assert ours == pytest.approx(expected, abs=1e-4)


def test_weights_that_have_moved_are_captured_again(fake_cuda: FakeCuda) -> None:
    model = make()
    model.eval(VALID)
    with torch.no_grad():
        for parameter in model.train_network.parameters():
            parameter.mul_(0.5)
    assert model.eval(VALID) == pytest.approx(on_cpu(model), abs=1e-6), "in place: the same graphs"
    for parameter in model.train_network.parameters():
        parameter.data = parameter.data * 3.0
    assert model.eval(VALID) == pytest.approx(on_cpu(model), abs=1e-6)
    model.close()


def test_predictions_are_captured_and_belong_to_the_caller(fake_cuda: FakeCuda) -> None:
    model = make()
    batches = [inputs for inputs, _ in VALID]
    predicted = [model.predict(inputs) for inputs in batches]
    fake_cuda.calls.clear()
    predicted += [model.predict(inputs.cuda()) for inputs in batches]
    assert fake_cuda.calls["aten::convolution"] == 1
    network = make_model(dropout=0.0).eval()
    for ours, inputs in zip(predicted, batches * 2, strict=True):
        torch.testing.assert_close(ours.cpu(), network(inputs).detach())
    model.close()


class Waits(nn.Module):
    """Looks at values on the host: no graph can hold that."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.inner, self.look = make_model(dropout=0.0), look

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        if not self.training:
            self.look(outputs)
        return outputs


@both_releases
@pytest.mark.parametrize("look", [lambda outputs: outputs.sum().item(), lambda outputs: outputs.nonzero()])
def test_what_waits_is_found_out_before_anything_is_captured(fake_cuda: FakeCuda, look: Any) -> None:
    model = make(model=Waits(look).cuda())
    expected = by_hand(make_model(dropout=0.0), VALID)
    for _ in range(2):
        assert model.eval(VALID) == pytest.approx(expected, abs=1e-6)
    assert model.predict(VALID[0][0]).shape == (8, 5)
    reasons = "\n".join(model._evaluator.explain())
    waits = "forward passes cannot be captured, so they run in mode 'eager': the host waits for the device at"
    assert f"{waits} {__file__}:" in reasons
    assert "evaluation: mode eager" in reasons
    assert fake_cuda.graphs_begun == 0
    model.close()


@both_releases
def test_an_evaluation_that_waits_leaves_the_training_around_it_captured(fake_cuda: FakeCuda) -> None:
    """Callbacks are allowed to wait for the device; the model that is evaluated in one is looked at all the same."""
    network = Waits(lambda outputs: outputs.sum().item()).cuda()
    loop = StepLoop(
        network,
        functional.cross_entropy,
        torch.optim.SGD(network.parameters(), lr=0.05),
        steps_per_sync=4,
        mode="graph",
        jit_config=UNCOMPILED,
    )
    loop.run(make_batches(12), callbacks=[Evaluation(VALID, every_steps=4)])
    assert loop.explain().startswith("mode: graph")
    assert "evaluation: mode eager" in loop.explain()
    assert fake_cuda.graphs_begun == 3, "those of the training"
    loop.close()


@both_releases
def test_a_capture_that_fails_all_the_same_leaves_the_evaluation_as_it_was(fake_cuda: FakeCuda) -> None:
    """By what no trial sees."""
    model = make(model=Waits(lambda outputs: torch.cuda.current_stream().synchronize()).cuda())
    for _ in range(2):
        assert model.eval(VALID) == pytest.approx(by_hand(make_model(dropout=0.0), VALID), abs=1e-6)
    assert "not permitted when stream is capturing (stream.synchronize)" in "\n".join(model._evaluator.explain())
    model.close()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("place", ["model", "jit", "loss", "forward"])
def test_what_has_graphs_of_its_own_is_not_captured(fake_cuda: FakeCuda, place: str) -> None:
    network, loss_fn, forward = make_model(dropout=0.0).cuda(), functional.cross_entropy, None
    if place == "model":
        network = torch.compile(network, mode="reduce-overhead")
    elif place == "jit":
        network = jit(network, jit_level="O2")
    elif place == "loss":
        loss_fn = torch.compile(loss_fn, mode="reduce-overhead")
    else:
        forward = torch.compile(lambda model, batch: (None, model(batch[0]), batch[1]), mode="reduce-overhead")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    loop = StepLoop(network, loss_fn, optimizer, mode="graph", jit_config=UNCOMPILED)
    judge = loop.evaluator()._judge(forward)
    assert judge.mode == "eager"
    assert "CUDA graphs of its own" in loop.explain()
    loop.close()


class Remembers(nn.Module):
    """A buffer that its forward pass replaces: replays would all begin with one value, in memory of the graph's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model(dropout=0.0)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        self.seen = self.seen + outputs.mean()
        return outputs


def test_a_buffer_that_a_forward_pass_replaces_is_as_without_graphs(fake_cuda: FakeCuda) -> None:
    plain, network = Remembers().eval(), Remembers().cuda()
    model = make(model=network)
    for _ in range(2):
        model.eval(VALID)
        for inputs, _labels in VALID:
            plain(inputs)
    torch.testing.assert_close(network.seen.cpu(), plain.seen)
    assert "puts new tensors in the place of the buffer seen" in "\n".join(model._evaluator.explain())
    model.close()


def test_build_captures_evaluations_ahead(fake_cuda: FakeCuda) -> None:
    model = make()
    with SinkLoader(VALID, slots=3) as loader:
        model.build(make_batches(4), loader)
        assert graphs(model._evaluator) == 1
        fake_cuda.calls.clear()
        results = model.eval(loader)
        assert fake_cuda.calls["aten::convolution"] == 1
        assert results == pytest.approx(on_cpu(model), abs=1e-6)
    model.close()


def test_evaluations_of_different_things_do_not_share_their_graphs(fake_cuda: FakeCuda) -> None:
    network = make_model(dropout=0.0).cuda()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    loop = StepLoop(network, functional.cross_entropy, optimizer, mode="graph", jit_config=UNCOMPILED)
    expected = by_hand(make_model(dropout=0.0), VALID)["accuracy"]

    def make_forward(number: int) -> Any:
        return lambda model, batch: (torch.full((), float(number), device="cuda"), model(batch[0]), batch[1])

    forwards = [make_forward(number) for number in range(10)]
    for number in (*range(10), 0, 9):  # the first was forgotten meanwhile, the last was not
        results = loop.evaluate(VALID, metrics={"accuracy"}, forward=forwards[number])
        assert results == {"accuracy": expected, "loss": number}
    assert graphs(loop.evaluator()) == 8
    loop.close()


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_the_streams_shows(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    cuda = FakeCuda(seed=seed)
    with monkeypatch.context() as patch:
        cuda.install(patch)
        model = make({"kept": Kept(), "accuracy": Accuracy(1)})
        expected = on_cpu(model)
        for kind in ("sink", "list", "sink"):
            data = opened(kind, VALID)
            results = model.eval(data)
            assert results["loss"] == pytest.approx(expected["loss"], abs=1e-6)
            assert results["kept"] == results["accuracy"] == pytest.approx(expected["accuracy"])
            if kind == "sink":
                data.close()
        model.close()
        cuda.remove()
