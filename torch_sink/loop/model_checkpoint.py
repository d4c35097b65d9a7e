"""ModelCheckpoint: a callback that keeps the newest checkpoints of a run, or the best by an evaluation result."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_sink.common.arguments import check_bool, check_choice, check_count, explains_other_names
from torch_sink.loop.callbacks import Callback, RunArguments, RunContext, check_monitor, was_told_to_stop
from torch_sink.loop.checkpoints import list_checkpoints, read_manifest, remove_checkpoint
from torch_sink.loop.saving import save_in_run

_log = logging.getLogger("torch_sink")


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save checkpoints, and how many to keep.

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

    A run that a signal stops is saved at its last step. With `monitor`, only the best `keep` evaluations are saved, and
    worse checkpoints are deleted; a resumed run takes the ones before it into account. For both kinds of checkpoints,
    pass two callbacks with different prefixes.

    Args:
        prefix: first part of the directories' names.
        directory: parent of the directories; created if it is missing.
        config: when to save; default at the end of each sink. Not with `monitor`.
        monitor: name of an evaluation result ("eval_loss", or a metric of an `Evaluation`), or None.
        mode: "min" if a smaller value is better, "max" if a larger one is. NaN is worse than any number.
        keep: how many of the best checkpoints to keep.

    Raises:
        TypeError, ValueError: an argument that cannot be used; in a run, `monitor` is misspelled.
        OSError: the directory cannot be written to; raised before the first step.
    """

    on_all_ranks = True

    @explains_other_names(
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
        mode: str = "min",
        keep: int = 1,
    ) -> None:
        if not isinstance(prefix, str) or not prefix or "/" in prefix:
            raise ValueError(f"prefix={prefix!r}: pass a name without '/'")
        if config is not None and not isinstance(config, CheckpointConfig):
            raise TypeError(f"config is a {type(config).__name__}; pass a torch_sink.CheckpointConfig")
        if config is not None and monitor is not None:
            raise ValueError(
                f"config says when to save, and monitor={monitor!r} saves after evaluations; pass two ModelCheckpoint, "
                "with a prefix each"
            )
        check_choice("mode", mode, ("min", "max"))
        check_count("keep", keep, minimum=1)
        self._prefix, self._directory = prefix, Path(directory)
        self._config = config or CheckpointConfig()
        self._monitor, self._sign, self._keep = monitor, 1.0 if mode == "min" else -1.0, keep
        self._best: list[tuple[float, Path]] = []  # (rank, path); smaller ranks are better
        self._judged: Any = None  # the evaluation results that were handled last
        self._saved_step, self._saved_to = -1, Path()
        self._saved_at = 0.0
        self._context: RunContext | None = None

    def steps_to_boundary(self, step_count: int) -> int | None:
        every = self._config.save_checkpoint_steps
        return every - step_count % every if every else None

    def on_train_begin(self, run_context: RunContext) -> None:
        self._saved_step, self._saved_at = -1, time.monotonic()
        self._context = run_context
        arguments = run_context.original_args()
        if arguments.loop.ranks.rank == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._directory).close()  # an error comes now, and not after hours
        if self._monitor is not None:
            check_monitor(self._monitor, arguments.list_callback)
            self._best = []  # those of the run that is resumed, if there is one
            for path in list_checkpoints(self._directory, self._prefix):
                manifest = read_manifest(path)
                is_earlier = manifest["step"] <= arguments.loop.step_count
                value = manifest.get("monitored", {}).get(self._monitor) if is_earlier else None
                if value is not None:
                    self._best.append((self._rank_of(value), path))

    def _rank_of(self, value: float) -> float:
        return math.inf if math.isnan(value) else self._sign * value

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        self._keep_the_best(run_context)

    def _keep_the_best(self, run_context: RunContext) -> None:
        """Save after a new evaluation, if its result is among the best."""
        arguments = run_context.original_args()
        results, before = arguments.eval_results, self._judged
        self._judged = results
        if self._monitor is None or results is before or self._monitor not in (results or {}):
            return
        value = arguments.loop.ranks.gather(float(results[self._monitor]))[0]
        rank = self._rank_of(value)
        if len(self._best) >= self._keep and rank >= max(self._best)[0]:
            return
        path = self._save(arguments, monitored={self._monitor: value})
        self._best = sorted([(rank, path), *(one for one in self._best if one[1] != path)])
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
        if self._monitor is None and was_told_to_stop(arguments):
            self._save(arguments)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        context, self._context = self._context, None
        if context is None or not isinstance(error, Exception) or not self._config.exception_save:
            return
        arguments = context.original_args()
        if arguments.inside_sink or arguments.loop.ranks.many:
            where = "in the middle of a sink" if arguments.inside_sink else "on one process of several"
            _log.warning("no checkpoint of the failed run: the error came %s", where)
            return
        try:
            self._save(arguments, prefix=f"{self._prefix}_breakpoint")
        except Exception:
            _log.warning("no checkpoint of the failed run: saving it failed too", exc_info=True)

    def _save(self, arguments: RunArguments, prefix: str | None = None, **about: Any) -> Path:
        """Save, unless this callback has saved this step; returns the path of the checkpoint."""
        state = arguments["loop"].state
        if state.step_count == self._saved_step:
            return self._saved_to
        self._saved_to = save_in_run(arguments, self._directory, prefix or self._prefix, **about)
        self._saved_step, self._saved_at = state.step_count, time.monotonic()
        if self._monitor is None and self._config.keep_checkpoint_max and state.ranks.rank == 0:
            for old in list_checkpoints(self._directory, self._prefix)[: -self._config.keep_checkpoint_max]:
                remove_checkpoint(old)
        return self._saved_to
