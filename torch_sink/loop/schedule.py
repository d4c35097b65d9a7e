"""Learning rates: stepped on the host in eager code, laid out in a device table for captured steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Schedule:
    """Steps a scheduler as a plain loop does, and records the learning rate in force at every iteration.

    `param_groups` holds Python numbers between steps, so that schedulers, callbacks and checkpoints see what they
    expect; only the body of `table_bound()` sees tensors.

    Args:
        optimizer: whose groups are read and written.
        scheduler: any torch.optim.lr_scheduler but ReduceLROnPlateau, or None.
        per_epoch: step at the end of each epoch instead of after each optimizer update.
        accumulate: iterations per optimizer update.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Any | None, *, per_epoch: bool, accumulate: int
    ) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self._per_epoch, self._accumulate = per_epoch, accumulate
        self._rates: list[list[float]] = []
        self._snapshot: tuple[Any, list[dict[str, Any]]] | None = None

    def start(self) -> None:
        """Begin a sink."""
        self._rates = []

    def before_step(self) -> None:
        """Record the learning rates of the coming iteration."""
        self._rates.append(self._current())

    def after_update(self) -> None:
        """Step the scheduler after an optimizer update, also after one that was skipped by overflow."""
        if not self._per_epoch:
            self._advance()

    def after_epoch(self) -> None:
        """Step the scheduler at an epoch's end."""
        if self._per_epoch:
            self._advance()

    def rates(self, steps: int) -> Tensor:
        """Learning rates of the sink's first `steps` iterations: float64 [steps, groups]."""
        groups = len(self.optimizer.param_groups)
        return torch.tensor(self._rates[:steps], dtype=torch.float64).reshape(steps, groups)

    def plan(self, steps: int, iteration: int) -> list[list[float]]:
        """Run the scheduler ahead for a sink of `steps` iterations that begins at iteration number `iteration`."""
        self.start()
        self._snapshot = None
        if self.scheduler is not None and not self._per_epoch:
            self._snapshot = copy.deepcopy(self.scheduler.state_dict()), self._group_options()
        self._run(steps, iteration)
        return self._rates

    def rewind(self, steps: int, iteration: int) -> None:
        """After a plan that was cut short: put the scheduler where it is after `steps` iterations."""
        if self._snapshot is None or self.scheduler is None:
            return
        state, options = self._snapshot
        self.scheduler.load_state_dict(state)
        for group, values in zip(self.optimizer.param_groups, options, strict=True):
            group.update(values)
        self.start()
        self._run(steps, iteration)

    def _run(self, steps: int, iteration: int) -> None:
        for step in range(iteration + 1, iteration + steps + 1):
            self.before_step()
            if step % self._accumulate == 0:
                self.after_update()

    def _advance(self) -> None:
        if self.scheduler is not None:
            # A planned scheduler runs ahead of the updates on purpose: its warning about the order is beside the point.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
            self.scheduler.step()

    def _current(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _group_options(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]


class RateTable:
    """Learning rates of a sink on the device, one row a step; a captured step reads the row at the log's cursor.

    Args:
        optimizer: its groups' "lr" are bound to the table inside `bound()`.
        capacity: steps of the longest sink.
        device: of the parameters.
        cursor: int64 [1] on `device`, the row of the current step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, capacity: int, device: torch.device, cursor: Tensor) -> None:
        self._optimizer, self._cursor = optimizer, cursor
        groups = optimizer.param_groups
        # Float64 gives the bits of a Python float; the fused kernels read their learning rate as float32.
        fused = any(group.get("fused") for group in groups)
        dtype = torch.float32 if fused else torch.float64
        pinned = device.type == "cuda"
        self._host = torch.zeros(capacity, len(groups), dtype=dtype, pin_memory=pinned)
        self._table = torch.zeros(capacity, len(groups), dtype=dtype, device=device)
        self._row = torch.zeros(1, len(groups), dtype=dtype, device=device)
        self._rates = list(self._row[0].unbind(0))

    def write(self, rates: list[list[float]]) -> None:
        """Fill the first rows; queued on the current stream. The host has seen the end of the sink before."""
        rows = len(rates)
        self._host[:rows] = torch.tensor(rates, dtype=self._host.dtype)
        self._table[:rows].copy_(self._host[:rows], non_blocking=True)

    def load_row(self) -> None:
        """On the device: fetch the current step's learning rates."""
        self._row.copy_(self._table.index_select(0, self._cursor))

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let the optimizer read its learning rates from the table; Python numbers are put back afterwards."""
        groups = self._optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number
