"""Callbacks that evaluate during a run, and that act on the results: Evaluation, EarlyStopping, ReduceLROnPlateau."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import lr_scheduler

from torch_sink.common.arguments import check_bool, check_choice, check_count, check_number, explains_wrong_calls
from torch_sink.common.random_state import global_random_state, set_global_random_state
from torch_sink.loop.callbacks import (
    Callback,
    MonitorMode,
    RunArguments,
    RunContext,
    best_of,
    check_monitor,
    check_monitor_options,
    monitored_number,
    older_events,
    warn_of_no_value,
)
from torch_sink.loop.evaluation import monitored
from torch_sink.loop.metrics import Metrics, make_metrics
from torch_sink.loop.monitors import show
from torch_sink.loop.step.state import check_forward
from torch_sink.thread_waits import waits_watched

ThresholdMode = Literal["rel", "abs"]


class Evaluation(Callback):
    """Evaluates during `StepLoop.run`, with one host sync per evaluation.

    The results are in the context's `eval_results`, with the loss as "eval_loss", for callbacks such as
    `EarlyStopping`, `ReduceLROnPlateau` and `LossMonitor`, in any order in the list. The run's `history.evaluations`
    has all of them, by step and under the same names. The global generators of torch (CPU), numpy and random are
    restored after an evaluation, so training continues as without it.

    Callbacks get the evaluation's events unless they override one without `on_train_` or `on_eval_`. With more than one
    process, each has the callback and a share of the data. Arguments not listed here are those of `StepLoop.evaluate`.

    Args:
        loader: a loader or SinkLoader; not the SinkLoader that the run trains on.
        every_epochs: evaluate every so many epochs, or after the listed epochs (from 1); default 1, or never if
            `every_steps` is given.
        every_steps: evaluate every so many steps exactly; sinks shrink to end there.

    Raises:
        TypeError, ValueError: an argument that cannot be used.

    Examples:
        >>> import torch, torch_sink
        >>> model = torch.nn.Linear(3, 2)
        >>> data = [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))] * 10
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loop = torch_sink.StepLoop(model, torch.nn.functional.cross_entropy, optimizer)
        >>> evaluation = torch_sink.Evaluation(data, metrics={"accuracy"}, every_steps=4)
        >>> history = loop.run(data, callbacks=[evaluation])
        >>> [step for step, results in history.evaluations]
        [4, 8]
    """

    comes_first = on_all_ranks = True
    evaluate: Callable[..., dict[str, Any]] | None = None  # used instead of the loop's evaluator

    @explains_wrong_calls()
    def __init__(
        self,
        loader: Any,
        metrics: Metrics | None = None,
        *,
        every_epochs: int | Collection[int] | None = None,
        every_steps: int | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        ema: bool = False,
    ) -> None:
        check_count("every_steps", every_steps, minimum=1, meaning="evaluations after epochs")
        if every_steps is None and every_epochs is None:
            every_epochs = 1
        if every_epochs is not None:
            check_epochs("every_epochs", every_epochs)
        check_bool("ema", ema)
        check_forward(forward)
        make_metrics(metrics)  # an unknown name raises now, and not after the first epoch
        self._dataset, self._metrics, self._forward, self._ema = loader, metrics, forward, ema
        self._every_epochs, self._every_steps = every_epochs, every_steps
        self._loader: Any = None
        self._closing = ExitStack()
        self._evaluated_at: int | None = None

    @property
    def result_names(self) -> list[str]:
        """Names of the results that callbacks can monitor."""
        return ["eval_loss", *make_metrics(self._metrics)]

    def steps_to_boundary(self, step_count: int) -> int | None:
        return self._every_steps - step_count % self._every_steps if self._every_steps else None

    def on_train_begin(self, run_context: RunContext) -> None:
        self._evaluated_at, loop = None, run_context.original_args().loop
        with loop.loaders.over(self._dataset):  # a loader that cannot be used raises now
            if self._ema and loop.state.average is None:
                loop.ema_model()

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        run_context.original_args().eval_results = {}

    def on_train_step_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        if self._every_steps is not None and arguments.loop.step_count % self._every_steps == 0:
            self._run(arguments)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        arguments, every = run_context.original_args(), self._every_epochs
        epoch = arguments.cur_epoch_num
        is_due = every is not None and (epoch % every == 0 if isinstance(every, int) else epoch in every)
        if is_due and self._evaluated_at != arguments.loop.step_count:
            self._run(arguments)

    def __exit__(self, *exc_info: Any) -> None:
        self._closing.close()
        self._loader = None

    def _run(self, arguments: RunArguments) -> None:
        if self._loader is None:  # kept, so that persistent workers live as long as the run
            self._loader = self._closing.enter_context(arguments.loop.loaders.over(self._dataset))
        members = [one for one in arguments.list_callback if not older_events(one)]
        evaluate = self.evaluate or partial(arguments.loop.evaluator(self._ema).evaluate, forward=self._forward)
        draws = global_random_state()  # training must draw the same numbers as without an evaluation
        try:
            with waits_watched():
                results = evaluate(self._loader, self._metrics, callbacks=members)
        finally:
            set_global_random_state(draws)
        self._evaluated_at = step = arguments.loop.step_count
        evaluations = arguments.history.evaluations
        # Another evaluation of this step, such as on another loader, keeps its results.
        others = arguments.eval_results if evaluations and evaluations[-1][0] == step else {}
        evaluations.append((step, monitored(results)))
        arguments.eval_results = {**(others or {}), **evaluations[-1][1]}
        arguments.history.host_syncs += 1


def check_epochs(name: str, epochs: Any) -> None:
    """Raise unless `epochs` is a number of epochs, or a list of epochs' numbers."""
    for number in epochs if isinstance(epochs, (list, tuple, set)) else [epochs]:
        check_count(name, number, minimum=1)


