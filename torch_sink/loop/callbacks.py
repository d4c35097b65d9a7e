"""The callback interface, the events of trainings and evaluations with their context, and simple callbacks."""

from __future__ import annotations

import difflib
import json
import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from torch_sink.common.arguments import (
    check_bool,
    check_choice,
    check_path,
    check_takes,
    check_text,
    explains_wrong_calls,
)
from torch_sink.common.ranks import warn
from torch_sink.loop.core.distributed import Ranks, set_learning_rate
from torch_sink.loop.core.history import RunHistory
from torch_sink.loop.saving import save_in_run
from torch_sink.thread_waits import host_sync_allowed

if TYPE_CHECKING:
    from torch_sink.sink import SinkLoader

MonitorMode = Literal["auto", "min", "max"]
# Words in a result's name that tell which value is the best; the first that is found counts, as for "top5_error".
_BEST: dict[Literal["min", "max"], str] = {"min": "loss(es)?|err(ors?)?", "max": r"acc(uracy)?|top\d*"}
OLDER_EVENTS = ("begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "end")
EVENTS = tuple(f"on_{phase}_{event}" for phase in ("train", "eval") for event in OLDER_EVENTS)


class RunArguments(dict[str, Any]):
    """The fields of a `RunContext`: a dict whose keys are also attributes.

    A field that the run, or its current phase, does not have is None; a name that is no field raises, and says which
    are near. A callback may add fields of its own, by key or by attribute.
    """

    # "| Any" where a field may be None: who reads it at an event at which it is there need not check.
    mode: str
    network: nn.Module
    loss_fn: Callable[..., Any] | Any
    list_callback: list[Callback]
    dataset_sink_mode: bool
    epoch_num: int
    cur_epoch_num: int
    batch_num: int | Any
    cur_step_num: int
    parallel_mode: str
    device_number: int
    rank: int
    metrics: dict[str, Any] | Any
    net_outputs: Any
    eval_results: dict[str, Any] | Any
    # Training
    loop: Any  # the `StepLoop`, which stands above this module
    train_network: nn.Module | Any
    optimizer: torch.optim.Optimizer | Any
    train_dataset: SinkLoader | Any
    train_dataset_element: Any
    accumulate: int | Any
    total_steps: int | Any
    initial_epoch: int | Any
    history: RunHistory | Any
    wait_seconds: float | Any
    losses: Tensor | Any
    overflows: Tensor | Any
    updates: Tensor | Any
    learning_rates: Tensor | Any
    step_metrics: dict[str, Tensor] | Any
    last_save_ckpt_step: int | Any
    latest_ckpt_file: str | Any
    # Evaluation
    eval_network: nn.Module | Any
    valid_dataset: SinkLoader | Any

    def __init__(self, **fields: Any) -> None:
        super().__init__(dict.fromkeys(RunArguments.__annotations__))
        self.update(fields)

    if not TYPE_CHECKING:  # a type checker knows the fields above, and finds a misspelled one

        def __getattr__(self, name):
            if name not in self:
                raise AttributeError(self._no_field(name))
            return self[name]

    def __missing__(self, name: str) -> Any:
        raise KeyError(self._no_field(name))

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def _no_field(self, name: str) -> str:
        fields = [field for field in self if not field.startswith("_")]
        near = difflib.get_close_matches(name, fields, n=3)
        return f"the run context has no field {name!r}; " + (
            f"did you mean {' or '.join(near)}?" if near else f"its fields are {', '.join(sorted(fields))}"
        )


class RunContext:
    """The argument of every event: fields of the run, and a way to end it."""

    def __init__(self, arguments: RunArguments) -> None:
        self._arguments = arguments
        self._stop_requested = False

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            methods = [each for each in vars(RunContext) if not each.startswith("_")]
            calls = {each: f"{each}()" for each in methods}
            calls |= {field: f"original_args().{field}" for field in RunArguments.__annotations__}
            near = difflib.get_close_matches(name, calls, n=1)
            instead = f"did you mean run_context.{calls[near[0]]}?" if near else f"it has {', '.join(sorted(methods))}"
            raise AttributeError(f"the run context has no attribute {name!r}; {instead}")

    def original_args(self) -> RunArguments:
        """The fields of the run, as attributes or keys, such as `original_args().cur_step_num`.

        The page "Write your own callback" lists them, with their meaning and when each is there. One that is not there
        is None; a misspelled one raises AttributeError.
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
        saves_training: whether it saves the training. Its `on_train_end` is then called before those of other
            callbacks, which may put other weights into the model, as `EarlyStopping` does.
        stop_signals: signals after which `run` returns once the current step is done. SIGINT and SIGTERM end a run in
            any case; if no callback lists them, they then have their usual effect, such as KeyboardInterrupt.
    """

    comes_first = False
    on_all_ranks = False
    saves_training = False
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

    @explains_wrong_calls()
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

    saves_training = True

    @explains_wrong_calls()
    def __init__(
        self,
        save_ckpt: bool = True,
        file_name: str = "Net",
        directory: str | Path = ".",
        sig: int = signal.SIGTERM,
        config_file: str | Path | None = None,
    ) -> None:
        check_bool("save_ckpt", save_ckpt)
        check_text("file_name", file_name, "a name without '/'")
        check_path("directory", directory)
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
                run_context.original_args()["_stop_reasons"].append("GracefulExit")

    def on_train_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        if self._save and was_told_to_stop(arguments):
            save_in_run(arguments, self._directory, self._file_name)


def ranks_in_context(ranks: Ranks) -> dict[str, Any]:
    """The fields of a RunContext about processes."""
    mode = "data_parallel" if ranks.many else "stand_alone"
    return {"parallel_mode": mode, "device_number": ranks.size, "rank": ranks.rank}


def older_events(callback: Callback) -> list[str]:
    """The events without `on_train_` or `on_eval_` that a callback overrides, called for training and evaluation."""
    return [name for name in OLDER_EVENTS if getattr(type(callback), name) is not getattr(Callback, name)]


def was_told_to_stop(arguments: RunArguments) -> bool:
    """Whether the run ended early because a signal or a file asked for it, on any rank."""
    return arguments.history.stopped_by not in (None, "request_stop")


def check_monitor_options(monitor: Any, mode: Any) -> None:
    """Raise unless the arguments are the name of a result and a mode."""
    check_text("monitor", monitor, "the name of a result, such as 'eval_loss'")
    check_choice("mode", mode, get_args(MonitorMode))


def best_of(monitor: str, mode: MonitorMode) -> Literal["min", "max"]:
    """Whether the smallest or the largest value of a result is the best; ValueError if neither name nor mode tells."""
    if mode != "auto":
        return mode
    if monitor == "miou":  # a metric of this package; an "mIoU" may be anybody's
        return "max"
    for best, words in _BEST.items():
        if re.search(rf"(?<![a-z])({words})(?![a-z])", monitor.lower()):
            return best
    raise ValueError(
        f"monitor={monitor!r}: the name does not tell whether a smaller or a larger value is better; pass mode='min' "
        "or mode='max'"
    )


def check_monitor(monitor: str, mode: MonitorMode, callbacks: Iterable[Callback], known: tuple[str, ...] = ()) -> None:
    """Raise ValueError if `monitor` is no result of the run's evaluations, or nothing tells which values are better.

    Where a user's callback may add results, or the run has no evaluation at all, warn instead; a name that is near to
    a result's is an error in any case. Values that are `known` need no evaluation.
    """
    _check_result(monitor, callbacks, known)
    best_of(monitor, mode)


def _check_result(monitor: str, callbacks: Iterable[Callback], known: tuple[str, ...]) -> None:
    members = list(callbacks)
    evaluated = [name for callback in members for name in getattr(callback, "result_names", ())]
    if monitor in evaluated or monitor in known:
        return
    others_add = any(not type(one).__module__.startswith("torch_sink.") for one in members)
    if not evaluated:
        if not others_add:
            warn("nothing evaluates monitor=%r: pass Evaluation(valid_loader, ...) as a callback", monitor)
        return
    message = f"monitor={monitor!r} is no result of this run's evaluations, which are {', '.join(sorted(evaluated))}"
    may_be_added = others_add or any(type(one) is LambdaCallback for one in members)
    if not may_be_added or difflib.get_close_matches(monitor, evaluated):
        raise ValueError(message)
    warn("%s", message)


def warn_of_no_value(monitor: str, arguments: RunArguments, missed: str, advice: str) -> None:
    """Warn at a run's end that no evaluation has given the monitored result, what was missed, and what to do."""
    results = ", ".join(arguments.eval_results or ["none"])
    warn("monitor %r had no value in this run, so %s; the results were %s: %s", monitor, missed, results, advice)


def monitored_number(monitor: str, value: Any) -> float:
    """A result as one number, which a callback can compare; TypeError if it is none.

    Only the first evaluation tells what a metric computes.
    """
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    given = f"tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise TypeError(
        f"monitor={monitor!r} is a {given}, and only one number can be better than another; monitor a metric whose "
        "compute() gives one, such as the mean"
    )


def tell(
    callbacks: Iterable[Callback], event: str, context: RunContext, after_each: Callable[[str], None] | None = None
) -> None:
    """Call an event of all callbacks, in which the host may wait for the device, and `after_each` with its name."""
    with host_sync_allowed():
        for callback in callbacks:
            getattr(callback, event)(context)
            if after_each is not None:
                after_each(f"{type(callback).__name__}.{event}")


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
                warn("%s.%s is no event and is never called; did you mean %s?", kind, name, *meant)
    return members
