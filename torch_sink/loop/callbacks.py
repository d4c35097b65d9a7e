"""The callback interface, twelve events and their context, and simple callbacks."""

from __future__ import annotations

import difflib
import json
import logging
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from torch_sink.common.arguments import check_takes
from torch_sink.loop.core.distributed import Ranks, set_learning_rate
from torch_sink.loop.saving import save_in_run
from torch_sink.thread_waits import host_sync_allowed

_log = logging.getLogger("torch_sink")
OLDER_EVENTS = ("begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "end")
EVENTS = tuple(f"on_{phase}_{event}" for phase in ("train", "eval") for event in OLDER_EVENTS)


class RunArguments(dict[str, Any]):
    """The fields of a `RunContext`: a dict whose keys are also attributes; unknown ones are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class RunContext:
    """The argument of every event: fields of the run, and a way to end it."""

    def __init__(self, arguments: RunArguments) -> None:
        self._arguments = arguments
        self._stop_requested = False

    def original_args(self) -> RunArguments:
        """Fields of the run, as attributes or keys.

        Train: `loop`, `train_network`, `network`, `loss_fn`, `optimizer`, `train_dataset`, `train_dataset_element`,
        `epoch_num`, `cur_epoch_num` (from 1), `batch_num` (steps in an epoch, None if unknown), `cur_step_num` (the
        last step of the coming sink at step_begin, the executed count at step_end), `net_outputs` (the last step's
        loss, float32 [] on the host), `losses`, `overflows`, `learning_rates` (of this host return), `history`,
        `dataset_sink_mode`, `mode`, `parallel_mode`, `device_number`, `list_callback`, `last_save_ckpt_step`,
        `latest_ckpt_file`, `eval_results` (of the latest evaluation in this epoch). Eval: `eval_network`,
        `valid_dataset`, `metrics`, `eval_results`.
        """
        return self._arguments

    def request_stop(self) -> None:
        """Ask the run to end after the callbacks of this host return."""
        self._stop_requested = True

    def get_stop_requested(self) -> bool:
        """Whether a callback has called `request_stop`."""
        return self._stop_requested


class Callback:
    """Base of all callbacks: override the events that you need.

    Training events are called once per host sync (`step`), once per epoch (`epoch`) and once per run. `begin`,
    `step_end` and the other names without `on_train_` or `on_eval_` are called for training and for evaluation:
    `step_end` is called unless you override `on_train_step_end` or `on_eval_step_end`. A callback is a context manager,
    entered before on_train_begin and left after on_train_end, also after an error.

    Attributes:
        comes_first: whether its events are called before those of other callbacks, whatever the order of the list.
        on_all_ranks: whether every process must have it, because it waits for the others, or decides for all.
        stop_signals: signals after which `run` returns once the current step is done. SIGINT and SIGTERM end a run in
            any case; if no callback lists them, they then have their usual effect, such as KeyboardInterrupt.
    """

    comes_first = False
    on_all_ranks = False
    stop_signals: tuple[int, ...] = ()

    def __enter__(self) -> Callback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release what the callback holds."""

    def begin(self, run_context: RunContext) -> None: ...
    def epoch_begin(self, run_context: RunContext) -> None: ...
    def step_begin(self, run_context: RunContext) -> None: ...
    def step_end(self, run_context: RunContext) -> None: ...
    def epoch_end(self, run_context: RunContext) -> None: ...
    def end(self, run_context: RunContext) -> None: ...

    def on_train_begin(self, run_context: RunContext) -> None:
        """Called once before the first step."""
        self.begin(run_context)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Called before each pass."""
        self.epoch_begin(run_context)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Called before each sink."""
        self.step_begin(run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Called after each sink, when its losses are on the host."""
        self.step_end(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Called after each pass."""
        self.epoch_end(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        """Called once after the last step."""
        self.end(run_context)

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Called once before an evaluation."""
        self.begin(run_context)

    def on_eval_epoch_begin(self, run_context: RunContext) -> None:
        """Called before the pass of an evaluation."""
        self.epoch_begin(run_context)

    def on_eval_step_begin(self, run_context: RunContext) -> None:
        """Called before each host return of an evaluation."""
        self.step_begin(run_context)

    def on_eval_step_end(self, run_context: RunContext) -> None:
        """Called after each host return of an evaluation."""
        self.step_end(run_context)

    def on_eval_epoch_end(self, run_context: RunContext) -> None:
        """Called after the pass of an evaluation."""
        self.epoch_end(run_context)

    def on_eval_end(self, run_context: RunContext) -> None:
        """Called once after an evaluation."""
        self.end(run_context)

    def steps_to_boundary(self, step_count: int) -> int | None:
        """The number of steps after `step_count` at which a sink has to end for this callback; None for any."""
        return None


class LambdaCallback(Callback):
    """Calls functions at events.

    Args:
        events: event name -> function of the RunContext, such as `on_train_step_end=print_loss`.

    Raises:
        TypeError: unknown event.
    """

    def __init__(self, **events: Callable[[RunContext], Any]) -> None:
        unknown = [name for name in events if name not in EVENTS]
        if unknown:
            raise TypeError(f"unknown events {', '.join(unknown)}; allowed are {', '.join(EVENTS)}")
        for name, function in events.items():
            if function is not None:
                setattr(self, name, function)


class LearningRateScheduler(Callback):
    """Sets the learning rate by a function, once per host return: the steps inside a sink keep one rate.

    For a rate that changes with every step pass `scheduler=` to StepLoop.

    Args:
        learning_rate_function: `f(learning_rate, cur_step_num)` -> learning rate, called for each parameter group.
    """

    def __init__(self, learning_rate_function: Callable[[float, int], float]) -> None:
        if not callable(learning_rate_function):
            raise TypeError(f"learning_rate_function is a {type(learning_rate_function).__name__}; pass a function")
        check_takes("learning_rate_function", learning_rate_function, "learning_rate", "cur_step_num")
        self._function = learning_rate_function

    def on_train_step_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        for group in arguments.optimizer.param_groups:
            set_learning_rate(group, float(self._function(float(group["lr"]), arguments.cur_step_num)))


class OnRequestExit(Callback):
    """Ends the run after the current step when a signal arrives or a file asks for it; `run` then returns.

    Args:
        save_ckpt: save a checkpoint at the end.
        file_name: prefix of the checkpoint.
        directory: parent of the checkpoint.
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
        self.on_all_ranks = save_ckpt  # one rank can end the run, but all of them write
        self.stop_signals = (sig,)
        self._config_file = Path(config_file) if config_file is not None else None

    def on_train_step_begin(self, run_context: RunContext) -> None:
        if self._config_file is not None and self._config_file.is_file():
            try:
                asked = json.loads(self._config_file.read_text(encoding="utf-8")).get("GracefulExit")
            except (ValueError, AttributeError):
                return  # the file is not complete yet; it is read again before the next sink
            if asked == 1:
                run_context.original_args().stop_reasons.append("GracefulExit")

    def on_train_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        if self._save and was_told_to_stop(arguments):
            save_in_run(arguments, self._directory, self._file_name)


def ranks_in_context(ranks: Ranks) -> dict[str, Any]:
    """The fields of a RunContext about processes."""
    return {"parallel_mode": "data_parallel" if ranks.many else "stand_alone", "device_number": ranks.size}


def older_events(callback: Callback) -> list[str]:
    """The events without `on_train_` or `on_eval_` that a callback overrides, called for training and evaluation."""
    return [name for name in OLDER_EVENTS if getattr(type(callback), name) is not getattr(Callback, name)]


def was_told_to_stop(arguments: RunArguments) -> bool:
    """Whether the run ended early because a signal or a file asked for it, on any rank."""
    return arguments.history.stopped_by not in (None, "request_stop")


def check_monitor(monitor: str, callbacks: Iterable[Callback], known: tuple[str, ...] = ()) -> None:
    """Raise ValueError if `monitor` is a misspelled result of the run's evaluations; warn if it is not one at all.

    It is no error then, because a user's callback may add results. Values that are `known` need no evaluation.
    """
    members = list(callbacks)
    evaluated = [name for callback in members for name in getattr(callback, "result_names", ())]
    if monitor in evaluated or monitor in known:
        return
    if not evaluated:
        if all(type(one).__module__.startswith("torch_sink.") for one in members if type(one) is not LambdaCallback):
            _log.warning("nothing evaluates monitor=%r: pass Evaluation(valid_loader, ...) as a callback", monitor)
        return
    message = f"monitor={monitor!r} is no result of this run's evaluations, which are {', '.join(sorted(evaluated))}"
    if difflib.get_close_matches(monitor, evaluated):
        raise ValueError(message)
    _log.warning("%s", message)


def tell(callbacks: Iterable[Callback], event: str, context: RunContext) -> None:
    """Call an event of all callbacks, in which the host may wait for the device."""
    with host_sync_allowed():
        for callback in callbacks:
            getattr(callback, event)(context)


def check_callbacks(callbacks: Callback | Iterable[Callback] | None) -> list[Callback]:
    """The callbacks as a list, in their order; warns about methods with names like events.

    Raises:
        TypeError: a member is no callback, or an event does not take a context.
    """
    if callbacks is not None and not isinstance(callbacks, (Callback, Iterable)):
        raise TypeError(f"callbacks is a {type(callbacks).__name__}; pass torch_sink.Callback objects in a list")
    members = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
    for member in members:
        if not isinstance(member, Callback):
            hint = " (pass an instance, not the class)" if isinstance(member, type) else ""
            raise TypeError(f"callbacks holds a {type(member).__name__}{hint}; each must be a torch_sink.Callback")
        kind = type(member).__name__
        for event in EVENTS:
            check_takes(f"{kind}.{event}", getattr(member, event), "run_context")
        for name in dir(type(member)):
            if name.startswith("on_") and not hasattr(Callback, name) and callable(getattr(member, name)):
                meant = difflib.get_close_matches(name, [one for one in EVENTS if "train" in one], n=1, cutoff=0.0)
                _log.warning("%s.%s is no event and is never called; did you mean %s?", kind, name, *meant)
    return members
