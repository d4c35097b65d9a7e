"""What graphs keep in memory: a run in graph mode lives where plain code would, on a CUDA device that ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch import Tensor, nn
from torch.nn import functional

from loop.reference import make_batches, make_model, plain_loop
from torch_sink.loop import Evaluation, JitConfig, LambdaCallback, StepLoop
from torch_sink.mindspore import Model
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved

MIB = 1 << 20
UNCOMPILED = JitConfig(jit_level="O0", exc_mode="sink")
EPOCH = [*make_batches(6), *make_batches(1, seed=9, size=7)]  # the last batch is short
# One set of activations has some 12 MiB.
tight = pytest.mark.parametrize("fake_cuda", [{"memory": 18 * MIB}], indirect=True)


class Wide(nn.Module):
    """The usual model with activations of 1.5 MiB, each of which its backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model(dropout=0.0)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        wide = outputs.repeat(1, 10_000)
        for _ in range(5):
            wide = wide.sin()
        return outputs + wide.mean(1, keepdim=True)


class Caches(nn.Module):
    """Keeps something for each size of batches, as a mask of a sequence is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model(dropout=0.0)
        self.masks: dict[int, Tensor] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        size = len(inputs)
        if size not in self.masks:
            self.masks[size] = torch.full((size, 1), 1.5, device=inputs.device)
        outputs: Tensor = self.inner(inputs) * self.masks[size]
        return outputs


def make_loop(model: nn.Module | None = None, **options: Any) -> StepLoop:
    model = (model or Wide()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {"steps_per_sync": 4, "mode": "graph", "jit_config": UNCOMPILED, **options}
    return StepLoop(model, functional.cross_entropy, optimizer, **options)


def plain(device: str, model: nn.Module | None = None, epochs: int = 2) -> Tensor:
    model = (model or Wide()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [tuple(tensor.to(device) for tensor in batch) for batch in EPOCH * epochs]
    return plain_loop(model, functional.cross_entropy, optimizer, batches)[0]


@tight
def test_plain_code_has_room(fake_cuda: FakeCuda) -> None:
    plain("cuda")
    assert torch.cuda.max_memory_reserved() > 9 * MIB, "two sets have no room"


@tight
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_short_last_batch_needs_no_second_set_of_activations(fake_cuda: FakeCuda, accumulate: int) -> None:
    loop = make_loop(accumulate=accumulate)
    with SinkLoader(EPOCH, slots=2) as loader:
        history = loop.run(loader, epochs=3)
    assert loop.explain().startswith("mode: graph"), loop.explain()
    assert "captured again" not in loop.explain()
    if accumulate == 1:
        torch.testing.assert_close(history.losses, plain("cpu", epochs=3), rtol=1e-5, atol=1e-6)
    assert fake_cuda.graphs_begun == 2 * accumulate, "the graphs of the first epoch serve all others"
    loop.close()


@tight
def test_evaluations_between_epochs(fake_cuda: FakeCuda) -> None:
    """The captured part, and the short last batch."""
    loop = make_loop()
    evaluation = Evaluation(EPOCH, every_epochs=1)
    history = loop.run(EPOCH, epochs=2, callbacks=[evaluation])
    assert "mode: graph" in loop.explain()
    assert "captured again" not in loop.explain()
    expected = make_loop_on_cpu().run(EPOCH, epochs=2, callbacks=[Evaluation(EPOCH, every_epochs=1)])
    torch.testing.assert_close(history.losses, expected.losses, rtol=1e-5, atol=1e-6)
    for (_, ours), (_, theirs) in zip(history.evaluations, expected.evaluations, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    loop.close()


@tight
def test_a_model_evaluates_in_the_memory_in_which_it_trains(fake_cuda: FakeCuda) -> None:
    network = Wide().cuda()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    model = Model(network, functional.cross_entropy, optimizer, {"loss"}, mode="graph", jit_config=UNCOMPILED)
    model.fit(2, EPOCH, EPOCH)
    assert "mode: graph" in model.loop.explain()
    assert "captured again" not in model.loop.explain()
    assert fake_cuda.graphs_begun == 3 + 1, "in one run, evaluations and all"
    model.close()


def test_the_first_steps_of_a_run_leave_what_they_make_outside(fake_cuda: FakeCuda) -> None:
    """The optimizer's state, where evaluations have graphs already."""
    loop = make_loop(make_model(dropout=0.0))
    loop.evaluate(EPOCH)
    loop.run(EPOCH, callbacks=[Evaluation(EPOCH, every_epochs=1)])
    assert fake_cuda.graphs_begun == 1 + 3
    assert "left tensors" not in loop.explain()
    loop.close()


@tight
def test_code_between_two_runs_has_the_room_that_it_would_have(fake_cuda: FakeCuda) -> None:
    loop = make_loop()
    losses = []
    for _ in range(2):
        losses.append(loop.run(EPOCH).losses)
        functional.cross_entropy(loop.model(EPOCH[0][0].cuda()), EPOCH[0][1].cuda())
        for name, buffer in make_model().named_buffers():
            loop.model.inner.get_buffer(name).copy_(buffer)
    assert "mode: graph" in loop.explain()
    assert "graphs were forgotten at the end of a run" in loop.explain()
    loop.close()


