"""Checks of a user's arguments; each message says what is allowed and what to do."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from torch_sink.common.integrations import inner_optimizer, inner_scheduler, scaler_of

MODES = ("auto", "eager", "compile", "graph")


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(repr(choice) for choice in allowed)}")


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: pass True or False")


def check_count(name: str, value: Any, *, minimum: int, special: int | None = None, meaning: str = "") -> None:
    """Raise unless `value` is an int of at least `minimum`, or `special`, whose `meaning` the message names."""
    allowed = f"an int of at least {minimum}" + (f", or {special} for {meaning}" if special is not None else "")
    if isinstance(value, bool) or not isinstance(value, int):
        given = name if isinstance(value, (list, tuple, dict, torch.Tensor)) else f"{name}={value!r}"
        raise TypeError(f"{given} is a {type(value).__name__}; pass {allowed}")
    if value < minimum and value != special:
        raise ValueError(f"{name}={value}; pass {allowed}")


def unwrap_optimizer(optimizer: Any, amp: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer without the wrappers of other libraries; raises if the loop cannot train the model with it."""
    if scaler_of(optimizer) is not None and amp != "O0":
        raise ValueError(
            f"the optimizer was prepared with a loss scaler of its own and amp={amp!r} brings another; "
            "prepare it without mixed precision, or pass amp='O0'"
        )
    optimizer = inner_optimizer(optimizer)
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
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in owned for p in model.parameters()):  # as after `model.to()` made new ones
        raise ValueError(
            "optimizer holds none of the model's parameters; build it after the model is complete: "
            "torch.optim.SGD(model.parameters(), ...)"
        )
    return optimizer


def unwrap_scheduler(scheduler: Any, schedule: Any, optimizer: torch.optim.Optimizer) -> Any:
    """The scheduler without another library's wrapper; raises unless it belongs to the optimizer.

    `schedule` says when it steps; without a scheduler it may be left out.
    """
    if schedule is not None:
        check_choice("schedule", schedule, ("step", "epoch"))
    if scheduler is None:
        return None
    scheduler = inner_scheduler(scheduler)
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        raise TypeError(
            "ReduceLROnPlateau decides by a metric that is on the host only at a sink's end; "
            "pass callbacks=[torch_sink.ReduceLROnPlateau(...)] to run() instead of scheduler="
        )
    if isinstance(scheduler, type):
        name = scheduler.__name__
        raise TypeError(f"scheduler is the class {name}; pass an instance: {name}(optimizer, ...)")
    if not isinstance(scheduler, lr_scheduler.LRScheduler):
        raise TypeError(f"scheduler is a {type(scheduler).__name__}; pass a torch.optim.lr_scheduler.LRScheduler")
    owner = getattr(scheduler, "optimizer", None)
    if owner is not None and inner_optimizer(owner) is not optimizer:
        raise ValueError("scheduler changes another optimizer than the one passed; build it from this optimizer")
    if schedule is None:
        raise ValueError(
            f"scheduler={type(scheduler).__name__}(...) needs schedule=, which says when it steps: schedule='epoch' at "
            "each epoch's end, where most tutorials call scheduler.step(); schedule='step' after each optimizer "
            "update, for schedules that count updates, such as OneCycleLR"
        )
    return scheduler


def resolve_device(actual: torch.device, device: torch.device | str | None) -> torch.device:
    """The device of the model's parameters (`actual`); raises ValueError if `device` is given and is another one."""
    if device is None:
        return actual
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a device, such as 'cuda' or 'cpu': {error}") from error
    if wanted.type != actual.type or (wanted.index is not None and wanted.index != actual.index):
        raise ValueError(f"device={str(wanted)!r}, but the model is on {actual}; move it: model.to({str(wanted)!r})")
    return actual


def check_takes(name: str, function: Any, *arguments: str) -> None:
    """Raise TypeError if a function cannot take these positional arguments; one without a signature passes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{name} is called with ({', '.join(arguments)}), which it does not take: {error}") from error


def check_model(model: Any, loss_fn: Any, forward: Any, *, trains: bool) -> None:
    """Raise unless `model`, `loss_fn` and `forward` can be used: for training if `trains`, else for evaluation only.

    Training needs `loss_fn` or `forward`, which computes its loss; without training both may be None.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    if trains and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model has no parameter that requires a gradient, so there is nothing to train")
    if forward is not None and not callable(forward):
        raise TypeError(f"forward is a {type(forward).__name__}; pass a function of (model, batch)")
    if forward is not None:
        check_takes("forward", forward, "model", "batch")
    if isinstance(loss_fn, torch.optim.Optimizer):
        raise TypeError(f"loss_fn is the optimizer, a {type(loss_fn).__name__}; the order is model, loss_fn, optimizer")
    if forward is None and isinstance(loss_fn, type):
        raise TypeError(f"loss_fn is the class {loss_fn.__name__}; pass an instance: {loss_fn.__name__}()")
    if forward is None and not callable(loss_fn) and (trains or loss_fn is not None):
        raise TypeError(
            f"loss_fn is a {type(loss_fn).__name__}; pass a function of (outputs, targets), "
            "or forward= for batches that are not (x, y)"
        )
