"""Callbacks that evaluate during a run, and that act on the results: Evaluation, EarlyStopping, ReduceLROnPlateau."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import lr_scheduler

from torch_sink.common.arguments import check_bool, check_choice, check_count, explains_other_names
from torch_sink.common.random_state import global_random_state, set_global_random_state
from torch_sink.loop.callbacks import Callback, RunArguments, RunContext, check_monitor, older_events
from torch_sink.loop.evaluation import monitored
from torch_sink.loop.metrics import make_metrics
from torch_sink.loop.monitors import show
from torch_sink.thread_waits import waits_watched

_log = logging.getLogger("torch_sink")


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

    @explains_other_names()
    def __init__(
        self,
        loader: Any,
        metrics: Any = None,
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
        with loop.runner.wrappers.over(self._dataset):  # a loader that cannot be used raises now
            if self._ema and loop.state.average is None:
                loop.ema_model()

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        run_context.original_args().eval_results = {}

    def on_train_step_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        if self._every_steps is not None and arguments.cur_step_num % self._every_steps == 0:
            self._run(arguments)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        arguments, every = run_context.original_args(), self._every_epochs
        epoch = arguments.cur_epoch_num
        is_due = every is not None and (epoch % every == 0 if isinstance(every, int) else epoch in every)
        if is_due and self._evaluated_at != arguments.cur_step_num:
            self._run(arguments)

    def __exit__(self, *exc_info: Any) -> None:
        self._closing.close()
        self._loader = None

    def _run(self, arguments: RunArguments) -> None:
        if self._loader is None:  # kept, so that persistent workers live as long as the run
            self._loader = self._closing.enter_context(arguments.loop.runner.wrappers.over(self._dataset))
        if self._loader is not self._dataset:
            self._loader.is_last_epoch = True  # the next evaluation is too far away to make batches for it now
        members = [one for one in arguments.list_callback if not older_events(one)]
        evaluate = self.evaluate or partial(arguments.loop.runner.evaluator(self._ema).evaluate, forward=self._forward)
        draws = global_random_state()  # training must draw the same numbers as without an evaluation
        try:
            with waits_watched():
                results = evaluate(self._loader, self._metrics, callbacks=members)
        finally:
            set_global_random_state(draws)
        self._evaluated_at = step = arguments.cur_step_num
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

    def __init__(self, monitor: str, mode: str, patience: int, verbose: bool) -> None:
        check_choice("mode", mode, ("auto", "min", "max"))
        if not isinstance(monitor, str):
            raise TypeError(f"monitor={monitor!r}: pass a name such as 'eval_loss'")
        check_count("patience", patience, minimum=0)
        largest = mode == "max" or (mode == "auto" and ("acc" in monitor or "top" in monitor))
        self._name = monitor
        self._mode: Literal["min", "max"] = "max" if largest else "min"
        self._patience, self._verbose = max(patience, 1), verbose
        self._forget()

    def _forget(self) -> None:
        """Reset the state of the run; a subclass that overrides on_train_begin may not call this."""
        self._seen: bool | None = None  # whether the value was found; None before the first epoch's end

    def on_train_begin(self, run_context: RunContext) -> None:
        self._forget()
        check_monitor(self._name, run_context.original_args().list_callback, known=("loss",))

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        results = arguments.eval_results or {}
        value = results.get(self._name, arguments.net_outputs if self._name == "loss" else None)
        value = arguments.loop.ranks.gather(None if value is None else float(value))[0]
        self._seen = bool(self._seen) or value is not None
        if value is not None:
            self._judge(value, run_context)

    def _judge(self, value: float, run_context: RunContext) -> None:
        """Act on the value of an epoch."""
        raise NotImplementedError

    def on_train_end(self, run_context: RunContext) -> None:
        if self._seen is False:
            _log.warning(
                "monitor %r had no value in this run, so nothing was decided; the results were %s: add a "
                "torch_sink.Evaluation that gives it, before this callback, or use monitor='loss'",
                self._name,
                ", ".join(run_context.original_args().eval_results or ["none"]),
            )


class EarlyStopping(_PlateauCallback):
    """Ends the run when a value has stopped improving.

    Args:
        monitor: name of an evaluation result ("eval_loss", a metric), or "loss" for the last step's training loss.
        min_delta: smallest change that counts as an improvement.
        patience: the run ends after so many epochs without improvement.
        verbose: print when it ends the run.
        mode: "min", "max", or "auto": "max" for names with "acc" or "top" in them.
        baseline: only values better than this restart the count of epochs.
        restore_best_weights: restore the weights of the best epoch at the end of the run, unless something else stopped
            it: a checkpoint must then hold the latest weights.
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
        super().__init__(monitor, mode, patience, verbose)
        self._min_delta, self._baseline, self._restore = abs(min_delta), baseline, restore_best_weights

    def _forget(self) -> None:
        super()._forget()
        self._best, self._waited = math.inf if self._mode == "min" else -math.inf, 0
        self._weights: dict[str, torch.Tensor] | None = None
        self._stopped = False

    def _improves(self, value: float, reference: float) -> bool:
        """Whether `value` is better than `reference` by more than `min_delta`."""
        return (reference - value if self._mode == "min" else value - reference) > self._min_delta

    def _judge(self, value: float, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        self._waited += 1
        if self._improves(value, self._best):
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


class ReduceLROnPlateau(_PlateauCallback):
    """Lowers the learning rate when a value has stopped improving, as torch's scheduler of the same name does.

    Arguments not listed here are those of `EarlyStopping`.

    Args:
        factor: the learning rate is multiplied by it; below 1.
        verbose: print when it lowers the rate.
        cooldown: epochs after a reduction that do not count as epochs without improvement.
        min_lr: lower bound of the rate.

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
        super().__init__(monitor, mode, patience, verbose)
        # As in MindSpore and Keras, `patience` includes the epoch of the reduction, and `cooldown` the one after it.
        self._options: dict[str, Any] = {
            "factor": factor,
            "patience": self._patience - 1,
            "threshold": abs(min_delta),
            "threshold_mode": "abs",
            "cooldown": max(cooldown - 1, 0),
            "min_lr": min_lr,
            "eps": 0.0,
        }

    def _forget(self) -> None:
        super()._forget()
        self._scheduler: lr_scheduler.ReduceLROnPlateau | None = None

    def _judge(self, value: float, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        if self._scheduler is None:
            self._scheduler = lr_scheduler.ReduceLROnPlateau(arguments.optimizer, self._mode, **self._options)
        before = [float(group["lr"]) for group in arguments.optimizer.param_groups]
        self._scheduler.step(value)
        for group, rate in zip(arguments.optimizer.param_groups, before, strict=True):
            if self._verbose and float(group["lr"]) != rate:
                show(f"epoch {arguments.cur_epoch_num}: learning rate reduced to {float(group['lr'])}")