@tight
def test_an_evaluation_by_hand_that_has_no_room_learns_why(fake_cuda: FakeCuda) -> None:
    loop = make_loop()

    def evaluate(context: Any) -> None:
        functional.cross_entropy(loop.model(EPOCH[0][0].cuda()), EPOCH[0][1].cuda())

    with pytest.raises(torch.OutOfMemoryError) as raised:
        loop.run(EPOCH, callbacks=[LambdaCallback(on_train_epoch_end=evaluate)])
    assert "evaluate by Evaluation(...) or loop.evaluate(...), which share it" in "".join(raised.value.__notes__)
    loop.close()


def test_graphs_stay_between_runs_where_there_is_room(fake_cuda: FakeCuda) -> None:
    loop = make_loop()
    with SinkLoader(EPOCH, slots=2) as loader:
        for _ in range(3):
            loop.run(loader)
    assert fake_cuda.graphs_begun == 2
    loop.close()


def make_loop_on_cpu(model: nn.Module | None = None) -> StepLoop:
    model = model or Wide()
    return StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.05), steps_per_sync=4)


@pytest.mark.parametrize("fake_cuda", [{"seed": seed} for seed in range(3)], indirect=True)
def test_what_a_short_batch_leaves_behind_is_not_overwritten(fake_cuda: FakeCuda) -> None:
    """A cache that the forward pass fills would lie where replays write: the graphs move out."""
    loop = make_loop(Caches())
    history = loop.run(EPOCH, epochs=3)
    torch.testing.assert_close(history.losses, plain("cpu", Caches(), epochs=3), rtol=1e-5, atol=1e-6)
    assert loop.explain().startswith("mode: graph"), loop.explain()
    assert "left tensors in their memory" in loop.explain()
    assert "(1 times)" in loop.explain().split("left tensors in their memory")[1].splitlines()[0]
    loop.close()


def test_what_an_evaluation_leaves_behind_is_not_overwritten(fake_cuda: FakeCuda) -> None:
    loop, model = make_loop(Caches()), Caches()
    valid = make_batches(2, seed=4, size=5)
    history = loop.run(EPOCH, epochs=2, callbacks=[Evaluation(valid, every_epochs=1)])
    on_cpu = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.05), steps_per_sync=4)
    expected = on_cpu.run(EPOCH, epochs=2, callbacks=[Evaluation(valid, every_epochs=1)])
    torch.testing.assert_close(history.losses, expected.losses, rtol=1e-5, atol=1e-6)
    for (_, ours), (_, theirs) in zip(history.evaluations, expected.evaluations, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert torch.equal(loop.model.masks[5].cpu(), torch.full((5, 1), 1.5))
    loop.close()


@pytest.mark.parametrize("trains", [False, True])
def test_what_one_batch_of_an_evaluation_leaves_to_a_later_one_is_not_overwritten(
    fake_cuda: FakeCuda, trains: bool
) -> None:
    """Sizes come by turns, so that replays of the usual one run between two of another that share a cache."""
    sizes = [8, 8, 8, 5, 8, 8, 5, 8, 8]
    valid = [batch for number, size in enumerate(sizes) for batch in make_batches(1, seed=number, size=size)]
    loop, on_cpu = make_loop(Caches()), make_loop_on_cpu(Caches())
    if trains:
        loop.run(EPOCH)
        on_cpu.run(EPOCH)
    for _ in range(2):
        assert loop.evaluate(valid) == pytest.approx(on_cpu.evaluate(valid), abs=1e-5)
    assert "evaluation: mode graph" in loop.explain()
    assert torch.equal(loop.model.masks[5].cpu(), torch.full((5, 1), 1.5))
    loop.close()


def test_what_a_step_that_failed_leaves_behind_is_not_overwritten(fake_cuda: FakeCuda) -> None:
    class Fails(Caches):
        def forward(self, inputs: Tensor) -> Tensor:
            outputs = super().forward(inputs)
            if len(inputs) == 5:
                raise RuntimeError("five")
            return outputs

    loop = make_loop(Fails())
    loop.run(EPOCH)
    for run in (loop.run, loop.evaluate):
        loop.model.masks.pop(5, None)
        with pytest.raises(RuntimeError, match="five"):
            run([*make_batches(4), *make_batches(1, size=5)])
        loop.run(EPOCH)
        assert torch.equal(loop.model.masks[5].cpu(), torch.full((5, 1), 1.5))
    loop.close()


def test_graphs_do_without_workspaces_that_others_may_free(fake_cuda: FakeCuda) -> None:
    """As compiled code with graphs of its own does, at each new shape."""
    clear = LambdaCallback(on_train_step_end=lambda _: torch._C._cuda_clearCublasWorkspaces())
    loop = make_loop(Caches(), steps_per_sync=2)
    history = loop.run(EPOCH, epochs=2, callbacks=[clear])
    assert "mode: graph" in loop.explain()
    torch.testing.assert_close(history.losses, plain("cpu", Caches()), rtol=1e-5, atol=1e-6)
    loop.close()


def test_explain_says_what_graphs_keep(fake_cuda: FakeCuda) -> None:
    loop = make_loop()
    loop.run(EPOCH)
    kept = fake_cuda.allocator.private(0)
    assert kept > 9 * MIB
    assert f"graphs: 3, which keep {kept / MIB:.0f} MiB of device memory" in loop.explain()
    loop.close()
    torch.cuda.empty_cache()
    assert fake_cuda.allocator.private(0) == 0
    assert "which keep" not in loop.explain()
