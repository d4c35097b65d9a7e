"""What can go wrong with captured steps, each as a scenario on a CUDA device that is none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulators.fake_cuda import FakeCuda
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from loop.engines.test_on_fake_cuda import UNCOMPILED, make_loop, plain
from loop.reference import make_batches, make_model
from torch_sink.errors import SinkError
from torch_sink.loop import LambdaCallback, StepLoop
from torch_sink.loop.engines import build, capture
from torch_sink.loop.engines.capture import CudaCapture
from torch_sink.sink import SinkLoader
from torch_sink.sink import device as device_ops

pytestmark = pytest.mark.halved

RELEASES = [{"release": release} for release in ("2.11", "2.12", "2.15")]
both_releases = pytest.mark.parametrize("fake_cuda", RELEASES, indirect=True)


class Wrapped(nn.Module):
    """The usual model, with a function of its output on the way."""

    def __init__(self, function: Any = None) -> None:
        super().__init__()
        self.inner = make_model(dropout=0.0)
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        if self.function is not None:
            self.function(self, outputs)
        return outputs


def run(loop: StepLoop, batches: list[Any], **options: Any) -> Any:
    """Train, and compare with the plain loop on the CPU."""
    history = loop.run(batches, **options)
    losses = plain("SGD", batches * options.get("epochs", 1))[1]
    torch.testing.assert_close(history.losses, losses, rtol=1e-5, atol=1e-6)
    return history


def at_step(step: int, change: Any) -> list[LambdaCallback]:
    def callback(context: Any) -> None:
        if context.original_args().cur_step_num == step:
            change(context.original_args().loop)

    return [LambdaCallback(on_train_step_end=callback)]


@both_releases
def test_a_model_that_waits_is_found_out_before_anything_is_captured(
    fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    model = Wrapped(lambda _, outputs: outputs.sum().item()).cuda()
    loop = make_loop(model=model, steps_per_sync=4)
    with caplog.at_level(logging.WARNING, "torch_sink"):
        run(loop, make_batches(10))
    assert "the step cannot be captured, so it runs in mode 'eager': the host waits for the device at" in caplog.text
    assert f"'eager': the host waits for the device at {__file__}:" in loop.explain(), "the line of the model"
    assert fake_cuda.graphs_begun == 0


@both_releases
def test_training_goes_on_after_a_capture_that_failed(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what no trial sees. The default generator, the allocator, later captures and DDP must work again."""
    model = Wrapped(lambda _, outputs: torch.cuda.current_stream().synchronize()).cuda()
    loop = make_loop(model=model, steps_per_sync=4)
    cuts: list[str] = []
    monkeypatch.setattr(loop.ranks, "reset_reducer", lambda: cuts.append("cut off"))
    run(loop, make_batches(10))
    assert "mode: eager" in loop.explain()
    assert "not permitted when stream is capturing (stream.synchronize)" in loop.explain(), "the cause itself"
    assert cuts == ["cut off"]
    torch.cuda.empty_cache()
    assert torch.rand(3, device="cuda").isfinite().all()
    other = make_loop(steps_per_sync=4)
    run(other, make_batches(10))
    assert "mode: graph" in other.explain()


