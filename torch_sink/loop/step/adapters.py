"""Models and optimizers that Accelerate or Lightning Fabric prepared: what is inside, and what they would do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import distributed, nn


def unwrap_optimizer(optimizer: Any, amp: str) -> torch.optim.Optimizer:
    """Look through the wrappers of Accelerate and Lightning Fabric, and refuse what cannot be stepped here.

    Raises:
        TypeError: not an optimizer, or one that needs a closure.
        ValueError: the wrapper scales the loss itself although `amp` is not "O0".
    """
    if _scaler_of(optimizer) is not None and amp != "O0":
        raise ValueError(
            f"the optimizer was prepared with a loss scaler of its own and amp={amp!r} brings another; "
            "prepare it without mixed precision, or pass amp='O0'"
        )
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS evaluates the loss several times a step and decides on the host, so it cannot run without host "
            "syncs; pass any other torch.optim optimizer, or keep LBFGS in a loop of your own"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError("SparseAdam counts steps on the host and takes sparse gradients; pass a dense optimizer")
    return optimizer


def own_scaler(optimizer: Any) -> torch.amp.GradScaler | None:
    """The enabled GradScaler that a prepared optimizer would step through: its model computes in float16."""
    scaler = _scaler_of(optimizer)
    return scaler if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None


def scheduler_repeats(scheduler: Any) -> int:
    """Steps of a prepared scheduler per optimizer update.

    Accelerate's wrapper steps once for every process, because a schedule is written for the steps of one: each
    process sees its share of the batches only.
    """
    if not getattr(scheduler, "step_with_optimizer", False) or getattr(scheduler, "split_batches", True):
        return 1
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _scaler_of(optimizer: Any) -> Any:
    scaler = getattr(optimizer, "scaler", None)  # Accelerate
    if scaler is None:
        scaler = getattr(getattr(getattr(optimizer, "_strategy", None), "precision", None), "scaler", None)  # Fabric
    return scaler


def backward_context(model: nn.Module) -> Callable[[], AbstractContextManager[None]] | None:
    """What a backward pass through the model has to run in, or None.

    A model that Fabric set up with mixed precision accepts backward passes of `fabric.backward` only, which scales the
    loss and does nothing else; the loop scales it itself.
    """
    module: Any = sys.modules.get(type(model).__module__)
    if type(model).__name__ != "_FabricModule" or not hasattr(module, "_in_fabric_backward"):
        return None

    @contextmanager
    def inside() -> Iterator[None]:
        before, module._in_fabric_backward = module._in_fabric_backward, True
        try:
            yield
        finally:
            module._in_fabric_backward = before

    return inside
