"""The MindSpore-style face of the loop: Model and data_sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from torch_sink.loop.argument_names import explains_other_names, run_places
from torch_sink.loop.arguments import check_bool, check_count
from torch_sink.loop.callbacks import Callback, RunContext, check_callbacks
from torch_sink.loop.distributed import Ranks
from torch_sink.loop.evaluation import Evaluation, FitEvaluation, check_fit_callbacks, evaluating, move_to
from torch_sink.loop.history import RunHistory
from torch_sink.loop.jit import JitConfig
from torch_sink.loop.members import call_with
from torch_sink.loop.metrics import make_metrics
from torch_sink.loop.scaler import StaticLossScaler
from torch_sink.loop.step_loop import StepLoop


class Model:
    """Trains, evaluates and predicts; `train` runs on a StepLoop.

    Args:
        network: on its device. Without `loss_fn` it returns the loss itself and is called with the batch: a tuple or
            list as `network(*batch)`, a dict as `network(**batch)`, anything else as `network(batch)`.
        loss_fn: `loss_fn(network(x), y)`, or None.
        optimizer: needed by `train` and `fit`.
        metrics: a set of "accuracy", "top5" and "loss", or name -> object with `reset`, `update(output, *labels)` and
            `compute`; needed by `eval` and `fit`.
        amp_level: see `StepLoop(amp=)`.
        loss_scaler: see StepLoop.
        jit_config: how to compile; default eager code on the CPU, compiled and captured on CUDA.
        eval_network: `eval_network(*batch)` -> (loss, output, labels), used by `eval` instead of `network`.

    Raises:
        TypeError, ValueError: an argument that cannot be used.
    """

    @explains_other_names(
        **run_places("it belongs to the call: Model(...).train(epoch, train_dataset, callbacks=[...])"),
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
        metrics: Any = None,
        *,
        amp_level: str = "O0",
        loss_scaler: str | StaticLossScaler | None = "default",
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
        self._eval_network, self._ranks = eval_network, Ranks(network)
        self._metrics = make_metrics(metrics)
        self._jit_config = jit_config
        self._loop: StepLoop | None = None
        if optimizer is not None:
            self._loop = StepLoop(
                network,
                loss_fn,
                optimizer,
                sink_size=-1,
                amp=amp_level,
                loss_scaler=loss_scaler,
                mode=_mode(jit_config),
                jit_config=jit_config,
                forward=None if loss_fn is not None else call_with,
            )

    def __repr__(self) -> str:
        """What is trained, by what, and how."""
        parts = [type(self._network).__name__]
        if self._loss_fn is not None:
            parts.append(f"loss_fn={getattr(self._loss_fn, '__name__', type(self._loss_fn).__name__)}")
        if self._loop is not None:
            parts += [f"optimizer={type(self._optimizer).__name__}", f"amp_level={self._loop.precision.level!r}"]
        if self._metrics:
            parts.append(f"metrics={list(self._metrics)}")
        return f"Model({', '.join(parts)})"

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
        if self._loop is None:
            raise ValueError(
                "this Model has no optimizer, so it cannot train; pass one: Model(network, loss_fn, optimizer)"
            )
        return self._loop

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
            train_dataset: a loader, or a SinkLoader, which keeps the `sink_size` that it is given here.
            callbacks: called once per host return, or per step with `dataset_sink_mode=False`.
            dataset_sink_mode: whether a whole epoch runs between host returns.
            sink_size: steps in an epoch; -1 for the whole dataset: one pass, whatever a SinkLoader was made with.
                Without effect if `dataset_sink_mode` is False.
            initial_epoch: number of epochs done before.

        Raises:
            TypeError, ValueError: an argument that cannot be used, or batches that are not (x, y) for a loss function.
        """
        return self._train(
            epoch, train_dataset, check_callbacks(callbacks), dataset_sink_mode, sink_size, initial_epoch, None
        )

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
        """Train, and evaluate in between.

        Args:
            valid_dataset: evaluated before on_train_epoch_end; the results are in the context's `eval_results`.
            valid_frequency: evaluate every so many epochs, or after the epochs listed.
            valid_dataset_sink_mode: see `eval`.

        The other arguments are those of `train`.

        Raises:
            TypeError, ValueError: an argument that cannot be used, or no metrics.
        """
        members = check_callbacks(callbacks)
        check_fit_callbacks(members)
        check_bool("valid_dataset_sink_mode", valid_dataset_sink_mode)
        evaluation = None
        if valid_dataset is not None:
            if not self._metrics:
                raise ValueError("fit with a valid_dataset needs metrics: Model(..., metrics={'accuracy'})")
            runner = self._evaluation(valid_dataset_sink_mode)
            evaluation = FitEvaluation(runner, valid_dataset, valid_frequency, members)
        return self._train(epoch, train_dataset, members, dataset_sink_mode, sink_size, initial_epoch, evaluation)

    def eval(
        self, valid_dataset: Any, callbacks: Callback | list[Callback] | None = None, dataset_sink_mode: bool = True
    ) -> dict[str, Any]:
        """Evaluate; the metrics' states stay on the device, and come to the host once.

        Args:
            valid_dataset: a loader or SinkLoader of (x, y) batches.
            callbacks: eval step events come once for the pass, or per batch with `dataset_sink_mode=False`.
            dataset_sink_mode: see `callbacks`.

        Returns:
            The metrics by name, and "loss" if there is a loss function.

        Raises:
            ValueError: the model was made without metrics.
        """
        if not self._metrics:
            raise ValueError("eval needs metrics: Model(..., metrics={'accuracy'})")
        return self._evaluation(dataset_sink_mode).run(valid_dataset, check_callbacks(callbacks))

    def predict(self, *inputs: Any) -> Any:
        """Outputs of the network for one batch, in evaluation mode and without gradients."""
        device = next((parameter.device for parameter in self._network.parameters()), torch.device("cpu"))
        network = self._ranks.inner
        with evaluating(network), self._precision():
            outputs = network(*(move_to(value, device) for value in inputs))
            return self._loop.precision.outputs(outputs) if self._loop is not None else outputs

    def _train(
        self,
        epoch: int,
        dataset: Any,
        callbacks: list[Callback],
        sink_mode: bool,
        sink_size: int,
        initial_epoch: int,
        evaluation: Callback | None,
    ) -> RunHistory:
        check_count("epoch", epoch, minimum=1)
        check_count("initial_epoch", initial_epoch, minimum=0)
        check_count("sink_size", sink_size, minimum=1, special=-1, meaning="one pass of the dataset")
        check_bool("dataset_sink_mode", sink_mode)
        if initial_epoch >= epoch:
            raise ValueError(
                f"initial_epoch={initial_epoch} is not below epoch={epoch}; epoch is the number of the last one"
            )
        loop = self.loop
        internal: list[Callback] = [TwoColumns()] if self._loss_fn is not None else []
        if evaluation is not None:
            internal.append(evaluation)
        loop.sink_size = -1 if sink_mode else 1
        self._network.train()
        with self._sized(dataset, sink_size if sink_mode else -1) as loader:
            return loop.run_with(
                loader,
                epochs=epoch - initial_epoch,
                callbacks=[*internal, *callbacks],
                max_steps=None,
                dataset_sink_mode=sink_mode,
                initial_epoch=initial_epoch,
                metrics=self._metrics,
                list_callback=callbacks,
            )

    @contextmanager
    def _sized(self, dataset: Any, sink_size: int) -> Iterator[Any]:
        """A SinkLoader over the dataset, with epochs of `sink_size` batches."""
        from torch_sink.sink import SinkLoader

        if isinstance(dataset, SinkLoader):
            dataset.sink_size = sink_size
            yield dataset
        else:
            with SinkLoader(dataset, sink_size=sink_size, device=self.loop.device) as loader:
                yield loader

    def _evaluation(self, sink_mode: bool) -> Evaluation:
        return Evaluation(
            network=self._network,
            eval_network=self._eval_network,
            loss_fn=self._loss_fn,
            metrics=self._metrics,
            precision=self._loop.precision if self._loop is not None else None,
            ranks=self._ranks,
            sink_mode=sink_mode,
        )

    def _precision(self) -> Any:
        return self._loop.precision.context() if self._loop is not None else nullcontext()


class TwoColumns(Callback):
    """Raises, before the first step of a sink, unless the dataset yields data and labels for a loss function.

    Raises:
        ValueError: the batch is no tuple or list of two.
    """

    def on_train_step_begin(self, run_context: RunContext) -> None:
        batch = run_context.original_args().train_dataset_element
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, (tuple, list, dict)) else ""
            raise ValueError(
                f"the dataset yields a {type(batch).__name__}{size}, and loss_fn takes two columns, data and labels; "
                "for anything else make the Model of a network that returns the loss, without loss_fn"
            )


def _mode(config: JitConfig | None) -> str:
    if config is None:
        return "auto"
    if config.jit_level == "O0" and config.exc_mode != "sink":
        return "eager"
    return "graph" if config.captures else "compile"
