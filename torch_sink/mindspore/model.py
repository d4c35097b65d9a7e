"""`Model`: training, evaluation and prediction with the interface of MindSpore's class of this name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from torch_sink.common.arguments import check_bool, check_count, explains_wrong_calls
from torch_sink.loop.callbacks import Callback, LambdaCallback, RunContext, check_callbacks, older_events
from torch_sink.loop.controls import Evaluation, check_epochs
from torch_sink.loop.core.batches import call_with
from torch_sink.loop.core.history import RunHistory
from torch_sink.loop.engines.build import Mode
from torch_sink.loop.engines.jit import JitConfig
from torch_sink.loop.metrics import Loss, Metrics, make_metrics
from torch_sink.loop.step.optimizers import When
from torch_sink.loop.step.precision import Level
from torch_sink.loop.step.scaler import StaticLossScaler
from torch_sink.loop.step_loop import StepLoop
from torch_sink.thread_waits import host_sync_allowed


class Model:
    """Trains, evaluates and predicts, compiled and captured as by a StepLoop.

    Arguments not listed here are those of `StepLoop`; `amp_level` is its `amp`.

    Args:
        network: on its device. Without `loss_fn` it returns the loss itself and is called with the batch: a tuple or
            list as `network(*batch)`, a dict as `network(**batch)`, anything else as `network(batch)`.
        loss_fn: `loss_fn(network(x), y)`, or None.
        optimizer: needed by `train` and `fit`.
        metrics: a set of "accuracy", "top5", "miou" and "loss", or name -> object with `reset`, `update(output,
            *labels)` and `compute`, such as `Accuracy`; needed by `eval` and `fit`.
        mode: as for `StepLoop`; default the mode of `jit_config`.
        jit_config: how to compile; default eager code on the CPU, compiled and captured on CUDA.
        eval_network: `eval_network(*batch)` -> (loss, output, labels), used by `eval` instead of `network`.

    Raises:
        TypeError, ValueError: an argument that cannot be used.
    """

    @explains_wrong_calls(
        of_a_run="it belongs to the call: Model(...).train(epoch, train_dataset, callbacks=[...])",
        sink_size="it belongs to the call: Model(...).train(epoch, train_dataset, sink_size=...)",
        dataset_sink_mode="it belongs to the call: Model(...).train(epoch, train_dataset, dataset_sink_mode=...)",
        valid_dataset="it belongs to the call: Model(...).fit(epoch, train_dataset, valid_dataset)",
        eval_indexes="eval_network returns (loss, output, labels) in this order",
        boost_level="there are no boost levels; amp_level and jit_config choose how steps run",
    )
    def __init__(
        self,
        network: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        metrics: Metrics | None = None,
        *,
        amp_level: Level = "O0",
        amp_dtype: torch.dtype = torch.bfloat16,
        loss_scaler: Literal["default"] | StaticLossScaler | None = "default",
        scheduler: Any | None = None,
        schedule: When | None = None,
        clip_grad_norm: float | None = None,
        accumulate: int = 1,
        ema: float | None = None,
        mode: Mode = "auto",
        jit_config: JitConfig | None = None,
        eval_network: nn.Module | None = None,
    ) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"network is a {type(network).__name__}; pass a torch.nn.Module")
        if amp_level != "O0" and optimizer is None:
            raise ValueError(
                f"amp_level={amp_level!r} needs an optimizer; for evaluation alone convert the network with "
                "torch_sink.amp.auto_mixed_precision"
            )
        self._network, self._loss_fn, self._optimizer = network, loss_fn, optimizer
        self._eval_network, self._metrics = eval_network, make_metrics(metrics)
        self._loop = loop = StepLoop(
            network,
            loss_fn,
            optimizer,
            steps_per_sync=-1,
            amp=amp_level,
            amp_dtype=amp_dtype,
            loss_scaler=loss_scaler,
            scheduler=scheduler,
            schedule=schedule,
            clip_grad_norm=clip_grad_norm,
            accumulate=accumulate,
            ema=ema,
            mode=_mode(jit_config) if mode == "auto" else mode,
            jit_config=jit_config,
            forward=call_with if loss_fn is None and optimizer is not None else None,
        )
        self._evaluator = loop.evaluator_of_model(eval_network)

    def __repr__(self) -> str:
        """Network or StepLoop, and metrics."""
        trained = type(self._network).__name__ if self._optimizer is None else repr(self._loop)
        return f"Model({trained}, metrics={list(self._metrics)})"

    @property
    def train_network(self) -> nn.Module:
        """The network that trains."""
        return self._network

    @property
    def eval_network(self) -> nn.Module:
        """The network that is evaluated."""
        return self._eval_network if self._eval_network is not None else self._network

    @property
    def loop(self) -> StepLoop:
        """The StepLoop underneath.

        Raises:
            ValueError: the model has no optimizer.
        """
        if self._optimizer is None:
            raise ValueError(
                "this Model has no optimizer, so it cannot train; pass one: Model(network, loss_fn, optimizer)"
            )
        return self._loop

    @explains_wrong_calls(
        of_an_evaluation="it belongs to fit: Model(...).fit(epoch, train_dataset, valid_dataset)",
        timeline="record it by: with torch_sink.timeline(path): Model(...).train(...)",
    )
    def train(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Callback | list[Callback] | None = None,
        dataset_sink_mode: bool = True,
        sink_size: int = -1,
        initial_epoch: int = 0,
    ) -> RunHistory:
        """Train for (epoch - initial_epoch) * sink_size steps; the traversal of the data continues across epochs.

        Args:
            epoch: number of the last epoch.
            train_dataset: a loader or SinkLoader; the latter's `batches_per_epoch` has no effect here.
            callbacks: called once per host sync, or per step with `dataset_sink_mode=False`.
            dataset_sink_mode: whether a whole epoch runs between host syncs.
            sink_size: steps per epoch; -1 for one pass of the dataset. No effect if `dataset_sink_mode` is False.
            initial_epoch: number of epochs that were trained before; what has `set_epoch` and stands at 0 begins there.

        Raises:
            TypeError, ValueError: an argument that cannot be used, or batches that are not (x, y) for a loss function.
        """
        return Model.fit(
            self,
            epoch,
            train_dataset,
            callbacks=callbacks,
            dataset_sink_mode=dataset_sink_mode,
            sink_size=sink_size,
            initial_epoch=initial_epoch,
        )

    @explains_wrong_calls(timeline="record it by: with torch_sink.timeline(path): Model(...).fit(...)")
    def fit(
        self,
        epoch: int,
        train_dataset: Any,
        valid_dataset: Any = None,
        valid_frequency: int | list[int] | tuple[int, ...] = 1,
        callbacks: Callback | list[Callback] | None = None,
        dataset_sink_mode: bool = True,
        valid_dataset_sink_mode: bool = True,
        sink_size: int = -1,
        initial_epoch: int = 0,
    ) -> RunHistory:
        """Train, and evaluate after epochs.

        Args:
            valid_dataset: evaluated before on_train_epoch_end; the results are in the context's `eval_results`.
            valid_frequency: evaluate every so many epochs, or after the listed epochs.
            valid_dataset_sink_mode: see `eval`.

        The other arguments are those of `train`.

        Raises:
            TypeError, ValueError: an argument that cannot be used, or no metrics.
        """
        members, own = check_callbacks(callbacks), list[Callback]()
        check_count("epoch", epoch, minimum=1)
        check_count("initial_epoch", initial_epoch, minimum=0)
        check_count("sink_size", sink_size, minimum=1, special=-1, meaning="one pass of the dataset")
        check_bool("dataset_sink_mode", dataset_sink_mode)
        check_bool("valid_dataset_sink_mode", valid_dataset_sink_mode)
        if initial_epoch >= epoch:
            raise ValueError(
                f"initial_epoch={initial_epoch} is not below epoch={epoch}; epoch is the number of the last one"
            )
        if valid_dataset is not None:
            self._check_metrics("fit with a valid_dataset")
            for member in members:
                if older := older_events(member):  # they would mix up training and evaluation
                    raise ValueError(
                        f"{type(member).__name__} overrides {', '.join(older)}, which in fit would mean training and "
                        f"evaluation alike; override on_train_{older[0]} or on_eval_{older[0]} instead"
                    )
            check_epochs("valid_frequency", valid_frequency)
            evaluation = Evaluation(valid_dataset, self._metrics, every_epochs=valid_frequency)
            evaluation.evaluate = partial(self._evaluator.evaluate, sink_mode=valid_dataset_sink_mode)
            own.append(evaluation)
        if self._loss_fn is not None:
            own.append(LambdaCallback(on_train_step_begin=_check_two_columns))
        loop = self.loop
        self._network.train()
        return loop.run_epochs(
            train_dataset,
            [*own, *members],
            numbers_own_steps=True,
            epochs=epoch - initial_epoch,
            sink_size=sink_size if dataset_sink_mode else -1,
            steps_per_sync=-1 if dataset_sink_mode else 1,
            dataset_sink_mode=dataset_sink_mode,
            initial_epoch=initial_epoch,
            metrics=self._metrics,
            list_callback=members,
        )

    @explains_wrong_calls()
    def eval(
        self, valid_dataset: Any, callbacks: Callback | list[Callback] | None = None, dataset_sink_mode: bool = True
    ) -> dict[str, Any]:
        """Evaluate, with metrics on the device and one host sync.

        Args:
            valid_dataset: a loader or SinkLoader of (x, y) batches.
            callbacks: eval step events are called once per pass, or once per batch with `dataset_sink_mode=False`.
            dataset_sink_mode: see `callbacks`.

        Returns:
            The metrics by name, and "loss" if there is a loss function.

        Raises:
            ValueError: the model was made without metrics, or without a loss that one of them needs.
        """
        self._check_metrics("eval")
        check_bool("dataset_sink_mode", dataset_sink_mode)
        members = check_callbacks(callbacks)
        with ExitStack() as stack:
            for member in members:
                stack.enter_context(member)
            return self._evaluator.evaluate(
                valid_dataset, self._metrics, callbacks=members, sink_mode=dataset_sink_mode
            )

    @explains_wrong_calls()
    def predict(self, *inputs: Any) -> Any:
        """Compute the network's outputs for one batch, in evaluation mode and without gradients.

        See `StepLoop.predict`; the model needs no optimizer, loss function or metrics for it.
        """
        return self._evaluator.predict(inputs)

    @explains_wrong_calls()
    @host_sync_allowed()
    def build(self, train_dataset: Any = None, valid_dataset: Any = None) -> None:
        """Compile ahead of time what `train`, `fit` and `eval` will run; evaluations are captured too.

        This computes with one batch of each dataset. Weights, statistics, random generators and positions in the
        data stay as they were. With more than one process, all of them call it.

        Args:
            train_dataset: as for `train`.
            valid_dataset: as for `eval`; needs metrics.

        Raises:
            TypeError, ValueError: an argument that cannot be used, or a generator object, which cannot be read twice.
        """
        if valid_dataset is not None:
            self._check_metrics("build with a valid_dataset")
            self._evaluator.compile_ahead(valid_dataset)
        if train_dataset is not None:
            loop = self.loop
            self._network.train()
            loop.compile_ahead(train_dataset)

    @host_sync_allowed()
    def close(self) -> None:
        """Free graphs, compiled code and loaders, and remove the hooks of mixed precision. Idempotent."""
        self._loop.close()

    def _check_metrics(self, what: str) -> None:
        if not self._metrics:
            raise ValueError(f"{what} needs metrics: Model(..., metrics={{'accuracy'}})")
        named = [name for name, metric in self._metrics.items() if isinstance(metric, Loss)]
        if named and self._loss_fn is None and self._eval_network is None:
            raise ValueError(
                f"metric {named[0]!r} needs a loss, and there is no loss_fn; pass one, or Model(..., eval_network=...) "
                "that returns (loss, output, labels)"
            )


def _mode(config: JitConfig | None) -> Mode:
    if config is None:
        return "auto"
    if config.jit_level == "O0" and config.exc_mode != "sink":
        return "eager"
    return "graph" if config.captures else "compile"


def _check_two_columns(run_context: RunContext) -> None:
    """Raise TypeError, before a sink, unless a batch is (data, labels), as a loss function needs."""
    batch = run_context.original_args().train_dataset_element
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, (tuple, list, dict)) else ""
        raise TypeError(
            f"the dataset yields a {type(batch).__name__}{size}, and loss_fn takes two columns, data and labels; "
            "for anything else make the Model of a network that returns the loss, without loss_fn"
        )
