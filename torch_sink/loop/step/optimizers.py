"""Optimizers and schedulers: flags for captured steps, and learning rates by step, on the host or on the device."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from torch_sink.errors import SinkError, UnsupportedOperation
from torch_sink.loop.core.history import StepLog
from torch_sink.thread_waits import host_sync_allowed

When = Literal["step", "epoch", "applied"]
ADAMS = (torch.optim.Adam, torch.optim.AdamW)


def make_capturable(optimizer: torch.optim.Optimizer, *, cycles_betas: bool = False) -> None:
    """Set the flags that keep a CUDA optimizer's arithmetic on the device, and move its counters there.

    SGD, Adam and AdamW get their fused kernel. For SGD it is the only form that reads the learning rate from the
    device; for the others it saves a dozen kernels, and takes an overflow flag. Sharded parameters do not get it, nor
    do those whose betas a scheduler cycles (`cycles_betas`), which it takes as numbers. Other optimizers get the flag
    `capturable`. Parameters on the CPU are left as they are.
    """
    for group in optimizer.param_groups:
        if not all(p.is_cuda and p.is_floating_point() for p in group["params"]):
            continue
        if "capturable" in group:
            group["capturable"] = True
        is_plain = type(optimizer) in (torch.optim.SGD, *ADAMS) and not group.get("differentiable")
        sharded = any(hasattr(parameter, "to_local") for parameter in group["params"])
        if is_plain and not sharded and not cycles_betas and not group.get("fused"):
            group["fused"], group["foreach"] = True, False
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
            optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]
    for parameter, entries in optimizer.state.items():
        step = entries.get("step")
        if isinstance(step, Tensor) and parameter.is_cuda and not step.is_cuda:
            entries["step"] = step.to(parameter.device, torch.float32)


def add_missing_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give SGD's fused kernel a buffer where a parameter lacks one that others have, as one that joins late does.

    The kernel takes buffers for all parameters or for none. A parameter without one takes its first direction as it is,
    without dampening; so it gets the buffer from which the kernel computes just that: zeros, if nothing is dampened.
    """
    if type(optimizer) is not torch.optim.SGD:
        return
    for group in optimizer.param_groups:
        if not group.get("fused") or not group["momentum"]:
            continue
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        missing = [p for p in trained if optimizer.state[p].get("momentum_buffer") is None]
        if len(missing) < len(trained):
            for parameter in missing:
                optimizer.state[parameter]["momentum_buffer"] = buffer = torch.zeros_like(parameter)
                if group["dampening"]:
                    direction = parameter.grad.neg() if group["maximize"] else parameter.grad
                    with torch.no_grad():
                        direction = direction.add(parameter, alpha=group["weight_decay"])
                        buffer.copy_(direction * (group["dampening"] / group["momentum"]))


def leave_fused_for_sparse(optimizer: torch.optim.Optimizer) -> None:
    """Clear the flag `fused` of SGD's groups with sparse gradients, which only the other forms take.

    Embeddings with `sparse=True` make such gradients, from the first backward pass on.
    """
    for group in optimizer.param_groups:
        if group.get("fused") and any(p.grad is not None and p.grad.is_sparse for p in group["params"]):
            group["fused"] = False
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def hidden_state(optimizer: torch.optim.Optimizer, *, numbers_only: bool = False) -> list[str]:
    """Names of state entries that a graph would hold as constants: Python numbers, and tensors on the CPU."""
    found: dict[str, None] = {}
    for owner, entries in optimizer.state.items():
        for name, value in entries.items():
            is_number = isinstance(value, (int, float)) and type(value) is not bool
            is_left = isinstance(value, Tensor) and owner.is_cuda and not value.is_cuda
            if is_number or (is_left and not numbers_only):
                found[str(name)] = None
    return list(found)


