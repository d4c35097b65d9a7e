"""The callback that writes TensorBoard files."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from torch_sink.loop.callbacks.base import Callback, RunContext
from torch_sink.loop.callbacks.monitors import NewResults
from torch_sink.loop.core.arguments import check_count


class SummaryCollector(Callback):
    """Writes loss, learning rates, overflows, metrics and evaluation results for TensorBoard.

    Every inner step has its point, although the host sees them only at a sink's end.

    Args:
        summary_dir: where the event files go.
        collect_freq: write every so many steps.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, summary_dir: str | Path, collect_freq: int = 1) -> None:
        check_count("collect_freq", collect_freq, minimum=1)
        self._directory, self._every = str(summary_dir), collect_freq
        self._writer: Any = None
        self._new_results = NewResults()

    def on_train_begin(self, run_context: RunContext) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("SummaryCollector needs TensorBoard: pip install 'torch-sink[summary]'") from error
        self._writer = SummaryWriter(self._directory)

    def on_train_step_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        first = arguments.cur_step_num - len(arguments.losses) + 1
        series = {"loss": arguments.losses.tolist(), "overflow": arguments.overflows.int().tolist()}
        for group, rates in enumerate(arguments.learning_rates.T.tolist()):
            series[f"learning_rate/{group}"] = rates
        for name, values in (arguments.step_metrics or {}).items():
            series[f"metric/{name}"] = values.tolist()
        for name, values in series.items():
            for step, value in enumerate(values, first):
                if step % self._every == 0:
                    self._writer.add_scalar(name, value, step)
        self._write_results(self._new_results.after_step(arguments), arguments.cur_step_num)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        self._write_results(self._new_results.after_epoch(arguments), arguments.cur_step_num)
        self._writer.flush()

    def _write_results(self, results: dict[str, Any], step: int) -> None:
        for name, value in results.items():
            self._writer.add_scalar(f"eval/{name.removeprefix('eval_')}", float(value), step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
