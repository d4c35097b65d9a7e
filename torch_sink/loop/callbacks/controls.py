"""What steers a run: signals, EarlyStopping, LearningRateScheduler, ReduceLROnPlateau, OnRequestExit."""

from __future__ import annotations

import json
import logging
import math
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torch_sink.loop.callbacks.base import Callback, RunArguments, RunContext
from torch_sink.loop.callbacks.monitors import show
from torch_sink.loop.core.arguments import check_choice, check_count
from torch_sink.loop.core.distributed import set_learning_rate

_log = logging.getLogger("torch_sink")


class StopSignals:
    """While entered in the main thread, turns the first of some signals into a request to stop.

    A second SIGINT raises KeyboardInterrupt at once. The handlers that were there are restored on leaving. In any
    other thread nothing is installed. `received` is the name of the first signal, or None.
    """

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers
        self.received: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be put back by it.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name


class _PlateauCallback(Callback):
    """Follows a value from epoch to epoch, and counts those without improvement; all processes go by that of rank 0."""

    def __init__(self, monitor: str, mode: str, min_delta: float, patience: int, verbose: bool) -> None:
        check_choice("mode", mode, ("auto", "min", "max"))
        if not isinstance(monitor, str):
            raise TypeError(f"monitor={monitor!r}: pass a name such as 'eval_loss'")
        check_count("patience", patience, minimum=0)
        largest = mode == "max" or (mode == "auto" and ("acc" in monitor or "top" in monitor))
        self._name, self._sign, self._min_delta = monitor, (-1.0 if largest else 1.0), abs(min_delta)
        self._patience, self._verbose = max(patience, 1), verbose
        self._forget()

    def _forget(self) -> None:
        self._best, self._waited = math.inf * self._sign, 0
        self._seen = self._missed = False

    def on_train_begin(self, run_context: RunContext) -> None:
        self._forget()

    def on_train_end(self, run_context: RunContext) -> None:
        if self._missed and not self._seen:
            _log.warning(
                "monitor %r had no value in this run, so nothing was decided: add a torch_sink.Evaluation that gives "
                "it, before this callback, or use monitor='loss'",
                self._name,
            )

    def _read(self, arguments: RunArguments) -> float | None:
        """The value of this epoch, or None if there was no evaluation."""
        results = arguments.eval_results or {}
        value = results.get(self._name)
        if value is None and self._name == "loss" and arguments.net_outputs is not None:
            value = arguments.net_outputs
        value = None if value is None else float(value)
        if arguments.callbacks_agree:
            value = arguments.loop.ranks.value_of_first(value)
        if value is None and not self._seen and results:
            _log.warning("monitor %r is not among the results %s", self._name, ", ".join(results))
        self._seen = self._seen or value is not None
        self._missed = self._missed or not results
        return value

    def _improves(self, value: float, on: float | None = None) -> bool:
        """Whether `value` is better than the best so far, or than `on`, by more than the least change that counts."""
        reference = self._best if on is None else on
        return (reference - value) * self._sign > self._min_delta


class EarlyStopping(_PlateauCallback):
    """Ends the run when a value has stopped improving.

    Args:
        monitor: name of an evaluation result ("eval_loss", a metric), or "loss" for the last step's training loss.
        min_delta: least change that counts as an improvement.
        patience: epochs without improvement that are still accepted.
        verbose: print when it stops.
        mode: "min", "max", or "auto": "max" for names with "acc" or "top" in them.
        baseline: patience is only renewed by values that also improve on it.
        restore_best_weights: put the weights of the best epoch back at the end, unless the run was stopped by something
            else: what is saved then has to be what it reached.
    """

    def __init__(
        self,
        monitor: str = "eval_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        verbose: bool = False,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
    ) -> None:
        super().__init__(monitor, mode, min_delta, patience, verbose)
        self._baseline, self._restore = baseline, restore_best_weights

    def _forget(self) -> None:
        super()._forget()
        self._weights: dict[str, torch.Tensor] | None = None
        self._stopped = False

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        value = self._read(arguments)
        if value is None:
            return
        self._waited += 1
        if self._improves(value):
            self._best = value
            if self._restore:
                state = arguments.train_network.state_dict()
                self._weights = {name: tensor.detach().clone() for name, tensor in state.items()}
            if self._baseline is None or self._improves(value, self._baseline):
                self._waited = 0
        if self._waited >= self._patience:
            if self._verbose:
                show(f"early stopping after epoch {arguments.cur_epoch_num}: {self._name} is {value}")
            self._stopped = True
            run_context.request_stop()

    def on_train_end(self, run_context: RunContext) -> None:
        super().on_train_end(run_context)
        arguments = run_context.original_args()
        if self._weights is not None and (self._stopped or arguments.history.stopped_by is None):
            arguments.train_network.load_state_dict(self._weights)