class _PlateauCallback(Callback):
    """Base of callbacks that judge a value at each epoch's end; all processes use the value of rank 0."""

    on_all_ranks = True

    def __init__(self, monitor: str, mode: MonitorMode, patience: int, verbose: bool) -> None:
        check_monitor_options(monitor, mode)
        self._name, self._mode = monitor, mode
        check_count("patience", patience, minimum=0)
        check_bool("verbose", verbose)
        self._patience, self._verbose = patience, verbose
        self._forget()

    def _forget(self) -> None:
        """Reset the state of the run; a subclass that overrides on_train_begin may not call this."""
        self._seen: bool | None = None  # whether the value was found; None before the first epoch's end

    def on_train_begin(self, run_context: RunContext) -> None:
        self._forget()
        check_monitor(self._name, self._mode, run_context.original_args().list_callback, known=("loss",))

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        results = arguments.eval_results or {}
        value = results.get(self._name, arguments.net_outputs if self._name == "loss" else None)
        value = None if value is None else monitored_number(self._name, value)
        value = arguments.loop.ranks.gather(value)[0]
        self._seen = bool(self._seen) or value is not None
        if value is not None:
            self._judge(value, run_context)

    def _judge(self, value: float, run_context: RunContext) -> None:
        """Act on the value of an epoch."""
        raise NotImplementedError

    def on_train_end(self, run_context: RunContext) -> None:
        if self._seen is False:
            warn_of_no_value(
                self._name,
                run_context.original_args(),
                "nothing was decided",
                "add a torch_sink.Evaluation that gives it, before this callback, or use monitor='loss'",
            )


