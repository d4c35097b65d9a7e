"""Learning rates: stepped on the host in eager code, laid out in a device table for captured steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torch_sink.loop.step.optimizers import cycles_momentum
from torch_sink.loop.step.step import StepLog
from torch_sink.thread_waits import host_sync_allowed


class Schedule:
    """Steps a scheduler as a plain loop does, and records the learning rate in force at every iteration.

    `param_groups` holds Python numbers between steps, so that schedulers, callbacks and checkpoints see what they
    expect; only the body of `RateTable.bound()` sees tensors.

    The scheduler steps `repeats` times where a step is due: after an optimizer update, or at an epoch's end
    (`per_epoch`). Where it writes `betas` too (`cycles_betas`), a row holds the groups' learning rates, followed by
    the groups' first betas.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Any, *, per_epoch: bool, accumulate: int, repeats: int
    ) -> None:
        self.optimizer, self.scheduler, self._repeats = optimizer, scheduler, repeats
        self._per_epoch, self._accumulate = per_epoch, accumulate
        self.cycles_betas = cycles_momentum(scheduler) and "betas" in optimizer.defaults
        self._rates: list[list[Any]] = []
        self._snapshot: tuple[Any, list[dict[str, Any]]] | None = None

    def start(self) -> None:
        """Begin a sink."""
        self._rates = []

    def before_step(self) -> None:
        """Record the learning rates of the coming iteration."""
        groups = self.optimizer.param_groups
        values = [group["lr"] for group in groups] + [group["betas"][0] for group in groups if self.cycles_betas]
        # Schedulers change a tensor in place, and only a sink's end may read it.
        self._rates.append([v.detach().clone() if isinstance(v, Tensor) else v for v in values])

    def after_update(self) -> None:
        """Step the scheduler after an optimizer update, also after one that was skipped by overflow."""
        if self.scheduler is not None and not self._per_epoch:
            self._advance()

    def after_epoch(self) -> None:
        """Step the scheduler at an epoch's end."""
        if self.scheduler is not None and self._per_epoch:
            self._advance()

    def rates(self, steps: int) -> Tensor:
        """The learning rates of the sink's first `steps` iterations: float64 [steps, groups]."""
        groups = len(self.optimizer.param_groups)
        rows = [row[:groups] for row in _as_numbers(self._rates[:steps])]
        return torch.tensor(rows, dtype=torch.float64, device="cpu")

    def plan(self, steps: int, iteration: int) -> list[list[float]]:
        """Run the scheduler ahead for a sink of `steps` iterations after `iteration`; returns a row for each."""
        self._snapshot = None
        if self.scheduler is not None and not self._per_epoch:
            groups = self.optimizer.param_groups
            options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
            self._snapshot = copy.deepcopy(self.scheduler.state_dict()), options
        self._run(steps, iteration)
        self._rates = _as_numbers(self._rates)
        return self._rates

    def rewind(self, steps: int, iteration: int) -> None:
        """After a plan that was cut short: put the scheduler where it is after `steps` iterations."""
        if self._snapshot is None or self.scheduler is None:
            return
        state, options = self._snapshot
        self.scheduler.load_state_dict(state)
        for group, values in zip(self.optimizer.param_groups, options, strict=True):
            group.update(values)
        self._run(steps, iteration)

    def _run(self, steps: int, iteration: int) -> None:
        self.start()
        if self.scheduler is None or self._per_epoch:
            self.before_step()
            self._rates *= steps
            return
        for step in range(iteration + 1, iteration + steps + 1):
            self.before_step()
            if step % self._accumulate == 0:
                self.after_update()

    def _advance(self) -> None:
        # A planned scheduler runs ahead of the updates on purpose: its warning about the order is beside the point.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        for _ in range(self._repeats):
            self.scheduler.step()


def _as_numbers(rows: list[list[Any]]) -> list[list[float]]:
    """Rows of numbers; tensors among them come to the host in one copy."""
    tensors = [value.reshape(()).double() for row in rows for value in row if isinstance(value, Tensor)]
    if not tensors:
        return rows
    with host_sync_allowed():
        numbers = iter(torch.stack(tensors).tolist())  # host sync
    return [[next(numbers) if isinstance(value, Tensor) else value for value in row] for row in rows]


class RateTable:
    """A sink's learning rates on the device, one row a step; a captured step reads the row at the log's cursor."""

    def __init__(self, schedule: Schedule, log: StepLog) -> None:
        self._optimizer, self._cycles_betas = schedule.optimizer, schedule.cycles_betas
        self._cursor: Any = log.cursor
        self.groups = len(schedule.optimizer.param_groups)
        columns = self.groups * (2 if self._cycles_betas else 1)
        # Float64 gives the bits of a Python float. On CUDA the fused kernels read float32, and those for lists of
        # tensors take a number of another type than theirs one tensor at a time; betas are subtracted from 1.
        pinned, capacity, device = log.device.type == "cuda", log.capacity, log.device
        dtype = torch.float32 if pinned and not self._cycles_betas else torch.float64
        self._host = torch.zeros(capacity, columns, dtype=dtype, device="cpu", pin_memory=pinned)
        self._table = torch.zeros(capacity, columns, dtype=dtype, device=device)
        self._row = torch.zeros(1, columns, dtype=dtype, device=device)
        self._rates = list(self._row[0].unbind(0))
        self._written: list[list[float]] = []

    def write(self, rows: list[list[float]]) -> None:
        """Queue a copy of the rows, unless they are there. The host has seen the end of the sink before."""
        count = len(rows)
        if rows == self._written[:count]:
            return
        self._written = rows
        self._host[:count] = torch.tensor(rows, dtype=self._host.dtype, device="cpu")
        self._table[:count].copy_(self._host[:count], non_blocking=True)

    def load_row(self) -> None:
        """On the device: fetch the current step's row."""
        self._row.copy_(self._table.index_select(0, self._cursor))

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let the optimizer read the row on the device; what was there is put back after."""
        groups = self._optimizer.param_groups
        names = ["lr", "betas", "foreach"]
        kept = [{name: group[name] for name in names if name in group} for group in groups]
        for index, group in enumerate(groups):
            group["lr"] = self._rates[index]
            if self._cycles_betas:
                group["betas"] = (self._rates[len(groups) + index], group["betas"][1])
                group["foreach"] = False  # the foreach form would read the beta on the host
        try:
            yield
        finally:
            for group, options in zip(groups, kept, strict=True):
                group.update(options)
