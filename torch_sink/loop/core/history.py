"""Results of a run: the log of its steps on the device, its history and progress, and remarks for `explain`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torch_sink.common.ranks import warn
from torch_sink.common.transfer import to_host
from torch_sink.loop.core.distributed import Ranks

_LOSS_ROW, _OVERFLOW_ROW, _METRIC_ROW = 0, 1, 2


class StepLog:
    """A table on the device with losses, overflows and metrics of a sink's steps, which the host reads once.

    It is float32 [rows, capacity], with a column for each step. A tensor, `cursor`, holds the number of the current
    column, so captured graphs can write to the table. Its address changes only in `reserve()`.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.device = device
        self.metric_names: list[str] | None = None  # None until the first step names them
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.reserve(capacity)

    def reserve(self, capacity: int) -> None:
        """Make room for a sink of `capacity` steps, at another address."""
        self.capacity = capacity
        rows = _METRIC_ROW + len(self.metric_names or ())
        self._cells = torch.zeros(rows, capacity, dtype=torch.float32, device=self.device)

    def start(self) -> None:
        """Begin a sink."""
        self.cursor.zero_()
        self._cells[_OVERFLOW_ROW].zero_()

    def write_step(self, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        """Write loss and metrics of the current step; one element each, any floating point dtype."""
        names = list(metrics)
        if self.metric_names is None:
            self.metric_names = names
            self.reserve(self.capacity)
        if names != self.metric_names:
            raise ValueError(
                f"forward returned the metrics {names} after {self.metric_names}; return the same each step"
            )
        self._write(_LOSS_ROW, loss)
        for row, (name, value) in enumerate(metrics.items(), _METRIC_ROW):
            if not isinstance(value, Tensor) or value.numel() != 1:
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"metric {name!r} is {shape}; forward= returns tensors of one element as metrics")
            self._write(row, value)

    def write_overflow(self, found_inf: Tensor) -> None:
        """Write whether the update of the current step was skipped: float32 [], 0 or 1."""
        self._write(_OVERFLOW_ROW, found_inf)

    def advance(self) -> None:
        """Move on to the next step."""
        self.cursor.add_(1)

    def read(self, steps: int, ranks: Ranks) -> list[Tensor]:
        """Copy losses, overflows (0 or 1) and each metric of the first `steps` steps to the host: float32 [steps] each.

        Values are averaged over the ranks; overflows are equal on all of them.
        """
        table = self._cells[:, :steps].clone()
        if ranks.many:
            ranks.sum(table.div_(ranks.size))
        on_host = to_host(table)  # host sync
        return list(table if on_host is table else on_host.clone())

    def _write(self, row: int, value: Tensor) -> None:
        self._cells[row].index_copy_(0, self.cursor, value.detach().reshape(1).to(self._cells))


@dataclass
class StepCounts:
    """How the steps of a run, or the batches of an evaluation, ran.

    Attributes:
        captured: replayed as CUDA graphs.
        compiled: launched one operator or compiled kernel after the other, with a loss that the loop has compiled.
        eager: launched in eager code.
        odd: of those, how many had batches of another shape, or with other numbers, than the usual ones.
    """

    captured: int = 0
    compiled: int = 0
    eager: int = 0
    odd: int = 0

    def add_launched(self, *, compiled: bool, odd: bool) -> None:
        """Add one that was not replayed."""
        self.compiled += compiled
        self.eager += not compiled
        self.odd += odd

    def __str__(self) -> str:
        odd = f"; {self.odd} had batches of another shape, or with other numbers, than the usual ones" * bool(self.odd)
        return f"{self.captured} captured, {self.compiled} compiled, {self.eager} eager{odd}"


class SinkResults(NamedTuple):
    """Results of the steps of one sink, on the host."""

    losses: Tensor  # float32 [steps]
    overflows: Tensor  # bool [steps]; true where the update was skipped
    learning_rates: Tensor  # float64 [steps, parameter groups]
    metrics: dict[str, Tensor]  # name -> float32 [steps]
    updates: Tensor  # bool [steps]; true where an update followed, skipped or not


