"""What an optimizer needs before its step can be captured: state on the device, no arithmetic on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ADAMS = (torch.optim.Adam, torch.optim.AdamW)


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
        if _fuses(optimizer, group) and not group.get("fused") and not cycles_betas:
            group["fused"], group["foreach"] = True, False
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
            optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]
    for parameter, entries in optimizer.state.items():
        step = entries.get("step")
        if isinstance(step, Tensor) and parameter.is_cuda and not step.is_cuda:
            entries["step"] = step.to(parameter.device, torch.float32)


def _fuses(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    is_plain = type(optimizer) in (torch.optim.SGD, *_ADAMS) and not group.get("differentiable")
    return is_plain and not any(hasattr(parameter, "to_local") for parameter in group["params"])


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


def host_state(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of state entries that lie on the CPU although their parameter does not: a graph would bake them in."""
    names = {
        str(name)
        for parameter, entries in optimizer.state.items()
        for name, value in entries.items()
        if isinstance(value, Tensor) and value.device.type == "cpu" and parameter.device.type != "cpu"
    }
    return sorted(names)


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
