"""Callbacks that show the progress of a run: LossMonitor, TimeMonitor, ProgressBar, History, SummaryCollector."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from torch_sink.common.arguments import check_bool, check_choice, check_count, check_path, explains_wrong_calls
from torch_sink.common.ranks import group_rank, of_rank, speaks
from torch_sink.errors import NonFiniteLoss
from torch_sink.loop.callbacks import Callback, RunArguments, RunContext

OnNonfinite = Literal["raise", "warn", "ignore"]


def show(text: str, *, error: bool = False, every_rank: bool = False) -> None:
    """Print a line, above a tqdm bar if there is one: on rank 0, or on each rank if `every_rank`."""
    if not speaks(every_rank):
        return
    text = of_rank(text) if every_rank else text
    stream = sys.stderr if error else sys.stdout
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if getattr(tqdm, "_instances", None):
        tqdm.write(text, file=stream)
    else:
        print(text, file=stream, flush=True)


class _Monitor(Callback):
    """Base of callbacks that show or write what happens: rank 0 does, or each rank if `every_rank`."""

    _every_rank = False
    _known: Any = None

    def _speak_on(self, every_rank: bool) -> None:
        check_bool("every_rank", every_rank)
        self._every_rank = every_rank

    def _show(self, text: str, *, error: bool = False) -> None:
        show(text, error=error, every_rank=self._every_rank)

    def _new_results(self, arguments: RunArguments) -> dict[str, Any]:
        """The evaluation results, if they are new since the last call."""
        known, self._known = self._known, arguments.eval_results
        return {} if self._known is known else self._known or {}


class LossMonitor(_Monitor):
    """Prints the loss and the step's number in its epoch, and checks every step for NaN and infinity.

    Args:
        per_print_times: print the loss about every so many steps, at the next host sync; 0 prints no losses.
        on_nonfinite: "raise", "warn" or "ignore". Steps whose update was skipped for overflow do not count.
        every_rank: print on each rank, and not on rank 0 alone; all of them raise in any case.

    Raises:
        NonFiniteLoss: in a run, after the sink, naming the first such step.
    """

    @explains_wrong_calls()
    def __init__(
        self, per_print_times: int = 1, *, on_nonfinite: OnNonfinite = "raise", every_rank: bool = False
    ) -> None:
        check_count("per_print_times", per_print_times, minimum=0)
        check_choice("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
        self._speak_on(every_rank)
        self._every, self._on_nonfinite = per_print_times, on_nonfinite
        self._last_printed = 0
        self._suspects: dict[int, float] = {}

    def on_train_begin(self, run_context: RunContext) -> None:
        self._last_printed = run_context.original_args().cur_step_num or 0
        self._suspects = {}

    def on_train_step_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        if self._on_nonfinite != "ignore":
            self._check(arguments)
        epoch, step = arguments.cur_epoch_num, arguments.loop.progress.epoch_steps
        if self._every and arguments.cur_step_num - self._last_printed >= self._every:
            self._last_printed = arguments.cur_step_num
            self._show(f"epoch: {epoch} step: {step}, loss is {float(arguments.losses[-1])}")
        if results := self._new_results(arguments):
            self._show(f"Eval result: epoch {epoch} step {step}, metrics: {results}")

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        if self._suspects:  # their update came with the epoch's end
            self._judge_suspects(arguments)
        if results := self._new_results(arguments):
            self._show(f"Eval result: epoch {arguments.cur_epoch_num}, metrics: {results}")

    def _check(self, arguments: RunArguments) -> None:
        first = arguments.cur_step_num - len(arguments.losses) + 1
        for index in (~arguments.losses.isfinite()).nonzero().flatten().tolist():
            self._suspects.setdefault(first + index, float(arguments.losses[index]))
        self._judge_suspects(arguments)

    def _judge_suspects(self, arguments: RunArguments) -> None:
        """Act on the suspects whose update has come: it may have been skipped, and then they do not count."""
        first = arguments.cur_step_num - len(arguments.losses) + 1
        updates = [first + index for index in arguments.updates.nonzero().flatten().tolist()]
        skipped = {first + index for index in arguments.overflows.nonzero().flatten().tolist()}
        for step, loss in list(self._suspects.items()):
            update = next((one for one in updates if one >= step), None)
            if update is None and arguments.loop.scaler is not None:
                continue
            del self._suspects[step]
            if update in skipped:
                continue
            message = (
                f"the loss of step {step} is {loss}; look at that step's batch, lower the learning rate, "
                "or clip the gradients (clip_grad_norm=1.0)"
            )
            if self._on_nonfinite == "raise":
                raise NonFiniteLoss(message)
            self._show(f"warning: {message}", error=True)


class TimeMonitor(_Monitor):
    """Prints the time of each epoch and its mean per step, in training and in evaluation.

    Args:
        data_size: number of steps for the mean; default the executed steps of the epoch.
        data_time: also print how long the training loop waited for batches.
        every_rank: print on each rank, and not on rank 0 alone.
    """

    @explains_wrong_calls()
    def __init__(self, data_size: int | None = None, data_time: bool = False, *, every_rank: bool = False) -> None:
        check_count("data_size", data_size, minimum=1, meaning="the executed steps")
        check_bool("data_time", data_time)
        self._speak_on(every_rank)
        self._data_size, self._data_time = data_size, data_time
        self._started: dict[str, tuple[float, int, float]] = {}

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        self._started[arguments.mode] = time.perf_counter(), arguments.cur_step_num, arguments.wait_seconds or 0.0

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        began, first, waited = self._started[arguments.mode]
        milliseconds = (time.perf_counter() - began) * 1e3
        steps = max(self._data_size or arguments.cur_step_num - first, 1)
        phase = arguments.mode.title()
        text = f"{phase} epoch time: {milliseconds:5.3f} ms, per step time: {milliseconds / steps:5.3f} ms"
        if self._data_time and arguments.wait_seconds is not None:
            text += f", data time: {(arguments.wait_seconds - waited) * 1e3:5.3f} ms"
        self._show(text)

    on_eval_epoch_begin, on_eval_epoch_end = on_train_epoch_begin, on_train_epoch_end


class ProgressBar(_Monitor):
    """Shows the executed steps and the last loss: as a tqdm bar if tqdm is installed, else as a line per host sync.

    In a log file the bar is one line, written when the run ends. A resumed run continues at the interrupted step.

    Args:
        every_rank: show each rank's, and not rank 0's alone.
    """

    @explains_wrong_calls()
    def __init__(self, *, every_rank: bool = False) -> None:
        self._speak_on(every_rank)
        self._bar: Any = None

    def on_train_begin(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        if not speaks(self._every_rank):
            return
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return
        # A log file would keep every update of the bar, so there it is drawn at the beginning and at the end only.
        is_log = not sys.stderr.isatty() and "ipykernel" not in sys.modules
        pauses = {"mininterval": math.inf, "maxinterval": math.inf} if is_log else {}
        done = arguments.loop.progress.steps
        place = {"desc": of_rank("").rstrip(": "), "position": group_rank()} if self._every_rank else {}
        self._bar = tqdm(total=arguments.total_steps, initial=done, unit="step", dynamic_ncols=True, **pauses, **place)

    def on_train_step_end(self, run_context: RunContext) -> None:
        if not speaks(self._every_rank):
            return
        arguments = run_context.original_args()
        done, loss = arguments.loop.progress.steps, float(arguments.losses[-1])
        if self._bar is None:
            total = f"/{arguments.total_steps}" if arguments.total_steps else ""
            self._show(f"step {done}{total}: loss {loss:.4f}", error=True)
            return
        self._bar.set_postfix(epoch=arguments.cur_epoch_num, loss=f"{loss:.4f}", refresh=False)
        self._bar.update(done - self._bar.n)

    def __exit__(self, *exc_info: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class History(Callback):
    """Keeps the last loss and the evaluation results of each epoch.

    Attributes:
        epoch: name -> list with one entry per epoch; "epoch" holds the epochs' numbers.
    """

    def __init__(self) -> None:
        self.epoch: dict[str, list[Any]] = {}

    def on_train_begin(self, run_context: RunContext) -> None:
        self.epoch = {"epoch": []}

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        self.epoch["epoch"].append(arguments.cur_epoch_num)
        values = dict(arguments.eval_results or {})
        if arguments.net_outputs is not None:
            values["net_output"] = float(arguments.net_outputs)
        for name, value in values.items():
            self.epoch.setdefault(name, []).append(value)


class SummaryCollector(_Monitor):
    """Writes loss, learning rates, overflows, metrics and evaluation results for TensorBoard.

    Every step has a point, although the host reads them only at a sink's end.

    Args:
        summary_dir: folder of the event files.
        collect_freq: write every so many steps.
        every_rank: write on each rank, into `summary_dir/rank0` and so on, and not on rank 0 alone.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    @explains_wrong_calls()
    def __init__(self, summary_dir: str | Path, collect_freq: int = 1, *, every_rank: bool = False) -> None:
        check_path("summary_dir", summary_dir)
        check_count("collect_freq", collect_freq, minimum=1)
        self._speak_on(every_rank)
        self._directory, self._every = str(summary_dir), collect_freq
        self._writer: Any = None

    def on_train_begin(self, run_context: RunContext) -> None:
        try:  # on every rank: where one alone raises, the others wait for it
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("SummaryCollector needs TensorBoard: pip install 'torch-sink[summary]'") from error
        if speaks(self._every_rank):
            ranks = run_context.original_args().loop.ranks
            own = Path(self._directory, f"rank{ranks.rank}") if self._every_rank and ranks.many else self._directory
            self._writer = SummaryWriter(str(own))

    def on_train_step_end(self, run_context: RunContext) -> None:
        if self._writer is None:
            return
        arguments = run_context.original_args()
        first = arguments.loop.step_count - len(arguments.losses) + 1
        series = {"loss": arguments.losses.tolist(), "overflow": arguments.overflows.int().tolist()}
        for group, rates in enumerate(arguments.learning_rates.T.tolist()):
            series[f"learning_rate/{group}"] = rates
        for name, values in (arguments.step_metrics or {}).items():
            series[f"metric/{name}"] = values.tolist()
        for name, values in series.items():
            for step, value in enumerate(values, first):
                if step % self._every == 0:
                    self._writer.add_scalar(name, value, step)
        self._write_results(arguments)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        if self._writer is not None:
            self._write_results(run_context.original_args())
            self._writer.flush()

    def _write_results(self, arguments: RunArguments) -> None:
        for name, value in self._new_results(arguments).items():
            name = f"eval/{name.removeprefix('eval_')}"
            parts = value.flatten().tolist() if isinstance(value, Tensor) and value.numel() != 1 else None
            for place, number in {name: float(value)}.items() if parts is None else enumerate(parts):
                title = name if parts is None else f"{name}/{place}"
                self._writer.add_scalar(title, number, arguments.loop.step_count)

    def __exit__(self, *exc_info: Any) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
