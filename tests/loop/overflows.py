"""Batches of which some make the gradients infinite, for tests of updates that a loss scaler skips."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def make_small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batches_with_overflows(infinite: Collection[int], count: int) -> list[Any]:
    """Batches (inputs [4, 6], classes [4], factor of the loss), the same for any `count`; `infinite` names steps."""
    draw = torch.Generator().manual_seed(1)
    batches = []
    for step in range(count):
        factor = torch.tensor(math.inf if step in infinite else 1.0)
        batches.append((torch.randn(4, 6, generator=draw), torch.randint(0, 3, (4,), generator=draw), factor))
    return batches


def loss_with_factor(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets, factor = batch
    return functional.cross_entropy(model(inputs), targets) * factor