@dataclass
class RunHistory:
    """Losses, learning rates and evaluations of one `StepLoop.run`, extended at every sink's end.

    Attributes:
        steps: iterations executed in this run: the sum of the next three.
        captured_steps: those that were replayed as CUDA graphs. In mode "graph" all but the first ones, and those of
            batches of another shape.
        compiled_steps: those that ran uncaptured, with forward pass and loss compiled by the loop.
        eager_steps: those that ran in eager code, as far as the loop knows: also those of a model that you compiled.
        seconds: wall time of the run so far.
        samples: number of samples in the batches of this process, as the loader's batch sampler counts them, without
            those that `on_decode_error` skipped; where there is none, by what the batches hold.
        host_syncs: how often the host waited for the device: ends of sinks, overflow checks of the warm-up, captures
            of graphs, and evaluations.
        evaluations: step count and results (name -> value) of every evaluation.
        stopped_by: why the run ended early: a signal's name, "GracefulExit", "another rank", "request_stop", or None.
    """

    steps: int = 0
    captured_steps: int = 0
    compiled_steps: int = 0
    eager_steps: int = 0
    seconds: float = 0.0
    samples: int = 0
    host_syncs: int = 0
    evaluations: list[tuple[int, dict[str, Any]]] = field(default_factory=list, repr=False)
    stopped_by: str | None = None
    _sinks: list[SinkResults] = field(default_factory=list, repr=False)
    _groups: int = field(default=1, repr=False)

    @property
    def losses(self) -> Tensor:
        """Loss of every iteration, not divided by `accumulate`: float32 [iterations]."""
        return torch.cat([torch.empty(0, device="cpu"), *(sink.losses for sink in self._sinks)])

    @property
    def overflows(self) -> Tensor:
        """True at each iteration whose update was skipped because a gradient was not finite: bool [iterations]."""
        none = torch.empty(0, dtype=torch.bool, device="cpu")
        return torch.cat([none, *(sink.overflows for sink in self._sinks)])

    @property
    def learning_rates(self) -> Tensor:
        """Learning rate of every iteration: float64 [iterations, groups]; NaN before a group was added."""
        parts = [sink.learning_rates for sink in self._sinks]
        parts = parts or [torch.empty(0, self._groups, dtype=torch.float64, device="cpu")]
        groups = max(part.shape[1] for part in parts)
        return torch.cat([functional.pad(part, (0, groups - part.shape[1]), value=float("nan")) for part in parts])

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Named values that `forward` returned with the loss, by iteration: name -> float32 [iterations]."""
        names = self._sinks[-1].metrics if self._sinks else {}
        return {name: torch.cat([sink.metrics[name] for sink in self._sinks]) for name in names}

    @property
    def samples_per_second(self) -> float:
        """Samples per second of wall time, including evaluations, callbacks and checkpoints."""
        return self.samples / self.seconds if self.seconds else 0.0

    def add(self, sink: SinkResults) -> None:
        """Append a sink."""
        self._sinks.append(sink)
        self.steps += sink.losses.size(0)

    def note_counts(self, counts: StepCounts) -> None:
        """Take over how the steps of the run ran so far."""
        self.captured_steps, self.compiled_steps, self.eager_steps = counts.captured, counts.compiled, counts.eager

    def note_update(self, *, skipped: bool) -> None:
        """Note that an update followed the latest step after all: no batch came behind it."""
        if self._sinks:
            self._sinks[-1].updates[-1] = True
            self._sinks[-1].overflows[-1] = skipped


@dataclass
class Progress:
    """Completed epochs, steps in the current epoch and of the run, and where it stands; checkpoints contain it."""

    epochs: int = 0
    epoch_steps: int = 0
    steps: int = 0
    initial_epoch: int = 0  # epochs before this run, by the user's count
    window: int = 0  # steps since the latest update, whose gradients are accumulated
    epoch_ended: bool = False  # the epoch's data ended in its latest sink, and the epoch is not counted yet

    def count_from(self, initial_epoch: int) -> None:
        """Count the completed epochs from another number of epochs before the run."""
        self.epochs = max(self.initial_epoch + self.epochs - initial_epoch, 0)
        self.initial_epoch = initial_epoch


class Reasons:
    """Remarks for `StepLoop.explain`, in the order in which they came up, with counts of those that repeat."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def note(self, text: str) -> None:
        """Add a remark once."""
        self._counts.setdefault(text, 0)

    def warn(self, text: str) -> None:
        """Add a remark once, and log it as a warning."""
        self.note(text)
        warn(text)

    def count(self, text: str) -> None:
        """Add one to a remark's count."""
        self._counts[text] = self._counts.get(text, 0) + 1

    def lines(self) -> list[str]:
        """One line for each remark."""
        return [f"{text} ({count} times)" if count else text for text, count in self._counts.items()]


def first_line(error: BaseException) -> str:
    """Type of an error and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