class LearningRateScheduler(Callback):
    """Sets the learning rate by a function, once per host return: the steps inside a sink keep one rate.

    For a rate that changes with every step pass `scheduler=` to StepLoop.

    Args:
        learning_rate_function: `f(learning_rate, cur_step_num)` -> learning rate, called for each parameter group.
    """

    def __init__(self, learning_rate_function: Callable[[float, int], float]) -> None:
        if not callable(learning_rate_function):
            raise TypeError(f"learning_rate_function is a {type(learning_rate_function).__name__}; pass a function")
        self._function = learning_rate_function

    def on_train_step_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        for group in arguments.optimizer.param_groups:
            set_learning_rate(group, float(self._function(float(group["lr"]), arguments.cur_step_num)))


class ReduceLROnPlateau(_PlateauCallback):
    """Lowers the learning rate when a value has stopped improving.

    Args:
        monitor: as for EarlyStopping.
        factor: the rate is multiplied by it; below 1.
        patience: epochs without improvement that are still accepted.
        verbose: print when it acts.
        mode: "auto", "min" or "max".
        min_delta: least change that counts as an improvement.
        cooldown: epochs after a reduction in which nothing is counted.
        min_lr: the rate never goes below.

    Raises:
        ValueError: `factor` is not below 1.
    """

    def __init__(
        self,
        monitor: str = "eval_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: bool = False,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        if not 0 <= factor < 1:
            raise ValueError(f"factor={factor!r}: the rate is multiplied by it, so pass a number below 1")
        check_count("cooldown", cooldown, minimum=0)
        super().__init__(monitor, mode, min_delta, patience, verbose)
        self._factor, self._cooldown, self._min_lr = factor, cooldown, min_lr

    def _forget(self) -> None:
        super()._forget()
        self._cooling = 0

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        value = self._read(arguments)
        if value is None:
            return
        if self._cooling:
            self._cooling -= 1
            self._waited = 0
        if self._improves(value):
            self._best, self._waited = value, 0
            return
        if self._cooling:
            return
        self._waited += 1
        if self._waited >= self._patience:
            self._reduce(arguments)
            self._waited, self._cooling = 0, self._cooldown

    def _reduce(self, arguments: RunArguments) -> None:
        for group in arguments.optimizer.param_groups:
            rate = max(float(group["lr"]) * self._factor, self._min_lr)
            set_learning_rate(group, rate)
            if self._verbose:
                show(f"epoch {arguments.cur_epoch_num}: learning rate reduced to {rate}")


class OnRequestExit(Callback):
    """Ends the run at the end of the current sink when a signal arrives or a file asks for it.

    Args:
        save_ckpt: save a checkpoint then.
        file_name: prefix of the checkpoint.
        directory: where it goes.
        sig: the signal; its handler is restored after the run. Installed in the main thread only.
        config_file: a JSON file read before each sink; `{"GracefulExit": 1}` asks for the end.
    """

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
        self._signals = StopSignals(sig)
        self._asked = False

    @property
    def _requested(self) -> bool:
        return self._asked or self._signals.received is not None

    def on_train_begin(self, run_context: RunContext) -> None:
        self._asked = False
        self._signals = StopSignals(self._signal).__enter__()

    def on_train_step_begin(self, run_context: RunContext) -> None:
        if self._config_file is not None and self._config_file.is_file():
            try:
                asked = json.loads(self._config_file.read_text(encoding="utf-8")).get("GracefulExit")
            except (ValueError, AttributeError):
                return  # half-written: it will be read again before the next sink
            self._asked = self._asked or asked == 1

    def on_train_step_end(self, run_context: RunContext) -> None:
        if self._requested:
            run_context.original_args().exit_requested = True
            run_context.request_stop()

    def on_train_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        # All ranks write a checkpoint, or none: a signal that came to one after the last agreement does not count.
        requested = arguments.exit_requested or (self._requested and not arguments.loop.ranks.many)
        if requested and self._save:
            path = arguments.loop.save(self._directory, arguments.train_dataset, prefix=self._file_name)
            arguments.last_save_ckpt_step, arguments.latest_ckpt_file = arguments.loop.step_count, str(path)

    def __exit__(self, *exc_info: Any) -> None:
        self._signals.__exit__(*exc_info)
