"""Graph mode with everything that belongs to it, on a CUDA device that is none: capture, replay, ring, streams."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from loop.reference import make_batches, make_model, plain_loop, step_loop
from torch_sink.errors import HostSyncError
from torch_sink.loop import JitConfig, LambdaCallback, RunContext, StepLoop, no_host_sync
from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.engines import capture
from torch_sink.loop.engines.capture import CudaCapture
from torch_sink.sink import SinkLoader
from torch_sink.thread_waits import host_sync_allowed

pytestmark = pytest.mark.halved

UNCOMPILED = JitConfig(jit_level="O0", exc_mode="sink")
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def make_loop(name: str = "SGD", **options: Any) -> StepLoop:
    model = options.pop("model", None) or make_model(dropout=options.pop("dropout", 0.0)).cuda()
    optimizer = OPTIMIZERS[name](model.parameters())
    options.setdefault("jit_config", UNCOMPILED)
    options.setdefault("mode", "graph")
    return step_loop(model, optimizer, **options)


def plain(name: str, batches: list[Any], **options: Any) -> tuple[Any, ...]:
    """Model, losses and rates of the plain loop on the CPU."""
    model = make_model(dropout=0.0)
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = options.pop("scheduler", None)
    losses, rates = plain_loop(
        model,
        functional.cross_entropy,
        optimizer,
        batches,
        scheduler=scheduler(optimizer) if scheduler else None,
        **options,
    )
    return model, losses, rates


def assert_trained_alike(model: Any, expected: Any, **tolerance: float) -> None:
    for (name, ours), theirs in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)


@pytest.mark.parametrize(("name", "accumulate"), [("SGD", 1), ("AdamW", 2)])
def test_graphs_train_as_the_plain_loop_on_the_cpu(fake_cuda: FakeCuda, name: str, accumulate: int) -> None:
    batches = make_batches(10)
    loop = make_loop(name, steps_per_sync=4, accumulate=accumulate, scheduler=cosine)
    history = loop.run(batches, epochs=2)
    model, losses, rates = plain(name, batches * 2, accumulate=accumulate, scheduler=cosine)
    assert loop.explain().startswith("mode: graph"), loop.explain()
    torch.testing.assert_close(history.losses, losses, rtol=1e-5, atol=1e-6)
    assert torch.equal(history.learning_rates, rates)
    assert_trained_alike(loop.model, model, rtol=1e-4, atol=1e-5)
    # Sinks of 4, 4 and 2 steps, and one graph for each of three slots, with accumulation one for each kind of step.
    assert history.host_syncs == 6 + 3 * accumulate
    loop.close()


@pytest.mark.parametrize("fake_cuda", [{"seed": seed} for seed in range(4)], indirect=True)
def test_no_order_of_the_streams_shows(fake_cuda: FakeCuda) -> None:
    """The ring fills slots on its stream while graphs read others on theirs."""
    batches = make_batches(10)
    loop = make_loop(steps_per_sync=4, scheduler=cosine)
    with SinkLoader(batches, slots=3) as loader:
        history = loop.run(loader, epochs=2)
    losses = plain("SGD", batches * 2, scheduler=cosine)[1]
    torch.testing.assert_close(history.losses, losses, rtol=1e-5, atol=1e-6)
    loop.close()


def test_a_longer_run_or_sink_is_not_captured_again(fake_cuda: FakeCuda) -> None:
    batches = make_batches(10)
    loop = make_loop(steps_per_sync=-1)
    with SinkLoader(batches, slots=3) as loader, SinkLoader(batches * 2, slots=3) as other:
        loop.run(loader, max_steps=6)
        begun = fake_cuda.graphs_begun
        assert begun == 3
        loop.run(loader, max_steps=10)
        loop.run(loader, epochs=3)
        assert fake_cuda.graphs_begun == begun
        loop.run(other)
        assert fake_cuda.graphs_begun == begun + 3, "only for the slots of another ring"
    loop.close()


def test_a_later_run_with_batches_of_another_size_is_captured(
    fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """A run and the next one over its loader, whose batches then grow."""
    batches, given = [*make_batches(9, size=4), *make_batches(9)], []
    loop = make_loop(steps_per_sync=4)
    histories, ends = [], (5, 9, 18)
    for begin, end in zip((0, *ends), ends, strict=False):
        given[:] = batches[begin:end]
        histories.append(loop.run(given))
    assert [history.captured_steps for history in histories] == [2, 4, 6]
    assert [history.eager_steps for history in histories] == [3, 0, 3], "one in the old way, one to settle, one trial"
    assert all(history.captured_steps + history.eager_steps == history.steps for history in histories)
    assert "steps of the latest run: 6 captured, 0 compiled, 3 eager; 1 had batches of another shape" in loop.explain()
    assert len(loop.engine._graphs) == 3, "those of the other size are gone"
    losses = torch.cat([history.losses for history in histories])
    torch.testing.assert_close(losses, plain("SGD", batches)[1], rtol=1e-5, atol=1e-6)
    assert not caplog.records
    loop.close()


def test_batches_that_grow_from_an_epoch_to_the_next_are_captured(
    fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """Progressive resizing, inside one run."""
    sizes = {0: make_batches(8, size=4), 2: make_batches(8), 3: make_batches(8, size=6)}
    given = list(sizes[0])

    def resize(context: RunContext) -> None:
        given[:] = sizes.get(context.original_args().cur_epoch_num - 1, given)

    loop = make_loop(steps_per_sync=4)
    history = loop.run(given, epochs=4, callbacks=[LambdaCallback(on_train_epoch_begin=resize)])
    assert (history.steps, history.captured_steps, history.eager_steps) == (32, 23, 9), "three for each size"
    batches = [*sizes[0], *sizes[0], *sizes[2], *sizes[3]]
    torch.testing.assert_close(history.losses, plain("SGD", batches)[1], rtol=1e-5, atol=1e-6)
    assert not caplog.records
    loop.close()


def test_a_run_whose_batches_have_many_shapes_says_that_it_was_not_captured(
    fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    batches = [batch for size in (8, 3, 5, 8, 2, 6, 7, 4) for batch in make_batches(1, seed=size, size=size)]
    loop = make_loop(steps_per_sync=4)
    history = loop.run(batches)
    assert (history.captured_steps, history.eager_steps) == (0, 8)
    assert "of the run's 8 steps, 6 had batches of another shape" in caplog.text
    assert "JitConfig(dynamic=True)" in caplog.text
    loop.close()


class Checkpointed(nn.Module):
    """The usual model, whose activations are computed again in the backward pass, with the same dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model(dropout=0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.inner[:3](inputs)
        outputs: Tensor = checkpoint(self.inner[3:], features, use_reentrant=False)
        return outputs


@pytest.mark.parametrize("fake_cuda", [{"release": "2.11"}, {"release": "2.15"}], indirect=True)
def test_activation_checkpoints_are_captured_with_their_dropout(fake_cuda: FakeCuda) -> None:
    losses = []
    for mode, model in (("graph", Checkpointed()), ("eager", Checkpointed()), ("eager", make_model(dropout=0.5))):
        loop = make_loop(model=model.cuda(), steps_per_sync=4, mode=mode)
        torch.manual_seed(3)
        losses.append(loop.run(make_batches(10)).losses)
        assert loop.explain().startswith(f"mode: {mode}"), loop.explain()
        loop.close()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses[0], losses[2], rtol=1e-5, atol=1e-6)


