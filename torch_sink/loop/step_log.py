"""What the steps of a sink leave on the device for the host to read once, at the sink's end."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_sink.loop.distributed import Ranks

LOSS_ROW, OVERFLOW_ROW, METRIC_ROW = 0, 1, 2


class StepLog:
    """A table on the device, one column a step, and the cursor that names the column being written.

    Invariant: addresses never change after `freeze()`, so that a captured graph can write through them. The cursor is
    a tensor for the same reason: a replayed step finds its column without the host.

    Args:
        capacity: steps of the longest sink.
        device: where the steps run.
        replayed: whether steps are captured. If not, the host knows the column, which spares two kernels a step.
    """

    def __init__(self, capacity: int, device: torch.device, *, replayed: bool = True) -> None:
        self.device, self.capacity = device, capacity
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self._replayed, self._column = replayed, 0
        self.metric_names: list[str] = []
        self._frozen = False
        self._allocate()

    def _allocate(self) -> None:
        rows = METRIC_ROW + len(self.metric_names)
        self._table = torch.zeros(rows, self.capacity, dtype=torch.float32, device=self.device)
        self._rows = list(self._table.unbind(0))
        self._cells = [] if self._replayed else [list(row.unbind(0)) for row in self._rows]
        pinned = self.device.type == "cuda"
        self._host = torch.zeros(rows, self.capacity, dtype=torch.float32, pin_memory=True) if pinned else None
        self._copied = torch.cuda.Event() if pinned else None

    def freeze(self) -> None:
        """Forbid new metrics: a captured graph holds the addresses."""
        self._frozen = True

    def start(self) -> None:
        """Begin a sink: back to the first column, no overflow seen."""
        self._column = 0
        self.cursor.zero_()
        self._rows[OVERFLOW_ROW].zero_()

    def write_step(self, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        """Write loss and metrics of the current step; one element each, any floating point dtype."""
        self._write(LOSS_ROW, loss)
        if metrics or self.metric_names:
            self._write_metrics(metrics)

    def write_overflow(self, found_inf: Tensor) -> None:
        """Write whether the update of the current step was skipped (float32 [], 0 or 1)."""
        self._write(OVERFLOW_ROW, found_inf)

    def advance(self) -> None:
        """Move the cursor to the next step."""
        self._column += 1
        if self._replayed:
            self.cursor.add_(1)

    def read(self, steps: int) -> Tensor:
        """Copy the first `steps` columns to the host: float32 [rows, steps]."""
        if self._host is None or self._copied is None:
            return self._table[:, :steps].to("cpu", copy=True)
        self._host.copy_(self._table, non_blocking=True)
        self._copied.record()
        self._copied.synchronize()  # host sync
        return self._host[:, :steps].clone()

    def reduce(self, ranks: Ranks) -> None:
        """Average the table over the ranks; overflows are equal on all of them already."""
        self._table.div_(ranks.size)
        ranks.sum(self._table)

    def _write(self, row: int, value: Tensor) -> None:
        if not self._replayed:
            value = value.detach()
            self._cells[row][self._column].copy_(value if value.dim() == 0 else value.reshape(()))
            return
        value = value.detach().reshape(1)
        if value.dtype != torch.float32:
            value = value.to(torch.float32)
        self._rows[row].index_copy_(0, self.cursor, value)

    def _write_metrics(self, metrics: dict[str, Tensor]) -> None:
        if list(metrics) != self.metric_names:
            self._rename(list(metrics))
        for row, (name, value) in enumerate(metrics.items(), METRIC_ROW):
            if not isinstance(value, Tensor) or value.numel() != 1:
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"metric {name!r} is {shape}; forward= returns tensors of one element as metrics")
            self._write(row, value)

    def _rename(self, names: list[str]) -> None:
        if self._frozen or self.metric_names:
            raise ValueError(
                f"forward returned the metrics {names} after {self.metric_names}; return the same each step"
            )
        self.metric_names = names
        old = self._table
        self._allocate()
        self._table[:METRIC_ROW].copy_(old)
