"""The state of a training, and the checks of what it is made of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from torch_sink.common.arguments import check_above_zero, check_choice, check_count, check_takes, named_device
from torch_sink.common.integrations import inner_optimizer, inner_scheduler, own_scaler, scaler_of, scheduler_repeats
from torch_sink.common.ranks import warn
from torch_sink.errors import SinkError
from torch_sink.loop.core.author import Author
from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.core.history import Progress, RunHistory
from torch_sink.loop.step.optimizers import Schedule, When
from torch_sink.loop.step.precision import Function, Level, Precision, make_precision, resolve_level
from torch_sink.loop.step.scaler import DynamicLossScaler, OverflowCount, StaticLossScaler, resolve_loss_scaler
from torch_sink.loop.step.update import WeightAverage


class TrainState:
    """Everything that the next step depends on except the batch; runs, engines, checkpoints and evaluations share it.

    The arguments are those of `StepLoop`. For a loop that does not train, `optimizer` and `schedule` are None.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: torch.optim.Optimizer | None,
        *,
        amp: Level,
        amp_dtype: torch.dtype,
        loss_scaler: Literal["default"] | StaticLossScaler | None,
        scheduler: Any,
        schedule: When | None,
        clip_grad_norm: float | None,
        accumulate: int,
        ema: float | None,
        forward: Function | None,
        device: torch.device | str | None,
    ) -> None:
        check_model(model, loss_fn, forward, trains=optimizer is not None)
        check_count("accumulate", accumulate, minimum=1)
        if clip_grad_norm is not None:
            check_above_zero("clip_grad_norm", clip_grad_norm, "None not to clip")
        self.ranks = Ranks(model)
        self.model, self.loss_fn, self.forward = model, loss_fn, forward
        self.accumulate, self.clip_grad_norm = accumulate, clip_grad_norm
        self.device = actual = self.ranks.device
        if device is not None:
            wanted = named_device(device)
            if wanted.type != actual.type or (wanted.index is not None and wanted.index != actual.index):
                move = f"model.to({str(wanted)!r})"
                raise ValueError(f"device={str(wanted)!r}, but the model is on {actual}; move it: {move}")
        self.model_devices = frozenset(parameter.device for parameter in model.parameters())
        self.average = WeightAverage(model, ema) if ema is not None else None
        level = resolve_level(amp, amp_dtype, model, self.device)
        self.optimizer, self.scheduler, self.schedule = self._trained_by(optimizer, level, scheduler, schedule)
        self.scaler = resolve_loss_scaler(loss_scaler, level, amp_dtype, self.device, own_scaler(optimizer))
        if isinstance(self.scaler, DynamicLossScaler) and level != "O0" and amp_dtype is torch.bfloat16:
            warn("bfloat16 has the range of float32, so a DynamicLossScaler does nothing for it; leave it out")
        self.overflows = OverflowCount(self.scaler)
        if self.schedule is not None:
            self.schedule.counts_applied = self.schedule.when == "applied" and self.scaler is not None
        self.step_count = 0  # iterations trained so far, in all runs
        self.progress = Progress()  # of the current run, or of the latest one
        self.history: RunHistory | None = None  # of the same run
        self.author = Author()  # of the checkpoints: which training this is
        self.told_folders: set[Path] = set()  # with checkpoints of others, which was said
        self.told_parts: set[str] = set()  # of the loss function's state that are not saved, which was said
        # What the program gave with the loss function, copied to the host; None for what training is known to change.
        self.given: dict[str, Tensor | None] = {}
        self.is_resumed = False  # whether the next run completes the run of a loaded state
        # Last, because its hooks must not stay on a model after an error, nor be copied into the average.
        self.precision = make_precision(level, amp_dtype, self.device.type, model)
        if self.average is not None:
            self.average.leaves_out = self.precision.casts

    def _trained_by(self, given: Any, level: str, given_scheduler: Any, schedule: When | None) -> tuple[Any, Any, Any]:
        """Optimizer and scheduler without wrappers, and their schedule; None for each without an optimizer."""
        if given is None:
            for name, value in (("scheduler", given_scheduler), ("schedule", schedule)):
                if value is not None:
                    raise ValueError(f"{name}= needs an optimizer; without one a loop evaluates and predicts only")
            return None, None, None
        optimizer = unwrap_optimizer(given, level, self.model)
        scheduler = unwrap_scheduler(given_scheduler, schedule, optimizer)
        when = schedule if scheduler is not None else None
        made = Schedule(optimizer, scheduler, when=when, repeats=scheduler_repeats(given_scheduler))
        return optimizer, scheduler, made

    def describe(self) -> list[str]:
        """Precision, loss scaler, number of steps and optimizer, as lines of text."""
        precision, scaler, optimizer = self.precision, self.scaler, self.optimizer
        return [
            f"amp: {precision.level}" + ("" if precision.level == "O0" else f" {precision.dtype}"),
            f"loss scaler: {type(scaler).__name__ if scaler is not None else 'none'}",
            f"steps: {self.step_count}, optimizer: {type(optimizer).__name__ if optimizer is not None else 'none'}, "
            f"accumulate: {self.accumulate}",
        ]

    def follow(self) -> None:
        """Take over layers that the model has got since the last call, as from a callback or between two runs."""
        self.precision.follow(self.model)
        if self.average is not None:
            self.average.follow()

    def ema_model(self) -> nn.Module:
        """The model with averaged weights; raises SinkError if there is no average."""
        if self.average is None:
            raise SinkError("this loop keeps no average of the weights; make it with StepLoop(..., ema=0.999)")
        return self.average.model()

    def judging(self, model: nn.Module, forward: Function | None, precision: Precision | None = None) -> TrainState:
        """A copy of the state with another model, forward function and precision, for an evaluation."""
        other = copy.copy(self)
        other.model, other.forward, other.precision = model, forward, precision or self.precision
        return other


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
        check_choice("schedule", schedule, get_args(When))
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


def check_forward(forward: Any) -> None:
    """Raise TypeError unless `forward` is None, or a function of a model and a batch."""
    if forward is None:
        return
    if not callable(forward):
        raise TypeError(f"forward is a {type(forward).__name__}; pass a function of (model, batch)")
    check_takes("forward", forward, "model", "batch")


def check_model(model: Any, loss_fn: Any, forward: Any, *, trains: bool) -> None:
    """Raise unless `model`, `loss_fn` and `forward` can be used: for training if `trains`, else for evaluation only.

    Training needs `loss_fn` or `forward`, which computes its loss; without training both may be None.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    if trains and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model has no parameter that requires a gradient, so there is nothing to train")
    check_forward(forward)
    if isinstance(loss_fn, torch.optim.Optimizer):
        raise TypeError(f"loss_fn is the optimizer, a {type(loss_fn).__name__}; the order is model, loss_fn, optimizer")
    if forward is None and isinstance(loss_fn, type):
        raise TypeError(f"loss_fn is the class {loss_fn.__name__}; pass an instance: {loss_fn.__name__}()")
    if forward is None and not callable(loss_fn) and (trains or loss_fn is not None):
        raise TypeError(
            f"loss_fn is a {type(loss_fn).__name__}; pass a function of (outputs, targets), "
            "or forward= for batches that are not (x, y)"
        )