class EarlyStopping(_PlateauCallback):
    """Ends the run when a value has stopped improving, as those of Keras and MindSpore do.

    Args:
        monitor: name of an evaluation result ("eval_loss", a metric), or "loss" for the last step's training loss.
        min_delta: smallest change that counts as an improvement.
        patience: the run ends after so many epochs without improvement; 0 is 1.
        verbose: print when it ends the run.
        mode: "min" if a smaller value is better, "max" if a larger one is. "auto" goes by the words of the name: "min"
            for "loss" or "err", "max" for "acc" or "top5" and for "miou"; any other name needs "min" or "max".
        baseline: only values better than this restart the count of epochs.
        restore_best_weights: restore the weights of the best epoch, or of the first if none was better, at the end of
            the run, unless something else stopped it: a checkpoint must then hold the latest weights.
    """

    @explains_wrong_calls()
    def __init__(
        self,
        monitor: str = "eval_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        verbose: bool = False,
        mode: MonitorMode = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
    ) -> None:
        super().__init__(monitor, mode, patience, verbose)
        check_number("min_delta", min_delta)
        if baseline is not None:
            check_number("baseline", baseline)
        check_bool("restore_best_weights", restore_best_weights)
        self._min_delta, self._baseline, self._restore = abs(min_delta), baseline, restore_best_weights

    def _forget(self) -> None:
        super()._forget()
        self._best: float | None = None
        self._waited = 0
        self._weights: dict[str, torch.Tensor] | None = None
        self._stopped = False

    def _improves(self, value: float, reference: float | None) -> bool:
        """Whether `value` is better than `reference` by more than `min_delta`; None is the worst reference."""
        is_smaller_better = best_of(self._name, self._mode) == "min"
        if reference is None:
            reference = math.inf if is_smaller_better else -math.inf
        # Rounded where theirs is: 0.4 is no improvement by 0.1 on 0.5.
        return value + self._min_delta < reference if is_smaller_better else value - self._min_delta > reference

    def _judge(self, value: float, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        self._waited += 1
        improves = self._improves(value, self._best)
        if self._restore and (improves or self._weights is None):
            state = arguments.train_network.state_dict()
            self._weights = {name: tensor.detach().clone() for name, tensor in state.items()}
        if improves:
            self._best = value
            if self._baseline is None or self._improves(value, self._baseline):
                self._waited = 0
        if self._waited >= max(self._patience, 1):
            if self._verbose:
                show(f"early stopping after epoch {arguments.cur_epoch_num}: {self._name} is {value}")
            self._stopped = True
            run_context.request_stop()

    def on_train_end(self, run_context: RunContext) -> None:
        super().on_train_end(run_context)
        arguments = run_context.original_args()
        if self._weights is not None and (self._stopped or arguments.history.stopped_by is None):
            arguments.train_network.load_state_dict(self._weights)


class ReduceLROnPlateau(_PlateauCallback):
    """Lowers the learning rate when a value has stopped improving: torch's scheduler of the same name, once an epoch.

    The rates are those of `torch.optim.lr_scheduler.ReduceLROnPlateau` with the same arguments, `step(value)` called at
    each epoch's end; a run that resumes counts its epochs without improvement anew. Arguments not listed here are those
    of `EarlyStopping`.

    Args:
        factor: the learning rate is multiplied by it; below 1.
        patience: epochs without improvement that are accepted; the rate is lowered after one more.
        verbose: print when it lowers the rate.
        threshold: smallest change that counts as an improvement.
        cooldown: epochs after a reduction that do not count as epochs without improvement.
        min_lr: lower bound of the rate, or a list with one for each parameter group.
        threshold_mode: "rel" if `threshold` is a fraction of the best value, "abs" if it is a difference to it.
        eps: a rate is left as it is if it would fall by no more than this.

    Raises:
        TypeError, ValueError: an argument that cannot be used.
    """

    @explains_wrong_calls(min_delta="as torch's scheduler, it has threshold=..., threshold_mode='abs' for that")
    def __init__(
        self,
        monitor: str = "eval_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: bool = False,
        mode: MonitorMode = "auto",
        threshold: float = 1e-4,
        cooldown: int = 0,
        min_lr: float | list[float] | tuple[float, ...] = 0.0,
        *,
        threshold_mode: ThresholdMode = "rel",
        eps: float = 1e-8,
    ) -> None:
        numbers = [("min_lr", rate) for rate in (min_lr if isinstance(min_lr, (list, tuple)) else [min_lr])]
        for name, value in [("factor", factor), ("threshold", threshold), ("eps", eps), *numbers]:
            check_number(name, value)
        if not 0 <= factor < 1:
            raise ValueError(f"factor={factor!r}: the rate is multiplied by it, so pass a number below 1")
        check_count("cooldown", cooldown, minimum=0)
        check_choice("threshold_mode", threshold_mode, get_args(ThresholdMode))
        super().__init__(monitor, mode, patience, verbose)
        self._options: dict[str, Any] = {
            "factor": factor,
            "patience": patience,
            "threshold": threshold,
            "threshold_mode": threshold_mode,
            "cooldown": cooldown,
            "min_lr": min_lr,
            "eps": eps,
        }

    def _forget(self) -> None:
        super()._forget()
        self._scheduler: lr_scheduler.ReduceLROnPlateau | None = None

    def on_train_begin(self, run_context: RunContext) -> None:
        super().on_train_begin(run_context)
        self._scheduler = self._made_for(run_context.original_args())

    def _made_for(self, arguments: RunArguments) -> lr_scheduler.ReduceLROnPlateau:
        return lr_scheduler.ReduceLROnPlateau(arguments.optimizer, best_of(self._name, self._mode), **self._options)

    def _judge(self, value: float, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        if self._scheduler is None:  # a subclass begins a run in its own way
            self._scheduler = self._made_for(arguments)
        before = [float(group["lr"]) for group in arguments.optimizer.param_groups]
        self._scheduler.step(value)
        for group, rate in zip(arguments.optimizer.param_groups, before, strict=True):
            if self._verbose and float(group["lr"]) != rate:
                show(f"epoch {arguments.cur_epoch_num}: learning rate reduced to {float(group['lr'])}")
