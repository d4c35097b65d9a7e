"""What the steps of a sink leave on the device for the host to read once, at the sink's end."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from torch_sink.loop.core.distributed import Ranks

_LOSS_ROW, _OVERFLOW_ROW, _METRIC_ROW = 0, 1, 2
_BLOCK = 1000


class Series:
    """Scalars of a sink's steps so far, where they were made; joined now and then, so that a long sink stays small."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._joined: list[Tensor] = []

    def append(self, value: Tensor) -> None:
        """Add the value of a step: shape [], not written to afterwards."""
        self._values.append(value)
        if len(self._values) == _BLOCK:
            self._join()

    def tensor(self) -> Tensor:
        """All values: float32 [steps]."""
        if self._values:
            self._join()
        return self._joined[0] if len(self._joined) == 1 else torch.cat(self._joined)

    def _join(self) -> None:
        self._joined.append(torch.stack(self._values).to(torch.float32))
        self._values = []


class StepLog:
    """Losses, overflows and metrics of steps that are launched from Python.

    A step's loss is kept, not copied, which a step on the CPU would feel. What may change in place is copied: overflow
    flags, metrics, parameters and views, and on an accelerator every loss, since compiled code can reuse the memory of
    its results. `capacity` is the number of steps of the longest sink that fits.
    """

    capacity = sys.maxsize

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.metric_names: list[str] = []
        self._keeps_losses = device.type == "cpu"
        self._zero = torch.zeros((), device=device)
        self.start()

    def start(self) -> None:
        """Begin a sink."""
        self._losses = Series()
        self._overflows: Series | None = None
        self._metrics = [Series() for _ in self.metric_names]

    def write_step(self, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        """Write loss and metrics of the current step; one element each, any floating point dtype."""
        value = loss.detach()
        if value.dim() or loss.is_leaf or loss._is_view() or not self._keeps_losses:
            value = self._copy(value)
        self._losses.append(value)
        if metrics or self.metric_names:
            self._check_metrics(metrics)
            for series, metric in zip(self._metrics, metrics.values(), strict=True):
                series.append(self._copy(metric.detach()))

    def write_overflow(self, found_inf: Tensor | None) -> None:
        """Write whether the update of the current step was skipped (float32 [], 0 or 1; None: it had no update)."""
        if self._overflows is None:
            self._overflows = Series()
        self._overflows.append(self._zero if found_inf is None else found_inf.clone())

    def advance(self) -> None:
        """Move on to the next step."""

    def read(self, steps: int, ranks: Ranks) -> list[Tensor]:
        """Bring losses, overflows (0 or 1) and each metric of the first `steps` steps to the host: float32 [steps].

        They are averaged over the ranks; overflows are equal on all of them already.
        """
        rows = self._sink_rows(steps)
        if self.device.type == "cpu" and not ranks.many:
            return rows
        table = torch.stack(rows)
        if ranks.many:
            ranks.sum(table.div_(ranks.size))
        if table.device.type != "cuda":
            return list(table.to("cpu"))
        host = torch.empty(table.shape, dtype=table.dtype, device="cpu", pin_memory=True)
        host.copy_(table, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(table.device))  # not that of the current device
        copied.synchronize()  # host sync
        return list(host.clone())

    def _sink_rows(self, steps: int) -> list[Tensor]:
        """The sink's rows on the device, in memory of their own."""
        skipped = torch.zeros(steps, device=self.device) if self._overflows is None else self._overflows.tensor()
        return [self._losses.tensor(), skipped, *(series.tensor() for series in self._metrics)]

    def _copy(self, value: Tensor) -> Tensor:
        return value.reshape(()).to(self.device, torch.float32, copy=True)

    def _check_metrics(self, metrics: dict[str, Tensor]) -> None:
        if list(metrics) != self.metric_names:
            self._rename(list(metrics))
        for name, value in metrics.items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"metric {name!r} is {shape}; forward= returns tensors of one element as metrics")

    def _rename(self, names: list[str]) -> None:
        self._refuse_other_names(names, bool(self.metric_names))
        self.metric_names = names
        self._metrics = [Series() for _ in names]

    def _refuse_other_names(self, names: list[str], fixed: bool) -> None:
        if fixed:
            raise ValueError(
                f"forward returned the metrics {names} after {self.metric_names}; return the same each step"
            )


class ReplayedLog(StepLog):
    """The same for steps that may be replayed: a table, one column a step, and the cursor that names the column.

    Invariant: addresses never change after `freeze()`, so that a captured graph can write through them. The cursor is
    a tensor for the same reason: a replayed step finds its column without the host.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.device, self.metric_names = device, []
        self.reserve(capacity)
        super().__init__(device)

    def reserve(self, capacity: int) -> None:
        """Make room for a sink of `capacity` steps, at other addresses."""
        self.capacity, self._frozen = capacity, False
        rows = _METRIC_ROW + len(self.metric_names)
        self._cells = torch.zeros(rows, capacity, dtype=torch.float32, device=self.device)
        self._rows = list(self._cells.unbind(0))

    def freeze(self) -> None:
        """Forbid new metrics: a captured graph holds the addresses."""
        self._frozen = True

    def start(self) -> None:
        self.cursor.zero_()
        self._rows[_OVERFLOW_ROW].zero_()

    def write_step(self, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        self._write(_LOSS_ROW, loss)
        if metrics or self.metric_names:
            self._check_metrics(metrics)
            for row, metric in enumerate(metrics.values(), _METRIC_ROW):
                self._write(row, metric)

    def write_overflow(self, found_inf: Tensor | None) -> None:
        if found_inf is not None:
            self._write(_OVERFLOW_ROW, found_inf)

    def advance(self) -> None:
        self.cursor.add_(1)

    def _sink_rows(self, steps: int) -> list[Tensor]:
        return list(self._cells[:, :steps].clone())

    def _write(self, row: int, value: Tensor) -> None:
        self._rows[row].index_copy_(0, self.cursor, value.detach().reshape(1).to(torch.float32))

    def _rename(self, names: list[str]) -> None:
        self._refuse_other_names(names, self._frozen or bool(self.metric_names))
        self.metric_names = names
        written = self._cells
        self.reserve(self.capacity)
        self._cells[: len(written)] = written