def test_a_timeline_shows_what_the_streams_do(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    batches = make_batches(10)
    loop = make_loop(steps_per_sync=4)
    with SinkLoader(batches, slots=3) as loader:
        history = loop.run(loader, timeline=tmp_path / "run.html")
    trace, seen = json.loads((tmp_path / "run.json").read_text())["traceEvents"], spans_of(tmp_path)
    assert seen["device", "step"] == seen["host", "step"] == 10
    assert seen["copy stream", "copy a batch"] == 10
    assert seen["host", "end of the sink"] == 3
    assert sum(event["name"] == "sync" for event in trace) >= 3
    torch.testing.assert_close(history.losses, plain("SGD", batches)[1], rtol=1e-5, atol=1e-6)
    loop.close()


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("fake_cuda", [{"devices": 2}], indirect=True)
def test_a_timeline_shows_a_device_that_is_not_the_current_one(fake_cuda: FakeCuda, tmp_path: Path, mode: str) -> None:
    """A script that moves its model and sets no device; its events cannot be compared with those of the first one."""
    loop = make_loop(model=make_model(dropout=0.0).to("cuda:1"), steps_per_sync=4, mode=mode)
    history = loop.run(make_batches(10), timeline=tmp_path / "run.html")
    seen = spans_of(tmp_path)
    assert torch.cuda.current_device() == 0
    assert seen["device", "step"] == seen["host", "step"] == 10
    assert seen["copy stream", "copy a batch"] == 10
    assert not any(device == 0 for device, _ in fake_cuda.queues._streams), "nothing touches the other device"
    torch.testing.assert_close(history.losses, plain("SGD", make_batches(10))[1], rtol=1e-5, atol=1e-6)
    loop.close()


def test_a_timeline_of_a_device_that_failed_shows_what_the_host_did(
    fake_cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_lost, synchronize = threading.Event(), torch.cuda.synchronize

    def fail_when_lost(device: Any = None) -> None:
        if is_lost.is_set():
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        synchronize(device)

    def lose(context: Any) -> None:
        if context.original_args().cur_step_num == 8:
            is_lost.set()
            torch.cuda.synchronize()

    monkeypatch.setattr(torch.cuda, "synchronize", fail_when_lost)
    loop = make_loop(steps_per_sync=4)
    callbacks = [LambdaCallback(on_train_step_end=lose)]
    with SinkLoader(make_batches(10)) as loader:
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            loop.run(loader, callbacks=callbacks, timeline=tmp_path / "run.html")
        is_lost.clear()
    assert "the timeline lacks what the device did: CUDA error" in caplog.text
    assert spans_of(tmp_path)["host", "step"] == 8
    assert (tmp_path / "run.html").stat().st_size > 1000


def spans_of(folder: Path) -> Counter[tuple[str, str]]:
    """How often each lane and name is in a trace."""
    trace = json.loads((folder / "run.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    return Counter((lanes[event["tid"]], event["name"]) for event in trace if event["ph"] == "X")


def test_a_replayed_step_makes_no_streams_and_compares_no_addresses(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host a step is to cost some microseconds: what is asked for every step is asked once."""
    counts = {"streams": 0, "addresses": 0, "walks": 0}
    current_stream, addresses, walk = torch.cuda.current_stream, capture._addresses, capture.batch_tensors

    def count_stream(device: Any = None) -> Any:
        counts["streams"] += 1
        return current_stream(device)

    def count_addresses(tensors: Any) -> Any:
        counts["addresses"] += 1
        return addresses(tensors)

    def count_walk(batch: Any) -> Any:
        counts["walks"] += 1
        return walk(batch)

    monkeypatch.setattr(capture, "batch_tensors", count_walk)
    monkeypatch.setattr(torch.cuda, "current_stream", count_stream)
    monkeypatch.setattr(capture, "_addresses", count_addresses)
    loop = make_loop(steps_per_sync=20)
    with SinkLoader(make_batches(10)) as loader:
        loop.run(loader)
        seen = []
        for epochs in (1, 2):
            counts.update(streams=0, addresses=0, walks=0)
            loop.run(loader, epochs=epochs)
            seen.append(dict(counts))
    assert seen[1]["streams"] == seen[0]["streams"] + 1, "one for the end of another sink, none for its ten steps"
    assert seen[0]["addresses"] == seen[1]["addresses"] == 0
    assert seen[0]["walks"] == seen[1]["walks"] == 0, "the loop has walked through the batch"
    loop.close()


def test_a_scheduler_runs_ahead_while_the_device_works(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a sink's first step it gives that step's rate only: the device is idle."""
    planned: list[tuple[int, int]] = []
    loop = make_loop(steps_per_sync=4, scheduler=cosine)
    plan_on = loop.schedule.plan_on

    def noted(steps: int) -> list[list[float]]:
        planned.append((loop.engine._executed, steps))
        return plan_on(steps)

    monkeypatch.setattr(loop.schedule, "plan_on", noted)
    loop.run(make_batches(9))
    assert planned == [(0, 1), (1, 4), (0, 1), (1, 4), (0, 1)]
    loop.close()


@pytest.mark.parametrize(("scheduler", "writes"), [(None, 1), (cosine, 8)])
def test_rates_that_stay_as_they_are_are_sent_once(fake_cuda: FakeCuda, scheduler: Any, writes: int) -> None:
    loop = make_loop(steps_per_sync=2, scheduler=scheduler)
    loop.run(make_batches(8))
    assert loop.engine._rates._table._version == writes
    loop.close()


def test_the_producer_is_parked_while_a_step_is_tried_and_captured(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for waits sets a mode of the process, and a capture forbids what a producer does."""
    trial, capture, parked = CudaCapture.trial, CudaCapture.capture, list[tuple[str, bool]]()

    def look(name: str) -> None:
        asking = threading.Thread(target=lambda: parked.append((name, not is_free(gate))))
        asking.start()
        asking.join()

    def is_free(lock: Any) -> bool:
        if is_taken := lock.acquire(blocking=False):
            lock.release()
        return is_taken

    monkeypatch.setattr(CudaCapture, "trial", lambda *arguments: (look("trial"), trial(*arguments))[1])
    monkeypatch.setattr(CudaCapture, "capture", lambda *arguments: (look("capture"), capture(*arguments))[1])
    loop = make_loop(steps_per_sync=4)
    inputs, labels = map(torch.stack, zip(*[(batch[0][0], batch[1][0]) for batch in make_batches(40)], strict=True))
    with SinkLoader(DataLoader(TensorDataset(inputs, labels), batch_size=4, num_workers=1)) as loader:
        gate = loader._producer.gate
        loop.run(loader)
    assert parked == [("trial", True), *[("capture", True)] * 3]
    loop.close()


def test_all_slots_are_captured_at_the_first(fake_cuda: FakeCuda) -> None:
    loop = make_loop(steps_per_sync=4)
    begun: list[int] = []
    note = LambdaCallback(on_train_step_end=lambda _: begun.append(fake_cuda.graphs_begun))
    with SinkLoader(make_batches(8), slots=4) as loader:
        loop.run(loader, callbacks=[note])
    assert begun == [4, 4], "in the fourth step, behind three of warm-up"
    loop.close()


class LooksBack(torch.autograd.Function):
    """Looks at the gradient on the host: on CUDA in the thread in which autograd runs backward passes."""

    @staticmethod
    def forward(context: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        assert gradient.sum().item() == gradient.sum().item(), "looked at"
        return gradient


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model(dropout=0.0)

    def forward(self, inputs: Tensor) -> Tensor:
        return LooksBack.apply(self.inner(inputs))


def test_a_wait_in_the_backward_pass_is_found_by_the_trial(fake_cuda: FakeCuda) -> None:
    loop, batches = make_loop(model=Looking().cuda(), steps_per_sync=4), make_batches(6)
    history = loop.run(batches)
    assert f"the host waits for the device at {__file__}:" in loop.explain()
    assert fake_cuda.graphs_begun == 0
    assert (history.captured_steps, history.eager_steps) == (0, 6)
    torch.testing.assert_close(history.losses, plain("SGD", batches)[1], rtol=1e-5, atol=1e-6)
    assert any(thread == fake_cuda.engine.name for thread, _, _ in fake_cuda.waits), "all others are in its thread"
    inputs = torch.ones(2, device="cuda", requires_grad=True)
    with no_host_sync(), pytest.raises(HostSyncError, match=f"{__file__}:"):
        LooksBack.apply(inputs).sum().backward()
    loop.close()


def test_whoever_waits_for_the_device_sleeps(fake_cuda: FakeCuda) -> None:
    """A thread that spins until the device is done takes a core from the data workers."""
    loop = make_loop(steps_per_sync=4)
    samples = [(x, y) for inputs, labels in make_batches(8) for x, y in zip(inputs, labels, strict=True)]
    with SinkLoader(DataLoader(samples, batch_size=8, num_workers=1)) as loader:
        loop.run(loader)
        loop.evaluate(loader)
        fake_cuda.waits.clear()
        loop.run(loader, epochs=2)
        loop.evaluate(loader)
    waits, main = fake_cuda.waits, threading.current_thread().name
    assert waits[main, "event.synchronize", "sleeps"] == 4 + 1, "the ends of four sinks and of an evaluation"
    assert not [wait for wait in waits if wait[2] == "spins" and wait[1] != "torch.cuda.synchronize"]
    loop.close()


def test_no_host_sync_sees_its_own_thread_and_leaves_others_alone(fake_cuda: FakeCuda) -> None:
    value = torch.ones(2, device="cuda")
    failures: list[BaseException] = []

    def read() -> None:
        try:
            value.sum().item()
        except BaseException as error:
            failures.append(error)

    with no_host_sync():
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        with host_sync_allowed():
            value.sum().item()
        with pytest.raises(HostSyncError, match=rf"waits for the device at {__file__}:"):
            torch.linalg.eigvalsh(torch.eye(2, device="cuda"))
        with pytest.raises(HostSyncError, match=rf"waits for the device at {__file__}:\d+: torch's sync debug mode"):
            below_the_dispatcher(value)
    assert not failures
    value.sum().item()


def below_the_dispatcher(value: torch.Tensor) -> None:
    """A wait that no mode of the dispatcher sees, as inside a library's kernel."""
    with torch.utils._python_dispatch._disable_current_modes():
        value.sum().item()


@pytest.mark.parametrize("fake_cuda", [{"devices": 2}], indirect=True)
def test_values_are_gathered_on_the_models_device(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device may be another: a script that moves its model and sets no device leaves it at the first."""
    devices: list[int] = []

    def gather(gathered: list[Any], value: str) -> None:
        devices.append(torch.cuda.current_device())
        gathered[:] = [value, "other"]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    ranks = Ranks(make_model().to("cuda:1"))
    ranks.size = 2
    assert ranks.gather("mine") == ["mine", "other"]
    assert [*devices, torch.cuda.current_device()] == [1, 0]
