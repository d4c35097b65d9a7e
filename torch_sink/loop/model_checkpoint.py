"""The callback that saves checkpoints during a run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from torch_sink.loop.arguments import check_count
from torch_sink.loop.callbacks import Callback, RunContext
from torch_sink.loop.checkpoint import list_checkpoints, remove_checkpoint


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and how many to keep.

    Attributes:
        save_checkpoint_steps: save at exactly every so many steps; sinks shrink to meet them. None: see below.
        save_checkpoint_seconds: without `save_checkpoint_steps`, save at a sink's end when so many seconds have
            passed since the last; 0 saves at each sink's end.
        keep_checkpoint_max: keep the newest so many, 0 keeps all.

    Raises:
        TypeError, ValueError: not an int, or below the least allowed.
    """

    save_checkpoint_steps: int | None = None
    save_checkpoint_seconds: int = 0
    keep_checkpoint_max: int = 5

    def __post_init__(self) -> None:
        if self.save_checkpoint_steps is not None:
            check_count("save_checkpoint_steps", self.save_checkpoint_steps, minimum=1)
        check_count("save_checkpoint_seconds", self.save_checkpoint_seconds, minimum=0)
        check_count("keep_checkpoint_max", self.keep_checkpoint_max, minimum=0)


class ModelCheckpoint(Callback):
    """Writes what `StepLoop.save` writes, to directories named `{prefix}-{step:08d}`.

    A run that is stopped by a signal is saved at the step it reached.

    Args:
        prefix: of the directories' names.
        directory: where they go; it is made if it is missing.
        config: when to save; default at each sink's end.
    """

    def __init__(
        self, prefix: str = "CKP", directory: str | Path = ".", config: CheckpointConfig | None = None
    ) -> None:
        if not isinstance(prefix, str) or not prefix or "/" in prefix:
            raise ValueError(f"prefix={prefix!r}: pass a name without '/'")
        if config is not None and not isinstance(config, CheckpointConfig):
            raise TypeError(f"config is a {type(config).__name__}; pass a torch_sink.CheckpointConfig")
        self._prefix, self._directory = prefix, Path(directory)
        self._config = config or CheckpointConfig()
        self._saved_step = -1
        self._saved_at = 0.0

    def steps_to_boundary(self, step_count: int) -> int | None:
        every = self._config.save_checkpoint_steps
        return every - step_count % every if every else None

    def on_train_begin(self, run_context: RunContext) -> None:
        self._saved_step, self._saved_at = -1, time.monotonic()

    def on_train_step_end(self, run_context: RunContext) -> None:
        every = self._config.save_checkpoint_steps
        if every:
            due = run_context.original_args().loop.step_count % every == 0
        else:
            due = time.monotonic() - self._saved_at >= self._config.save_checkpoint_seconds
        if due:
            self._save(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        if arguments.history.stopped_by in ("SIGINT", "SIGTERM", "another rank"):
            self._save(run_context)

    def _save(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        if arguments.loop.step_count == self._saved_step:
            return
        path = arguments.loop.save(self._directory, arguments.train_dataset, prefix=self._prefix)
        self._saved_step, self._saved_at = arguments.loop.step_count, time.monotonic()
        arguments.last_save_ckpt_step, arguments.latest_ckpt_file = self._saved_step, str(path)
        if self._config.keep_checkpoint_max and arguments.loop.ranks.rank == 0:
            for old in list_checkpoints(self._directory, self._prefix)[: -self._config.keep_checkpoint_max]:
                remove_checkpoint(old)
