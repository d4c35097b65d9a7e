"""ModelCheckpoint: a callback that keeps the newest checkpoints of a run, or the best by an evaluation result."""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_sink.common.arguments import check_bool, check_count, check_path, explains_wrong_calls
from torch_sink.common.ranks import warn, warn_of_rank
from torch_sink.loop.callbacks import (
    Callback,
    MonitorMode,
    RunArguments,
    RunContext,
    best_of,
    check_monitor,
    check_monitor_options,
    monitored_number,
    warn_of_no_value,
    was_told_to_stop,
)
from torch_sink.loop.checkpoints import check_prefix, has_written, own_checkpoints, read_checkpoints, remove_checkpoint
from torch_sink.loop.saving import save_in_run
from torch_sink.loop.step.state import TrainState


@explains_wrong_calls()
@dataclass(frozen=True)
class CheckpointConfig:
    """When to save checkpoints during a run, and how many to keep. The end of a run is saved in any case.

    Attributes:
        save_checkpoint_steps: save every so many steps exactly; sinks shrink to end there. None saves by time.
        save_checkpoint_seconds: without `save_checkpoint_steps`, save at the end of a sink if so many seconds have
            passed since the last checkpoint; 0 saves after each sink.
        keep_checkpoint_max: how many of the newest checkpoints to keep; 0 keeps all.
        exception_save: also save, to a directory named `{prefix}_breakpoint-{step:08d}`, when an error of a callback
            (such as NonFiniteLoss) or of the data ends the run between two sinks. The error is raised afterwards. After
            an error inside a step there is no consistent state to save.

    Raises:
        TypeError, ValueError: a value of another type, or below its minimum.
    """

    save_checkpoint_steps: int | None = None
    save_checkpoint_seconds: int = 0
    keep_checkpoint_max: int = 5
    exception_save: bool = False

    def __post_init__(self) -> None:
        check_count("save_checkpoint_steps", self.save_checkpoint_steps, minimum=1, meaning="checkpoints by time")
        check_count("save_checkpoint_seconds", self.save_checkpoint_seconds, minimum=0)
        check_count("keep_checkpoint_max", self.keep_checkpoint_max, minimum=0)
        check_bool("exception_save", self.exception_save)