@both_releases
def test_a_capture_that_failed_costs_others_their_graphs_and_nothing_else(fake_cuda: FakeCuda) -> None:
    """Allocators may go on as if it were under way: nothing is captured into its pool again."""

    def fails_when_evaluated(model: Any, outputs: Tensor) -> None:
        if not model.training:
            torch.cuda.current_stream().synchronize()

    loop = make_loop(model=Wrapped(fails_when_evaluated).cuda(), steps_per_sync=4)
    batches = make_batches(20)
    counts = [loop.run(batches[:8]).captured_steps]
    with SinkLoader(batches[8:]) as loader:
        counts.append(loop.run(loader, max_steps=5).captured_steps)
        loop.evaluate(make_batches(4))
        assert "evaluation: mode eager" in loop.explain()
        begun = fake_cuda.graphs_begun
        counts.append(loop.run(loader, max_steps=7).captured_steps)
    assert counts == [5, 5, 7], "there is no other trial"
    assert fake_cuda.graphs_begun == begun + 3
    assert "mode: graph" in loop.explain()
    loop.close()


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One of two processes, whose collectives do nothing; kernels of BatchNorm that only CUDA has give anything."""

    def statistics(inputs: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return inputs.mean((0, 2, 3)), inputs.mean((0, 2, 3))

    monkeypatch.setattr(torch, "batch_norm_stats", statistics)
    monkeypatch.setattr(torch, "batch_norm_gather_stats_with_counts", statistics)
    monkeypatch.setattr(torch, "batch_norm_elemt", lambda inputs, *_: inputs * 1)
    for name in ("all_gather_into_tensor", "all_gather_single"):  # torch 2.14 has the other name
        monkeypatch.setattr(dist, name, lambda *_, **__: None, raising=False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("looks", "waits"), [(False, 0), (True, 1)])
def test_sync_batch_norm_waits_only_where_nothing_is_captured(
    fake_cuda: FakeCuda, two_ranks: None, looks: bool, waits: int
) -> None:
    """So its waits do not speak against a capture; those of a model around it do."""
    norm, problems = nn.SyncBatchNorm(3).cuda(), list[str]()
    capture = CudaCapture(torch.device("cuda", 0))
    with capture.stream(), capture.trial(problems):
        outputs = norm(torch.ones(2, 3, 4, 4, device="cuda"))
        if looks:
            outputs[outputs > 0]
    assert len(problems) == waits
    assert all(f"the host waits for the device at {__file__}:" in problem for problem in problems)
    assert "aten::index.Tensor" in fake_cuda.host_waits_seen


@both_releases
def test_with_several_processes_a_capture_that_failed_on_one_is_an_error(fake_cuda: FakeCuda) -> None:
    """The others may have captured: this one, going on alone, would wait for them for ever."""

    def fail(_: Any, outputs: Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            loop.ranks.size = 2
            raise KeyError("on this rank only")

    loop = make_loop(model=Wrapped(fail).cuda(), steps_per_sync=4)
    with pytest.raises(SinkError, match=r"cannot be captured on rank 0.*on this rank only.*pass mode='compile'"):
        run(loop, make_batches(8))
    loop.ranks.size = 1


@both_releases
def test_an_error_of_the_users_own_inside_a_capture_is_named(fake_cuda: FakeCuda) -> None:
    def refuse(_: Any, outputs: Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise KeyError("not in here")

    loop = make_loop(model=Wrapped(refuse).cuda(), steps_per_sync=4)
    run(loop, make_batches(8))
    assert "KeyError: 'not in here'" in loop.explain()
    assert f"(at {__file__}:" in loop.explain()


@both_releases
def test_a_loss_that_is_still_alive_keeps_gradients_on_its_stream(fake_cuda: FakeCuda) -> None:
    loop = make_loop(steps_per_sync=4)
    alive = functional.cross_entropy(loop.model(make_batches(1)[0][0].cuda()), make_batches(1)[0][1].cuda())
    for name, buffer in make_model().named_buffers():
        loop.model.get_buffer(name).copy_(buffer)  # as before this look at the loss
    run(loop, make_batches(10))
    if fake_cuda.leaks_failed_captures:
        assert "mode: eager" in loop.explain()
        assert "cannot be captured" in loop.explain()
    else:
        assert "mode: graph" in loop.explain()
        assert not fake_cuda.overrides_stale_streams, "what is set for a capture is put back"
    assert alive.isfinite()
    if hasattr(torch._C, "_warn_on_accumulate_grad_stream_mismatch"):  # torch 2.8 has no such warning
        assert torch._C._warn_on_accumulate_grad_stream_mismatch(), "what is switched off for a run is put back"


@both_releases
def test_ddp_is_captured_where_its_streams_can_be_overridden(fake_cuda: FakeCuda) -> None:
    loop = make_loop(steps_per_sync=4)
    loop.ranks.size = 2
    obstacle = build._capture_obstacle(loop.state)
    assert (obstacle is not None and "torch 2.13 and later" in obstacle) == fake_cuda.leaks_failed_captures


def test_a_pool_is_not_used_again_when_all_graphs_have_left_it(fake_cuda: FakeCuda) -> None:
    """A model that keeps its output keeps memory of the pool alive."""

    def keep(module: nn.Module, outputs: Tensor) -> None:
        module.latest = outputs.detach()

    loop = make_loop(model=Wrapped(keep).cuda(), steps_per_sync=4)

    def change(loop: StepLoop) -> None:
        loop.optimizer.param_groups[0]["weight_decay"] = 0.0
        loop.optimizer.param_groups[0]["note"] = "changed"

    run(loop, make_batches(16), callbacks=at_step(8, change))
    assert "captured again" in loop.explain()
    assert "mode: graph" in loop.explain()


class NotedLock:
    """A lock that says when somebody asks for it."""

    def __init__(self, asked: threading.Event) -> None:
        self._lock, self._asked = threading.RLock(), asked

    def __enter__(self) -> None:
        self._asked.set()
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


def test_a_loader_that_ends_in_another_thread_waits_for_the_capture(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, lock = threading.Event(), NotedLock(threading.Event())
    monkeypatch.setattr(capture, "capture_lock", lock)
    monkeypatch.setattr(device_ops, "capture_lock", lock)
    synchronize = torch.cuda.synchronize
    loader = SinkLoader(make_batches(3))
    next(iter(loader))

    def close() -> None:
        loader.close()

    def body() -> None:
        lock._asked = arrived
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: (arrived.set(), synchronize(device)))
        thread.start()
        assert arrived.wait(10)

    thread = threading.Thread(target=close)
    CudaCapture(torch.device("cuda", 0)).capture(body)
    thread.join(10)
    assert not thread.is_alive()
    assert fake_cuda.host_waits_seen[-1] == "torch.cuda.synchronize"


def test_optimizers_get_numbers_again_when_steps_are_not_captured(fake_cuda: FakeCuda) -> None:
    rates = []

    class Reading(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            rates.append(type(self.param_groups[0]["lr"]))
            super().step()

    model = Wrapped(lambda _, outputs: outputs.sum().item()).cuda()
    optimizer = Reading(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loop = StepLoop(
        model,
        functional.cross_entropy,
        optimizer,
        scheduler=scheduler,
        schedule="step",
        steps_per_sync=5,
        mode="graph",
        jit_config=UNCOMPILED,
    )
    history = loop.run(make_batches(12))
    assert "mode: " in loop.explain()
    assert set(rates[3:]) == {float}
    assert history.learning_rates.flatten().tolist() == [0.05 * 0.5 ** (step // 2) for step in range(12)]
