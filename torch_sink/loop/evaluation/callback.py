"""Evaluations in the course of a run: the callback for StepLoop, and what `Model.fit` makes of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from torch_sink.loop.callbacks.base import Callback, RunArguments, RunContext
from torch_sink.loop.callbacks.monitors import TimeMonitor, show
from torch_sink.loop.core.arguments import check_bool, check_count
from torch_sink.loop.evaluation.evaluator import monitored
from torch_sink.thread_waits import waits_watched

OLD_EVENTS = ("begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "end")
Evaluate = Callable[[RunArguments, Any, list[Callback]], dict[str, Any]]


class RunEvaluation(Callback):
    """Evaluates at some of a run's steps and epochs' ends, before the other callbacks see them.

    The results are in the context's `eval_results`, with the loss as "eval_loss", until the next epoch begins; in
    `history.evaluations`, by step; and in `last_results`. TimeMonitor and callbacks of the user's own get the
    evaluation's events.

    `evaluate` gets the run's arguments, a SinkLoader over the dataset, and callbacks; `at_epoch` tells by an epoch's
    number, from 1, whether to evaluate at its end.
    """

    comes_first = True

    def __init__(
        self,
        dataset: Any,
        evaluate: Evaluate,
        at_epoch: Callable[[int], bool],
        every_steps: int | None = None,
        verbose: bool = False,
    ) -> None:
        self._dataset, self._evaluate, self._at_epoch = dataset, evaluate, at_epoch
        self._every_steps, self._verbose = every_steps, verbose
        self._own_loader: Any = None
        self._evaluated_at: int | None = None
        self.last_results: dict[str, Any] = {}

    def steps_to_boundary(self, step_count: int) -> int | None:
        return self._every_steps - step_count % self._every_steps if self._every_steps else None

    def on_train_begin(self, run_context: RunContext) -> None:
        self._evaluated_at = None

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        run_context.original_args().update(eval_results={}, eval_step=None)

    def on_train_step_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        if self._every_steps is not None and arguments.cur_step_num % self._every_steps == 0:
            self._run(arguments)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        if self._at_epoch(arguments.cur_epoch_num) and self._evaluated_at != arguments.cur_step_num:
            self._run(arguments)

    def __exit__(self, *exc_info: Any) -> None:
        if self._own_loader is not None:
            self._own_loader.close()
            self._own_loader = None

    def _run(self, arguments: RunArguments) -> None:
        members = [one for one in arguments.list_callback if isinstance(one, TimeMonitor) or _tells_phases(one)]
        with waits_watched():
            results = self._evaluate(arguments, self._loader(arguments), [_EvalOnly(member) for member in members])
        self._evaluated_at, self.last_results = arguments.cur_step_num, monitored(results)
        arguments.update(eval_results=dict(self.last_results), eval_step=arguments.cur_step_num)
        arguments.history.evaluations.append((arguments.cur_step_num, results))
        arguments.history.host_syncs += 1
        if self._verbose:
            show(f"evaluation after step {arguments.cur_step_num}: {self.last_results}")

    def _loader(self, arguments: RunArguments) -> Any:
        from torch_sink.sink import SinkLoader

        if isinstance(self._dataset, SinkLoader):
            if self._dataset is arguments.train_dataset and arguments.loop.progress.epoch_steps:
                raise ValueError(
                    "the run trains on this SinkLoader and is inside its epoch; evaluate on a SinkLoader of its own: "
                    "SinkLoader(loader)"
                )
            return self._dataset
        if self._own_loader is None:
            device = arguments.loop.device
            self._own_loader = SinkLoader(self._dataset, device=None if device.type == "meta" else device)
        self._own_loader.is_last_epoch = True  # no batch is made ahead for an evaluation that is an epoch away
        return self._own_loader


class Evaluation(RunEvaluation):
    """Evaluates during `StepLoop.run`, with one host sync an evaluation.

    The results are in the context's `eval_results`, with the loss as "eval_loss", for `EarlyStopping`,
    `ReduceLROnPlateau`, `LossMonitor` and the like, wherever they stand in the list; all of them, by step, are in the
    run's `history.evaluations`. With more than one process each has the callback, and its share of the data.

    Args:
        loader: a loader or SinkLoader; not the SinkLoader that the run trains on.
        metrics: see `StepLoop.evaluate`.
        forward: see `StepLoop.evaluate`.
        ema: see `StepLoop.evaluate`.
        every_epochs: evaluate after so many epochs; default 1, or none if `every_steps` is given.
        every_steps: evaluate after exactly so many steps; sinks shrink to meet them.
        verbose: print the results.

    Attributes:
        last_results: of the latest evaluation, by name.

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

    def __init__(
        self,
        loader: Any,
        metrics: Any = None,
        *,
        every_epochs: int | None = None,
        every_steps: int | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        ema: bool = False,
        verbose: bool = False,
    ) -> None:
        for name, value in (("every_epochs", every_epochs), ("every_steps", every_steps)):
            if value is not None:
                check_count(name, value, minimum=1)
        check_bool("ema", ema)
        epochs = 1 if every_epochs is None and every_steps is None else every_epochs

        def evaluate(arguments: RunArguments, loader: Any, callbacks: list[Callback]) -> dict[str, Any]:
            evaluators = arguments.loop.evaluators(ema)
            return evaluators.evaluate(loader, metrics, forward=forward, callbacks=callbacks)  # type: ignore[no-any-return]

        super().__init__(
            loader, evaluate, lambda epoch: epochs is not None and epoch % epochs == 0, every_steps, verbose
        )


def fit_evaluation(dataset: Any, evaluate: Evaluate, frequency: Any) -> RunEvaluation:
    """Evaluates as `Model.fit` is told to: every so many epochs, or after the epochs listed."""
    listed = isinstance(frequency, (list, tuple, set))
    for number in frequency if listed else [frequency]:
        check_count("valid_frequency", number, minimum=1)
    return RunEvaluation(dataset, evaluate, lambda epoch: epoch in frequency if listed else epoch % frequency == 0)


class _EvalOnly(Callback):
    """Hands the evaluation's events on, but not entering and leaving: the run does that."""

    def __init__(self, inner: Callback) -> None:
        self._inner = inner
        for event in OLD_EVENTS:
            setattr(self, f"on_eval_{event}", getattr(inner, f"on_eval_{event}"))


def _is_custom(callback: Callback) -> bool:
    return not type(callback).__module__.startswith("torch_sink.")


def _old_events(callback: Callback) -> list[str]:
    """The old event names that the callback overrides."""
    return [name for name in OLD_EVENTS if getattr(type(callback), name) is not getattr(Callback, name)]


def _tells_phases(callback: Callback) -> bool:
    """Whether the callback is a user's, and events of an evaluation do not look to it like those of training."""
    return _is_custom(callback) and not _old_events(callback)


def check_fit_callbacks(callbacks: list[Callback]) -> None:
    """Raise for custom callbacks that override the old event names: fit could not tell train from eval."""
    for callback in callbacks:
        old = _old_events(callback)
        if old and _is_custom(callback):
            raise ValueError(
                f"{type(callback).__name__} overrides {', '.join(old)}, which in fit would mean training and "
                f"evaluation alike; override on_train_{old[0]} or on_eval_{old[0]} instead"
            )