def refuse_python_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer counts in Python numbers, which neither a mask nor a captured graph can change."""
    if found := hidden_state(optimizer, numbers_only=True):
        raise UnsupportedOperation(
            f"{type(optimizer).__name__} keeps Python numbers in its state ({', '.join(found)}), which cannot be "
            "skipped or replayed on the device; use an optimizer that keeps tensors, or mode='eager' without a scaler"
        )


def cycles_momentum(scheduler: Any) -> bool:
    """Whether a scheduler, or one inside it, changes momentum or betas at every step."""
    inner = getattr(scheduler, "_schedulers", None) or []
    return bool(getattr(scheduler, "cycle_momentum", False)) or any(cycles_momentum(member) for member in inner)


# Scheduler -> its place as a loop left it; several loops may step one scheduler.
_places: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()


class Schedule:
    """Steps a scheduler as a plain loop does, and keeps the learning rate of every iteration of a sink.

    `param_groups` holds Python numbers between steps, as schedulers, callbacks and checkpoints expect; it holds tensors
    only inside `RateTable.bound()`. A row of learning rates has one number per group; if the scheduler changes betas
    too (`cycles_betas`), the groups' first betas follow. The scheduler takes `repeats` steps at each epoch's end, or
    after each optimizer update, as `when` says. It must not be stepped by others as well, which `check_place` finds.

    If updates may be skipped and the scheduler steps after applied ones only (`counts_applied`), nobody on the host
    knows the learning rate of a step before its sink has ended. A plan then has a row for each number of applied
    updates, and the device counts them; `settle` puts the scheduler where it belongs.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any, *, when: When | None, repeats: int) -> None:
        self.optimizer, self.scheduler, self._repeats = optimizer, scheduler, repeats
        self.when = when
        self.counts_applied = False  # see above
        self._per_epoch = when == "epoch"
        self.updates: Sequence[bool] = ()  # of the sink's steps: whether an update follows
        self.cycles_betas = cycles_momentum(scheduler) and "betas" in optimizer.defaults
        self._rates: list[list[Any]] = []
        self._before_plan: tuple[Any, list[dict[str, Any]]] | None = None
        self._is_watched = False

    @property
    def runs_ahead(self) -> bool:
        """Whether to plan the rest of a sink while the device works on its first step: a scheduler takes time."""
        is_stepped = self.scheduler is not None and not self._per_epoch
        # The plan cannot wait for the device, as it would for a learning rate that is a tensor.
        return is_stepped and not any(isinstance(group["lr"], Tensor) for group in self.optimizer.param_groups)

    def start(self, updates: Sequence[bool]) -> None:
        """Begin a sink; `updates` tells for each planned step whether an update follows."""
        self.updates, self._rates = updates, []

    def before_step(self) -> None:
        """Keep the learning rates of the coming iteration."""
        groups = self.optimizer.param_groups
        values = [group["lr"] for group in groups] + [group["betas"][0] for group in groups if self.cycles_betas]
        # A copy: schedulers change a tensor in place, and its value is read at the sink's end only.
        self._rates.append([v.detach().clone() if isinstance(v, Tensor) else v for v in values])

    def advance(self, *, epoch_ended: bool = False, skipped: bool = False) -> None:
        """Step the scheduler, if it steps now: after an optimizer update, or at an epoch's end.

        `skipped` tells whether the update was skipped for overflow.
        """
        if self.scheduler is None or self._per_epoch != epoch_ended or (skipped and self.counts_applied):
            return
        self.check_place("code inside the training step")
        # Schedulers warn if they step before the optimizer, which a plan does on purpose.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        for _ in range(self._repeats):
            self.scheduler.step()
        self.take_place()

    def watch(self) -> None:
        """From here on only the loop steps the scheduler; before its first run, anybody may have moved it."""
        if not self._is_watched:
            self.take_place()
        self._is_watched = True

    def take_place(self) -> None:
        """Accept the scheduler's place as it is, such as that of a checkpoint."""
        if self.scheduler is not None:
            _places[self.scheduler] = _place_of(self.scheduler)

    def check_place(self, by: str) -> None:
        """Raise SinkError if the scheduler has moved on since a loop left it; `by` says who may have done it.

        Nothing is wrong with a scheduler that went back, as to a state that was saved.
        """
        if self.scheduler is None or not self._is_watched:
            return
        before = _places[self.scheduler]
        self.take_place()
        if not any(now > then for now, then in zip(_places[self.scheduler], before, strict=False)):
            return
        when = "at each epoch's end" if self._per_epoch else "after each update"
        raise SinkError(
            f"{by} stepped the scheduler, and the loop steps it too, {when} (schedule={self.when!r}): remove "
            "scheduler.step(), or make the loop without scheduler= and schedule= and step it yourself"
        )

    def rates(self, steps: int) -> Tensor:
        """The learning rates of the sink's first `steps` iterations: float64 [steps, groups]."""
        return self._table(_as_numbers(self._rates[:steps]))

    def plan(self, steps: int) -> list[list[float]]:
        """Run the scheduler ahead for the sink's first `steps` steps; returns the rows of learning rates."""
        self._before_plan = None
        if self.scheduler is not None and not self._per_epoch:
            groups = self.optimizer.param_groups
            options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
            # A copy: schedulers write to learning rates that are tensors.
            self._before_plan = copy.deepcopy((self.scheduler.state_dict(), options))
        return self.plan_on(steps)

    def plan_on(self, steps: int) -> list[list[float]]:
        """Continue a plan up to the sink's first `steps` steps; returns all rows."""
        self._run(steps)
        self._rates = _as_numbers(self._rates)
        return self._rates

    def rewind(self, steps: int) -> None:
        """Put the scheduler back to its state after `steps` steps of a plan that was not completed."""
        if self._go_back():
            self._run(steps)

    def settle(self, overflows: Tensor) -> Tensor:
        """Step a scheduler that counts applied updates to where it belongs after these steps; returns their rates.

        `overflows` is bool [steps]; the result float64 [steps, groups].
        """
        applied = [update and not skipped for update, skipped in zip(self.updates, overflows.tolist(), strict=False)]
        count = sum(applied)
        if len(self._rates) > count + 1:
            self._go_back()
        while len(self._rates) <= count:
            if self._rates:
                self.advance()
            self.before_step()
        rows = _as_numbers(self._rates)
        before = [0, *accumulate(applied)]
        return self._table([rows[number] for number in before[: len(applied)]])

    def _go_back(self) -> bool:
        """Undo the plan; False if it has not moved the scheduler."""
        if self._before_plan is None or self.scheduler is None:
            return False
        state, options = self._before_plan
        self.scheduler.load_state_dict(state)
        self.take_place()
        for group, values in zip(self.optimizer.param_groups, options, strict=True):
            group.update(values)
        self._rates = []
        return True

    def _run(self, steps: int) -> None:
        if self.scheduler is None or self._per_epoch:
            if not self._rates:
                self.before_step()
            self._rates = self._rates[:1] * steps
        elif self.counts_applied:
            while len(self._rates) < max(sum(self.updates[:steps]), 1):
                if self._rates:
                    self.advance()
                self.before_step()
        else:
            for step in range(len(self._rates), steps):
                self.before_step()
                if self.updates[step]:
                    self.advance()

    def _table(self, rows: list[list[float]]) -> Tensor:
        groups = len(self.optimizer.param_groups)
        if not rows:
            return torch.empty(0, groups, dtype=torch.float64, device="cpu")
        rows = [row[:groups] for row in rows] if self.cycles_betas else rows
        return torch.tensor(rows, dtype=torch.float64, device="cpu")


