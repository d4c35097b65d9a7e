"""Optimizers and schedulers: flags for captured steps, and learning rates by step, on the host or on the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torch_sink.errors import UnsupportedOperation
from torch_sink.loop.core.history import StepLog
from torch_sink.thread_waits import host_sync_allowed

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
    """Give SGD's fused kernel a zero buffer where a parameter gets its first gradient later than others.

    The kernel takes buffers for all parameters or for none. Without dampening, a buffer of zeros equals no buffer.
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


class Schedule:
    """Steps a scheduler as a plain loop does, and keeps the learning rate of every iteration of a sink.

    `param_groups` holds Python numbers between steps, as schedulers, callbacks and checkpoints expect; it holds tensors
    only inside `RateTable.bound()`. A row of learning rates has one number per group; if the scheduler changes betas
    too (`cycles_betas`), the groups' first betas follow. The scheduler takes `repeats` steps at each epoch's end
    (`per_epoch`), or after each optimizer update.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Any, *, per_epoch: bool, accumulate: int, repeats: int
    ) -> None:
        self.optimizer, self.scheduler, self._repeats = optimizer, scheduler, repeats
        self._per_epoch, self._accumulate = per_epoch, accumulate
        self.cycles_betas = cycles_momentum(scheduler) and "betas" in optimizer.defaults
        self._rates: list[list[Any]] = []
        self._before_plan: tuple[Any, list[dict[str, Any]]] | None = None

    @property
    def runs_ahead(self) -> bool:
        """Whether to plan the rest of a sink while the device works on its first step: a scheduler takes time."""
        is_stepped = self.scheduler is not None and not self._per_epoch
        # The plan cannot wait for the device, as it would for a learning rate that is a tensor.
        return is_stepped and not any(isinstance(group["lr"], Tensor) for group in self.optimizer.param_groups)

    def start(self) -> None:
        """Begin a sink."""
        self._rates = []

    def before_step(self) -> None:
        """Keep the learning rates of the coming iteration."""
        groups = self.optimizer.param_groups
        values = [group["lr"] for group in groups] + [group["betas"][0] for group in groups if self.cycles_betas]
        # A copy: schedulers change a tensor in place, and its value is read at the sink's end only.
        self._rates.append([v.detach().clone() if isinstance(v, Tensor) else v for v in values])

    def advance(self, *, epoch_ended: bool = False) -> None:
        """Step the scheduler, if it steps now: after an optimizer update, even a skipped one, or at an epoch's end."""
        if self.scheduler is None or self._per_epoch != epoch_ended:
            return
        # Schedulers warn if they step before the optimizer, which a plan does on purpose.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        for _ in range(self._repeats):
            self.scheduler.step()

    def rates(self, steps: int) -> Tensor:
        """The learning rates of the sink's first `steps` iterations: float64 [steps, groups]."""
        groups = len(self.optimizer.param_groups)
        rows = [row[:groups] for row in _as_numbers(self._rates[:steps])]
        return torch.tensor(rows, dtype=torch.float64, device="cpu")

    def plan(self, steps: int, iteration: int) -> list[list[float]]:
        """Run the scheduler ahead for the `steps` iterations after `iteration`; returns a row for each."""
        self._before_plan = None
        self.start()
        if self.scheduler is not None and not self._per_epoch:
            groups = self.optimizer.param_groups
            options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
            # A copy: schedulers write to learning rates that are tensors.
            self._before_plan = copy.deepcopy((self.scheduler.state_dict(), options))
        return self.plan_on(steps, iteration)

    def plan_on(self, steps: int, iteration: int) -> list[list[float]]:
        """Continue a plan up to `steps` rows in all, which are returned."""
        self._run(steps, iteration)
        self._rates = _as_numbers(self._rates)
        return self._rates

    def rewind(self, steps: int, iteration: int) -> None:
        """Put the scheduler back to its state after `steps` iterations of a plan that was not completed."""
        if self._before_plan is None or self.scheduler is None:
            return
        state, options = self._before_plan
        self.scheduler.load_state_dict(state)
        for group, values in zip(self.optimizer.param_groups, options, strict=True):
            group.update(values)
        self.start()
        self._run(steps, iteration)

    def _run(self, steps: int, iteration: int) -> None:
        if self.scheduler is None or self._per_epoch:
            if not self._rates:
                self.before_step()
            self._rates = self._rates[:1] * steps
            return
        for step in range(iteration + len(self._rates) + 1, iteration + steps + 1):
            self.before_step()
            if step % self._accumulate == 0:
                self.advance()


def _as_numbers(rows: list[list[Any]]) -> list[list[float]]:
    """Rows with numbers in the place of tensors, which are copied to the host together."""
    tensors = [value.reshape(()).double() for row in rows for value in row if isinstance(value, Tensor)]
    if not tensors:
        return rows
    with host_sync_allowed():
        numbers = iter(torch.stack(tensors).tolist())  # host sync
    return [[next(numbers) if isinstance(value, Tensor) else value for value in row] for row in rows]


class RateTable:
    """A sink's learning rates on the device, one row per step; a captured step reads the row at the log's cursor."""

    def __init__(self, schedule: Schedule, log: StepLog) -> None:
        self._optimizer, self._cycles_betas = schedule.optimizer, schedule.cycles_betas
        self._cursor: Any = log.cursor
        self.groups = len(schedule.optimizer.param_groups)
        columns = self.groups * (2 if self._cycles_betas else 1)
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

    def load_row(self) -> None:
        """Queue a copy, on the device, of the current step's row."""
        self._row.copy_(self._table.index_select(0, self._cursor))

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
