"""What a CUDA device has to show: capture, equality with an uncaptured run, no waits, memory.

Where there is no device, a fake one takes its place, so that these tests themselves are tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from simulators.fake_cuda import has_device
from torch import nn
from torch.nn import functional

from loop.reference import make_batches, make_model, step_loop
from torch_sink.amp import DynamicLossScaler
from torch_sink.loop import JitConfig, LambdaCallback, StepLoop, no_host_sync
from torch_sink.sink import SinkLoader

pytestmark = [pytest.mark.halved, pytest.mark.cuda(rehearsed=True)]
# Asked for by deterministic cuBLAS, which reads it when it is used first.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

COUNT = 20 if has_device() else 9  # batches of an epoch
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make_loop(name: str = "SGD", **options: Any) -> StepLoop:
    model = make_model(dropout=options.pop("dropout", 0.25)).cuda()
    optimizer = OPTIMIZERS[name](model.parameters())
    torch.manual_seed(5)
    options.setdefault("jit_config", JitConfig(jit_level="O0", exc_mode="sink"))
    return step_loop(model, optimizer, **options)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled(4)
def test_captured_equals_uncaptured_with_the_same_flags(name: str, accumulate: int) -> None:
    batches = make_batches(COUNT)
    captured = make_loop(name, mode="graph", scheduler=cosine, steps_per_sync=7, accumulate=accumulate, dropout=0.0)
    history = captured.run(batches, epochs=2)
    assert "mode: graph" in captured.explain(), captured.explain()
    assert 2 * history.captured_steps > history.steps, captured.explain()
    flags = ("fused", "foreach", "capturable")
    reference = make_loop(name, mode="eager", scheduler=cosine, steps_per_sync=7, accumulate=accumulate, dropout=0.0)
    for group, other in zip(reference.optimizer.param_groups, captured.optimizer.param_groups, strict=True):
        group.update({flag: other[flag] for flag in flags if flag in other})
    expected = reference.run(batches, epochs=2)
    torch.testing.assert_close(history.losses, expected.losses, rtol=1e-4, atol=1e-5)
    assert torch.equal(history.learning_rates, expected.learning_rates)


def test_dropout_changes_from_replay_to_replay() -> None:
    loop = make_loop(mode="graph", steps_per_sync=10, dropout=0.9)
    for group in loop.optimizer.param_groups:
        group["lr"] = 0.0
    batch = make_batches(1)[0]
    losses = loop.run([batch] * 30).losses[10:]
    assert losses.unique().numel() > 15


def test_no_wait_inside_a_sink() -> None:
    loop = make_loop(mode="graph", steps_per_sync=10, loss_scaler=DynamicLossScaler(16.0), ema=0.9)
    loader = SinkLoader(make_batches(40))
    loop.run(loader)
    with no_host_sync():
        history = loop.run(loader)
    assert history.host_syncs == 4


def test_overflows_are_skipped_in_replays() -> None:
    batches = make_batches(16)
    for step in (0, 9, 12):
        batches[step][0].fill_(float("inf"))
    loop = make_loop("Adam", mode="graph", steps_per_sync=4, loss_scaler=DynamicLossScaler(16.0, 2, 100))
    history = loop.run(batches)
    assert history.overflows.nonzero().flatten().tolist() == [0, 9, 12]
    assert all(bool(parameter.isfinite().all()) for parameter in loop.model.parameters())
    assert loop.scaler.scale_value.item() == 2.0
    assert loop.optimizer.state[loop.model[0].weight]["step"].item() == 13


def test_odd_shapes_and_changed_options() -> None:
    def change(context: Any) -> None:
        context.original_args().optimizer.param_groups[0]["weight_decay"] = 0.1

    loop = make_loop(mode="graph", steps_per_sync=8)
    loop.run([*make_batches(15), *make_batches(1, size=3)], callbacks=[LambdaCallback(on_train_step_end=change)])
    assert "another shape" in loop.explain()
    assert "captured again" in loop.explain()


def test_a_model_that_waits_steps_down_and_is_named() -> None:
    class Syncing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()

        def forward(self, inputs: Any) -> Any:
            outputs = self.inner(inputs)
            self.largest = outputs.max().item()
            return outputs

    model = Syncing().cuda()
    loop = StepLoop(
        model,
        functional.cross_entropy,
        torch.optim.SGD(model.parameters(), lr=0.1),
        jit_config=JitConfig(jit_level="O0", exc_mode="sink"),
    )
    assert loop.run(make_batches(10)).losses.isfinite().all()
    assert "cannot be captured" in loop.explain()
    assert "test_cuda.py:" in loop.explain()


@pytest.mark.cuda
def test_training_goes_on_after_a_capture_that_failed() -> None:
    script = Path(__file__).with_name("failed_capture.py")
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    failed, _, captured = done.stdout.partition("finite: True")
    assert "mode: eager" in failed
    assert "cannot be captured" in failed
    assert f"(at {script}:" in failed
    assert "mode: graph" in captured
    assert "finite: True" in captured


def test_memory_does_not_grow() -> None:
    loop, loader = make_loop(mode="graph", steps_per_sync=10), SinkLoader(make_batches(COUNT))
    loop.run(loader, epochs=2)
    before = torch.cuda.memory_allocated()
    loop.run(loader, epochs=5)
    assert torch.cuda.memory_allocated() <= before
    loop.close()


@pytest.mark.cuda
def test_compiled_and_captured() -> None:
    loop = make_loop(mode="graph", steps_per_sync=10, jit_config=None, dropout=0.0)
    history = loop.run(make_batches(30))
    assert "mode: graph" in loop.explain(), loop.explain()
    assert "compiling failed" not in loop.explain(), loop.explain()
    assert history.eager_steps == 0, loop.explain()
    assert history.captured_steps > 20, loop.explain()
    eager = make_loop(mode="eager", steps_per_sync=10, dropout=0.0).run(make_batches(30))
    assert history.losses[0].item() == pytest.approx(eager.losses[0].item(), rel=1e-4)
    torch.testing.assert_close(history.losses, eager.losses, rtol=0.05, atol=0.05)


def test_a_model_on_the_cpu_is_told_apart_from_batches_on_the_device() -> None:
    model = make_model()
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"the model is on cpu, the batch on cuda:0"):
        loop.run(SinkLoader(make_batches(2), device="cuda"))