def _place_of(scheduler: Any) -> list[int]:
    """How far a scheduler, and those inside it, have stepped."""
    inner = [place for member in getattr(scheduler, "_schedulers", None) or [] for place in _place_of(member)]
    return [getattr(scheduler, "last_epoch", None) or 0, *inner]


def _as_numbers(rows: list[list[Any]]) -> list[list[float]]:
    """Rows with numbers in the place of tensors, which are copied to the host together."""
    tensors = [value.reshape(()).double() for row in rows for value in row if isinstance(value, Tensor)]
    if not tensors:
        return rows
    with host_sync_allowed():
        numbers = iter(torch.stack(tensors).tolist())  # host sync
    return [[next(numbers) if isinstance(value, Tensor) else value for value in row] for row in rows]


class RateTable:
    """A sink's learning rates on the device; a captured step reads the current row.

    That is the row of the step, at the log's cursor, or the one of the number of updates that were applied in this
    sink, which is counted here.
    """

    def __init__(self, schedule: Schedule, log: StepLog) -> None:
        self._optimizer, self._cycles_betas = schedule.optimizer, schedule.cycles_betas
        self._counts_applied = schedule.counts_applied
        index = torch.zeros(1, dtype=torch.int64, device=log.device) if self._counts_applied else log.cursor
        self._index: Tensor = index
        columns = self._columns(schedule)
        # Float64 keeps the bits of a Python float, which betas need, because they are subtracted from 1. On CUDA, fused
        # kernels read float32, and with another dtype foreach kernels would step one tensor at a time.
        pinned, capacity, device = log.device.type == "cuda", log.capacity, log.device
        dtype = torch.float32 if pinned and not self._cycles_betas else torch.float64
        self._host = torch.zeros(capacity, columns, dtype=dtype, device="cpu", pin_memory=pinned)
        self._table = torch.zeros(capacity, columns, dtype=dtype, device=device)
        self._row = torch.zeros(1, columns, dtype=dtype, device=device)
        self._rates = list(self._row[0].unbind(0))
        self._written: list[list[float]] = []

    def write(self, rows: list[list[float]]) -> None:
        """Queue a copy of the rows that the device lacks, of a new sink or of more steps of the current one.

        Rows that were written in this sink are not written again, because their copy may still be running.
        """
        count, known = len(rows), len(self._written)
        if rows == self._written[:count]:
            return
        first = known if rows[:known] == self._written else 0
        self._written = rows[:]
        self._host[first:count] = torch.tensor(rows[first:], dtype=self._host.dtype, device="cpu")
        self._table[first:count].copy_(self._host[first:count], non_blocking=True)

    def fits(self, schedule: Schedule, log: StepLog) -> bool:
        """Whether there is room for the optimizer's groups and for the steps of the log."""
        return self._table.shape == (log.capacity, self._columns(schedule))

    @staticmethod
    def _columns(schedule: Schedule) -> int:
        return len(schedule.optimizer.param_groups) * (2 if schedule.cycles_betas else 1)

    def start(self) -> None:
        """Begin a sink."""
        if self._counts_applied:
            self._index.zero_()

    def load_row(self) -> None:
        """Queue a copy, on the device, of the current row."""
        self._row.copy_(self._table.index_select(0, self._index))

    def count(self, found_inf: Tensor) -> None:
        """Count an update, unless `found_inf` (float32 [], 0 or 1) says that it was skipped."""
        if self._counts_applied:
            self._index.add_(1 - found_inf.long())

    @contextmanager
    def bound(self) -> Iterator[None]:
        """A context in which the optimizer reads the row on the device; afterwards it has its numbers back."""
        groups = self._optimizer.param_groups
        names = ["lr", "betas", "foreach"]
        kept = [{name: group[name] for name in names if name in group} for group in groups]
        for index, group in enumerate(groups):
            group["lr"] = self._rates[index]
            if self._cycles_betas:
                group["betas"] = (self._rates[len(groups) + index], group["betas"][1])
                group["foreach"] = False  # the foreach form reads betas on the host
        try:
            yield
        finally:
            for group, options in zip(groups, kept, strict=True):
                group.update(options)
