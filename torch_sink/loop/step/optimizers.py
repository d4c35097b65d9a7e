"""Optimizers: what Accelerate or Lightning Fabric wrapped around them, and what they need before a step is captured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from torch_sink.errors import UnsupportedOperation

_ADAMS = (torch.optim.Adam, torch.optim.AdamW)


def unwrap_optimizer(optimizer: Any, amp: str) -> torch.optim.Optimizer:
    """Look through the wrappers of Accelerate and Lightning Fabric, and refuse what cannot be stepped here."""
    if _scaler_of(optimizer) is not None and amp != "O0":
        raise ValueError(
            f"the optimizer was prepared with a loss scaler of its own and amp={amp!r} brings another; "
            "prepare it without mixed precision, or pass amp='O0'"
        )
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise TypeError(f"optimizer is the class {name}; pass an instance: {name}(model.parameters(), lr=...)")
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


def make_capturable(optimizer: torch.optim.Optimizer, *, cycles_betas: bool = False) -> None:
    """Set the flags that keep a CUDA optimizer's arithmetic on the device, and move its counters there.

    SGD, Adam and AdamW get their fused kernel, but for sharded parameters: SGD has no other form that reads the
    learning rate from the device, and that of the others takes a dozen kernels more and no overflow flag. It takes
    betas as numbers, so not where a scheduler cycles them. All others have the flag `capturable`. Parameters on the
    CPU are left alone.
    """
    for group in optimizer.param_groups:
        if not all(p.is_cuda and p.is_floating_point() for p in group["params"]):
            continue
        if "capturable" in group:
            group["capturable"] = True
        is_plain = type(optimizer) in (torch.optim.SGD, *_ADAMS) and not group.get("differentiable")
        sharded = any(hasattr(parameter, "to_local") for parameter in group["params"])
        if is_plain and not sharded and not cycles_betas and not group.get("fused"):
            group["fused"], group["foreach"] = True, False
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
            optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]
    for parameter, entries in optimizer.state.items():
        step = entries.get("step")
        if isinstance(step, Tensor) and parameter.is_cuda and not step.is_cuda:
            entries["step"] = step.to(parameter.device, torch.float32)


def capture_obstacle(optimizer: torch.optim.Optimizer, device: torch.device) -> str | None:
    """Why no step of the optimizer can be captured on `device`, or None where nothing is known to speak against it."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device != device:
                return f"{name} holds parameters on {parameter.device}, outside {device}"
            if not parameter.is_floating_point():
                return f"{name} holds parameters of {parameter.dtype}, whose steps read the learning rate on the host"
            if type(optimizer) is torch.optim.SGD and hasattr(parameter, "to_local"):
                return "SGD reads the learning rate of sharded parameters on the host"
    return None


def add_missing_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give SGD's fused kernel a zero buffer where a parameter gets its first gradient later than others.

    The kernel takes buffers for all or for none. Without dampening a buffer of zeros and none at all mean the same.
    """
    if type(optimizer) is not torch.optim.SGD:
        return
    for group in optimizer.param_groups:
        if not group.get("fused") or not group["momentum"] or group["dampening"]:
            continue
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        missing = [p for p in trained if optimizer.state[p].get("momentum_buffer") is None]
        if len(missing) < len(trained):
            for parameter in missing:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def hidden_state(optimizer: torch.optim.Optimizer, *, numbers_only: bool = False) -> list[str]:
    """Names of state entries that a graph would bake in: Python numbers, and tensors left on the CPU."""
    found: dict[str, None] = {}
    for owner, entries in optimizer.state.items():
        for name, value in entries.items():
            is_number = isinstance(value, (int, float)) and type(value) is not bool
            is_left = isinstance(value, Tensor) and owner.is_cuda and not value.is_cuda
            if is_number or (is_left and not numbers_only):
                found[str(name)] = None
    return list(found)


def refuse_python_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer counts in Python numbers, which neither a mask nor a captured graph can reach."""
    if found := hidden_state(optimizer, numbers_only=True):
        raise UnsupportedOperation(
            f"{type(optimizer).__name__} keeps Python numbers in its state ({', '.join(found)}), which cannot be "
            "skipped or replayed on the device; use an optimizer that keeps tensors, or mode='eager' without a scaler"
        )


def cycles_momentum(scheduler: Any) -> bool:
    """Whether a scheduler, or one inside it, writes momentum or betas into the groups at every step."""
    inner = getattr(scheduler, "_schedulers", None) or []
    return bool(getattr(scheduler, "cycle_momentum", False)) or any(cycles_momentum(member) for member in inner)


def takes_betas_from_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step can read its first beta from the device without the host.

    Adam and AdamW can, one tensor at a time. All others compare a momentum with zero on the host, and fused kernels
    take it as a number.
    """
    plain = not any(group.get("fused") or group.get("differentiable") for group in optimizer.param_groups)
    return plain and type(optimizer) in _ADAMS
