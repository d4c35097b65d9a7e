"""Callbacks that save checkpoints, and the signals that ask a run to end."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch_sink.loop.callbacks import Callback, RunArguments, RunContext
from torch_sink.loop.checkpoints import list_checkpoints, remove_checkpoint
from torch_sink.loop.core.arguments import check_bool, check_count
from torch_sink.loop.core.distributed import Ranks

_log = logging.getLogger("torch_sink")


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and how many to keep.

    Attributes:
        save_checkpoint_steps: save at exactly every so many steps; sinks shrink to meet them. None: see below.
        save_checkpoint_seconds: without `save_checkpoint_steps`, save at a sink's end when so many seconds have
            passed since the last; 0 saves at each sink's end.
        keep_checkpoint_max: keep the newest so many, 0 keeps all.
        exception_save: also save, to a directory named `{prefix}_breakpoint-{step:08d}`, when an error ends the run
            between two sinks: an error of a callback (such as NonFiniteLoss) or of the data. The error is raised all
            the same. An error inside a step leaves nothing that could be saved.

    Raises:
        TypeError, ValueError: not of the type, or below the least allowed.
    """

    save_checkpoint_steps: int | None = None
    save_checkpoint_seconds: int = 0
    keep_checkpoint_max: int = 5
    exception_save: bool = False

    def __post_init__(self) -> None:
        if self.save_checkpoint_steps is not None:
            check_count("save_checkpoint_steps", self.save_checkpoint_steps, minimum=1)
        check_count("save_checkpoint_seconds", self.save_checkpoint_seconds, minimum=0)
        check_count("keep_checkpoint_max", self.keep_checkpoint_max, minimum=0)
        check_bool("exception_save", self.exception_save)


class ModelCheckpoint(Callback):
    """Writes what `StepLoop.save` writes, to directories named `{prefix}-{step:08d}`.

    A run that is stopped by a signal is saved at the step it reached.

    Args:
        prefix: of the directories' names.
        directory: where they go; it is made if it is missing.
        config: when to save; default at each sink's end.
    """

    on_all_ranks = True

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
        self._context: RunContext | None = None

    def steps_to_boundary(self, step_count: int) -> int | None:
        every = self._config.save_checkpoint_steps
        return every - step_count % every if every else None

    def on_train_begin(self, run_context: RunContext) -> None:
        self._saved_step, self._saved_at = -1, time.monotonic()
        self._context = run_context

    def on_train_step_end(self, run_context: RunContext) -> None:
        loop, every = run_context.original_args().loop, self._config.save_checkpoint_steps
        if loop.step_count % every == 0 if every else self._is_time(loop.ranks):
            self._save(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        if arguments.history.stopped_by in ("SIGINT", "SIGTERM", "another rank"):
            self._save(run_context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        context, self._context = self._context, None
        if context is None or not isinstance(error, Exception) or not self._config.exception_save:
            return
        arguments = context.original_args()
        if arguments.inside_sink or arguments.loop.ranks.many:
            where = "in the middle of a sink" if arguments.inside_sink else "on one process of several"
            _log.warning("no checkpoint of the failed run: the error came %s", where)
            return
        try:
            self._save(context, prefix=f"{self._prefix}_breakpoint")
        except Exception:
            _log.warning("no checkpoint of the failed run: saving it failed too", exc_info=True)

    def _is_time(self, ranks: Ranks) -> bool:
        """Whether enough time has passed, by the clock of any rank: all write a checkpoint, or none."""
        due = time.monotonic() - self._saved_at >= self._config.save_checkpoint_seconds
        return ranks.any(due) if ranks.many and self._config.save_checkpoint_seconds else due

    def _save(self, run_context: RunContext, prefix: str | None = None) -> None:
        arguments = run_context.original_args()
        if arguments.loop.step_count == self._saved_step:
            return
        _save_checkpoint(arguments, self._directory, prefix or self._prefix)
        self._saved_step, self._saved_at = arguments.loop.step_count, time.monotonic()
        if self._config.keep_checkpoint_max and arguments.loop.ranks.rank == 0:
            for old in list_checkpoints(self._directory, self._prefix)[: -self._config.keep_checkpoint_max]:
                remove_checkpoint(old)


class OnRequestExit(Callback):
    """Ends the run at the end of the current sink when a signal arrives or a file asks for it.

    Args:
        save_ckpt: save a checkpoint then.
        file_name: prefix of the checkpoint.
        directory: where it goes.
        sig: the signal; its handler is restored after the run. Installed in the main thread only.
        config_file: a JSON file read before each sink; `{"GracefulExit": 1}` asks for the end.
    """

    on_all_ranks = True

    def __init__(
        self,
        save_ckpt: bool = True,
        file_name: str = "Net",
        directory: str | Path = ".",
        sig: int = signal.SIGTERM,
        config_file: str | Path | None = None,
    ) -> None:
        self._save, self._file_name, self._directory = save_ckpt, file_name, directory
        self._signal, self._config_file = sig, Path(config_file) if config_file is not None else None
        self._requests: list[str] = []
        self._installed = ExitStack()

    def on_train_begin(self, run_context: RunContext) -> None:
        self._requests = self._installed.enter_context(stop_signals(self._signal))

    def on_train_step_begin(self, run_context: RunContext) -> None:
        if self._config_file is not None and self._config_file.is_file():
            try:
                asked = json.loads(self._config_file.read_text(encoding="utf-8")).get("GracefulExit")
            except (ValueError, AttributeError):
                return  # half-written: it will be read again before the next sink
            if asked == 1:
                self._requests.append("file")

    def on_train_step_end(self, run_context: RunContext) -> None:
        if self._requests:
            run_context.original_args().exit_requested = True
            run_context.request_stop()

    def on_train_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        # All ranks write a checkpoint, or none: a signal that came to one after the last agreement does not count.
        requested = arguments.exit_requested or (self._requests and not arguments.loop.ranks.many)
        if requested and self._save:
            _save_checkpoint(arguments, self._directory, self._file_name)

    def __exit__(self, *exc_info: Any) -> None:
        self._installed.close()


def _save_checkpoint(arguments: RunArguments, directory: str | Path, prefix: str) -> None:
    path = arguments.loop.save(directory, arguments.train_dataset, prefix=prefix)
    arguments.last_save_ckpt_step, arguments.latest_ckpt_file = arguments.loop.step_count, str(path)


@contextmanager
def stop_signals(*numbers: int) -> Iterator[list[str]]:
    """The names of these signals, as they come, instead of what they do; a second SIGINT raises KeyboardInterrupt.

    In the main thread only. The handlers that were there are restored on leaving.
    """
    received: list[str] = []

    def handle(number: int, frame: Any) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, handle) for number in numbers if in_main_thread}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            # None: the handler was not installed from Python and cannot be put back by it.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