class ModelCheckpoint(Callback):
    """Saves checkpoints as `StepLoop.save` does, to directories named `{prefix}-{step:08d}`.

    The last step of a run is saved too, as MindSpore's ModelCheckpoint does: at its end, at `max_steps`, and where a
    callback or a signal stops it; after an error see `exception_save`. It is saved with the weights of that step, even
    if `EarlyStopping` restores the best ones. With `monitor`, only the best `keep` evaluations are saved, and worse
    checkpoints are deleted; a resumed run takes the ones before it into account. For both kinds of checkpoints, pass
    two callbacks with different prefixes.

    What another training has written is never deleted. A training is a StepLoop with all its runs. After `resume` the
    checkpoints that led to the loaded one are its own too; after `load_state_dict` it is a new training. In a directory
    that has checkpoints of others only, it warns at its start. A checkpoint of another training with the same prefix
    and step is renamed to `{prefix}-{step:08d}.older1`.

    Args:
        prefix: first part of the directories' names.
        directory: parent of the directories; created if it is missing.
        config: when to save; default at the end of each sink. Not with `monitor`.
        monitor: name of an evaluation result ("eval_loss", or a metric of an `Evaluation`), or None.
        mode: which value is better, as for `EarlyStopping`. NaN is worse than any number.
        keep: how many of the best checkpoints to keep.

    Raises:
        TypeError, ValueError: an argument that cannot be used; in a run, `monitor` is misspelled.
        OSError: the directory cannot be written to; raised before the first step.
    """

    on_all_ranks = saves_training = True

    @explains_wrong_calls(
        **dict.fromkeys(
            ("every_n_train_steps", "every_steps", "save_checkpoint_steps", "keep_checkpoint_max"),
            "it belongs to config=torch_sink.CheckpointConfig(save_checkpoint_steps=..., keep_checkpoint_max=...)",
        )
    )
    def __init__(
        self,
        prefix: str = "CKP",
        directory: str | Path = ".",
        config: CheckpointConfig | None = None,
        *,
        monitor: str | None = None,
        mode: MonitorMode = "auto",
        keep: int = 1,
    ) -> None:
        check_prefix(prefix)
        check_path("directory", directory)
        if config is not None and not isinstance(config, CheckpointConfig):
            raise TypeError(f"config is a {type(config).__name__}; pass a torch_sink.CheckpointConfig")
        if config is not None and monitor is not None:
            raise ValueError(
                f"config says when to save, and monitor={monitor!r} saves after evaluations; pass two ModelCheckpoint, "
                "with a prefix each"
            )
        check_monitor_options(monitor if monitor is not None else "", mode)
        check_count("keep", keep, minimum=1)
        self._prefix, self._directory = prefix, Path(directory)
        self._config = config or CheckpointConfig()
        self._monitor, self._mode, self._keep = monitor, mode, keep
        self._best: list[tuple[float, Path]] = []  # (cost, path); the smallest cost is the best
        self._judged: Any = None  # the evaluation results that were handled last
        self._has_value = False  # whether results of this run had the monitored one
        self._began_at = self._saved_step = (-1, 0)  # the step, and how far an accumulation was
        self._saved_to = Path()
        self._saved_at = 0.0
        self._context: RunContext | None = None

    def steps_to_boundary(self, step_count: int) -> int | None:
        every = self._config.save_checkpoint_steps
        return every - step_count % every if every else None

    def on_train_begin(self, run_context: RunContext) -> None:
        self._saved_step, self._saved_at = (-1, 0), time.monotonic()
        self._context, self._has_value = run_context, False
        arguments = run_context.original_args()
        self._began_at = _place(arguments)
        if arguments.loop.ranks.rank == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._directory).close()  # an error comes now, and not after hours
            self._tell_of_others(arguments.loop.state)
        if self._monitor is not None:
            check_monitor(self._monitor, self._mode, arguments.list_callback)
            self._best = arguments.loop.ranks.gather(self._best_before(self._monitor, arguments))[0]

    def _tell_of_others(self, training: TrainState) -> None:
        """Say once that the folder of a training that begins here has checkpoints of others."""
        found = read_checkpoints(self._directory)
        others = [one.path for one in found if not has_written(training.author, one.manifest)]
        goes_on_here = training.author.past and len(others) < len(found)
        if others and not goes_on_here and self._directory not in training.told_folders:
            training.told_folders.add(self._directory)
            warn(
                "%s has checkpoints of another training, the newest of them %s, and this one keeps them all: to go on "
                "with that training call loop.resume(%r, loader) before the run; to have this one by itself pass "
                "another directory, or delete what is there",
                self._directory.absolute(),
                others[-1].name,
                str(self._directory),
            )

    def _best_before(self, monitor: str, arguments: RunArguments) -> list[tuple[float, Path]]:
        """The best checkpoints of the run that is resumed, if there is one."""
        best: list[tuple[float, Path]] = []
        for _, path, manifest in own_checkpoints(self._directory, arguments.loop.state.author, self._prefix):
            is_earlier = manifest["step"] <= arguments.loop.step_count
            value = manifest.get("monitored", {}).get(monitor) if is_earlier else None
            if value is not None:
                best.append((self._cost_of(monitor, value), path))
        return best

    def _cost_of(self, monitor: str, value: float) -> float:
        return math.inf if math.isnan(value) else value if best_of(monitor, self._mode) == "min" else -value

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        self._keep_the_best(run_context)

    def _keep_the_best(self, run_context: RunContext) -> None:
        """Save after a new evaluation, if its result is among the best."""
        arguments = run_context.original_args()
        results, before = arguments.eval_results, self._judged
        self._judged = results
        if self._monitor is None or results is before or self._monitor not in (results or {}):
            return
        self._has_value = True
        value = arguments.loop.ranks.gather(monitored_number(self._monitor, results[self._monitor]))[0]
        cost = self._cost_of(self._monitor, value)
        if len(self._best) >= self._keep and cost >= max(self._best)[0]:
            return
        path = self._save(arguments, monitored={self._monitor: value})
        self._best = sorted([(cost, path), *(one for one in self._best if one[1] != path)])
        for _, worse in self._best[self._keep :]:
            if arguments.loop.ranks.rank == 0:
                remove_checkpoint(worse)
        del self._best[self._keep :]

    def on_train_step_end(self, run_context: RunContext) -> None:
        if self._monitor is not None:
            self._keep_the_best(run_context)
            return
        arguments, every = run_context.original_args(), self._config.save_checkpoint_steps
        state, seconds = arguments["loop"].state, self._config.save_checkpoint_seconds
        is_due = state.step_count % every == 0 if every else time.monotonic() - self._saved_at >= seconds
        if seconds and not every:  # the ranks' clocks differ, and all of them save or none does
            is_due = state.ranks.any_of([is_due])[0]
        if is_due:
            self._save(arguments)

    def on_train_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        place, state = _place(arguments), arguments.loop.state
        # A run that has trained nothing, such as a resumed one that was complete, has nothing new to save.
        is_new = place != self._began_at or was_told_to_stop(arguments)
        if self._monitor is not None and not self._has_value and place != self._began_at:
            warn_of_no_value(
                self._monitor,
                arguments,
                "no checkpoint was saved",
                "evaluate before the run ends, with torch_sink.Evaluation(..., every_steps=...), or leave monitor out",
            )
        if self._monitor is not None or place == self._saved_step or not is_new:
            return
        if state.ranks.sharded and state.progress.window:
            warn(
                "no checkpoint of step %d, where the run ended: it is inside an accumulation, whose gradients a "
                "sharded model keeps to itself; end runs at a multiple of accumulate=%d, or at an epoch's end",
                state.step_count,
                state.accumulate,
            )
            return
        self._save(arguments)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        context, self._context = self._context, None
        if context is None or not isinstance(error, Exception) or not self._config.exception_save:
            return
        arguments = context.original_args()
        inside_sink = arguments.get("_inside_sink")
        if inside_sink or arguments.loop.ranks.many:
            where = "in the middle of a sink" if inside_sink else "on one process of several"
            warn_of_rank("no checkpoint of the failed run: the error came %s", where)
            return
        try:
            self._save(arguments, prefix=f"{self._prefix}_breakpoint")
        except Exception:
            warn_of_rank("no checkpoint of the failed run: saving it failed too", exc_info=True)

    def _save(self, arguments: RunArguments, prefix: str | None = None, **about: Any) -> Path:
        """Save, unless this callback has saved this step; returns the path of the checkpoint."""
        state, step = arguments["loop"].state, _place(arguments)
        if step == self._saved_step:
            return self._saved_to
        self._saved_to = save_in_run(arguments, self._directory, prefix or self._prefix, **about)
        self._saved_step, self._saved_at = step, time.monotonic()
        if self._monitor is None and self._config.keep_checkpoint_max and state.ranks.rank == 0:
            own = own_checkpoints(self._directory, state.author, self._prefix)
            for old in own[: -self._config.keep_checkpoint_max]:
                remove_checkpoint(old.path)
        return self._saved_to


def _place(arguments: RunArguments) -> tuple[int, int]:
    """The step where a training stands, and how many steps have gone into the next update."""
    state = arguments["loop"].state
    return state.step_count, state.progress.window
