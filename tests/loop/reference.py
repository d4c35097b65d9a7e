"""The plain PyTorch loop that StepLoop is compared with, and small models and data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_sink.loop import StepLoop


def make_model(seed: int = 0, *, dropout: float = 0.25, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Convolution, BatchNorm, dropout, linear: for inputs [batch, 3, 8, 8] and 5 classes."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.AvgPool2d(4),  # the adaptive one has no deterministic backward pass on CUDA
        nn.Flatten(),
        nn.Linear(24, 5),
    ).to(dtype)


def make_batches(count: int, seed: int = 1, *, size: int = 8, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Random (x, y) batches: x [size, 3, 8, 8], y int64 [size]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 3, 8, 8, generator=generator, dtype=dtype),
            torch.randint(0, 5, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def step_loop(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> StepLoop:
    """A StepLoop of cross entropy; `scheduler` makes one of the optimizer, which goes on after each step."""
    make_scheduler = options.pop("scheduler", None)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    return StepLoop(model, functional.cross_entropy, optimizer, scheduler=scheduler, schedule="step", **options)


def plain_loop(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    *,
    scheduler: Any = None,
    clip: float | None = None,
    accumulate: int = 1,
    per_epoch: int | None = None,
    context: Any = None,
) -> tuple[Tensor, Tensor]:
    """Train as the PyTorch tutorials do; returns losses [steps] and learning rates [steps, groups].

    `per_epoch`: batches of an epoch, whose last ones make an update too where `accumulate` does not divide them.
    """
    losses, rates = [], []
    for step, (inputs, targets) in enumerate(batches):
        place = step % per_epoch if per_epoch else step
        if place % accumulate == 0:
            optimizer.zero_grad()
        if context is None:
            loss = loss_fn(model(inputs), targets)
        else:
            with context():
                loss = loss_fn(model(inputs), targets)
        losses.append(loss.item())
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        (loss / accumulate if accumulate > 1 else loss).backward()
        if (place + 1) % accumulate == 0 or place + 1 == per_epoch:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return torch.tensor(losses), torch.tensor(rates, dtype=torch.float64)


def assert_equal_training(
    ours: tuple[nn.Module, torch.optim.Optimizer], plain: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    """Parameters, buffers and optimizer state are equal, bit for bit."""
    for (name, value), expected in zip(ours[0].state_dict().items(), plain[0].state_dict().values(), strict=True):
        assert torch.equal(value, expected), f"{name} differs by {(value - expected).abs().max()}"
    our_state, plain_state = ours[1].state_dict()["state"], plain[1].state_dict()["state"]
    assert our_state.keys() == plain_state.keys()
    for index, entries in plain_state.items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                assert torch.equal(our_state[index][name], value), (
                    f"optimizer state {name} of parameter {index} differs"
                )
            else:
                assert our_state[index][name] == value
