"""The state of a training: model, optimizer and options, and the number of steps so far."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_sink.common.integrations import own_scaler, scheduler_repeats
from torch_sink.errors import SinkError
from torch_sink.loop.core import arguments as check
from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.core.history import Progress, RunHistory
from torch_sink.loop.step.optimizers import Schedule
from torch_sink.loop.step.precision import Function, Precision, make_precision, resolve_level
from torch_sink.loop.step.scaler import DynamicLossScaler, OverflowCount, StaticLossScaler, resolve_loss_scaler
from torch_sink.loop.step.update import WeightAverage

_log = logging.getLogger("torch_sink")


class TrainState:
    """Everything that the next step depends on except the batch; runs, engines, checkpoints and evaluations share it.

    The arguments are those of `StepLoop`.

    Attributes:
        optimizer: without the wrappers of other libraries; None, like `schedule`, for a loop that does not train.
        schedule: when the scheduler steps, and the learning rate of each step.
        average: moving average of the weights, or None.
        step_count: iterations trained so far, in all runs.
        progress: of the current run, or of the latest one.
        history: of the same run; None before the first.
        is_resumed: whether the next run completes the run of a loaded state.

    Raises:
        TypeError, ValueError: an argument that cannot be used; the message says what can.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: torch.optim.Optimizer | None,
        *,
        amp: str,
        amp_dtype: torch.dtype,
        loss_scaler: str | StaticLossScaler | None,
        scheduler: Any,
        schedule: str | None,
        clip_grad_norm: float | None,
        accumulate: int,
        ema: float | None,
        forward: Function | None,
        device: torch.device | str | None,
    ) -> None:
        check.check_model(model, trains=optimizer is not None)
        check.check_functions(loss_fn, forward, trains=optimizer is not None)
        check.check_count("accumulate", accumulate, minimum=1)
        check.check_clip(clip_grad_norm)
        self.ranks = Ranks(model)
        self.model, self.loss_fn, self.forward = model, loss_fn, forward
        self.accumulate, self.clip_grad_norm = accumulate, clip_grad_norm
        self.device = check.resolve_device(self.ranks.device, device)
        self.model_devices = frozenset(parameter.device for parameter in model.parameters())
        self.average = WeightAverage(model, ema) if ema is not None else None
        level = resolve_level(amp, amp_dtype, model, self.device)
        self.optimizer, self.scheduler, self.schedule = self._trained_by(optimizer, level, scheduler, schedule)
        self.scaler = resolve_loss_scaler(loss_scaler, level, amp_dtype, self.device, own_scaler(optimizer))
        if isinstance(self.scaler, DynamicLossScaler) and level != "O0" and amp_dtype is torch.bfloat16:
            _log.warning("bfloat16 has the range of float32, so a DynamicLossScaler does nothing for it; leave it out")
        self.overflows = OverflowCount(self.scaler, accumulate)
        self.step_count = 0
        self.progress = Progress()
        self.history: RunHistory | None = None
        self.is_resumed = False
        # Last, because its hooks must not stay on a model after an error, nor be copied into the average.
        self.precision = make_precision(level, amp_dtype, self.device.type, model)

    def _trained_by(self, given: Any, level: str, given_scheduler: Any, schedule: str | None) -> tuple[Any, Any, Any]:
        """Optimizer and scheduler without wrappers, and their schedule; None for each without an optimizer."""
        if given is None:
            for name, value in (("scheduler", given_scheduler), ("schedule", schedule)):
                if value is not None:
                    raise ValueError(f"{name}= needs an optimizer; without one a loop evaluates and predicts only")
            return None, None, None
        optimizer = check.unwrap_optimizer(given, level)
        check.check_optimizer_covers(self.model, optimizer)
        scheduler = check.unwrap_scheduler(given_scheduler, optimizer)
        check.check_schedule(schedule, scheduler)
        repeats, per_epoch = scheduler_repeats(given_scheduler), schedule == "epoch"
        made = Schedule(optimizer, scheduler, per_epoch=per_epoch, accumulate=self.accumulate, repeats=repeats)
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

    def ema_model(self) -> nn.Module:
        """The model with averaged weights.

        Raises:
            SinkError: there is no average.
        """
        if self.average is None:
            raise SinkError("this loop keeps no average of the weights; make it with StepLoop(..., ema=0.999)")
        return self.average.model()

    def judging(self, model: nn.Module, forward: Function | None, precision: Precision | None = None) -> TrainState:
        """A copy of the state with another model, forward function and precision, for an evaluation."""
        other = copy.copy(self)
        other.model, other.forward, other.precision = model, forward, precision or self.precision
        return other
