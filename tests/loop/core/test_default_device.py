"""A script may name a default device for the tensors it makes: the loop's own stay where they belong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch.nn import functional

from loop.reference import make_batches, make_model
from torch_sink.amp import DynamicLossScaler
from torch_sink.loop import JitConfig, StepLoop
from torch_sink.sink import SinkLoader


def train(default: torch.device, device: str, **options: Any) -> list[torch.Tensor]:
    """Losses, rates and weights of a short training, all of it under a default device."""
    batches, model = make_batches(6), make_model(dropout=0.0).to(device)
    with default:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loop = StepLoop(
            model, functional.cross_entropy, optimizer, scheduler=scheduler, schedule="step", steps_per_sync=3,
            loss_scaler=DynamicLossScaler(2.0**8, 2, 50), **options,
        )  # fmt: skip
        with SinkLoader(batches, device=device) as loader:
            history = loop.run(loader)
        found = [history.losses, history.overflows, history.learning_rates]
    return [*found, *(weight.detach().cpu() for weight in model.parameters())]


def test_a_default_device_changes_nothing() -> None:
    elsewhere = train(torch.device("meta"), "cpu")
    expected = train(torch.device("cpu"), "cpu")
    assert all(torch.equal(*pair) for pair in zip(elsewhere, expected, strict=True))


def refuses_to_pin(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As torch does what is not on the host."""

    def made(*args: Any, pin_memory: bool = False, device: Any = None, **options: Any) -> torch.Tensor:
        if pin_memory and torch.device(device or torch.get_default_device()).type != "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return make(*args, pin_memory=pin_memory, device=device, **options)

    return made


def test_pinned_memory_stays_on_the_host(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty", "zeros"):
        monkeypatch.setattr(torch, name, refuses_to_pin(getattr(torch, name)))
    options = {"mode": "graph", "jit_config": JitConfig(jit_level="O0", exc_mode="sink")}
    elsewhere = train(torch.device("cuda"), "cuda", **options)
    expected = train(torch.device("cpu"), "cuda", **options)
    assert all(torch.equal(*pair) for pair in zip(elsewhere, expected, strict=True))
