"""Evaluation of a model: metrics on the device, one host sync for a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from torch_sink.loop.arguments import check_bool, check_count
from torch_sink.loop.callbacks import Callback, RunArguments, RunContext
from torch_sink.loop.distributed import Ranks
from torch_sink.loop.host_sync import host_sync_allowed
from torch_sink.loop.members import call_with
from torch_sink.loop.metrics import Loss, Metric
from torch_sink.loop.monitors import TimeMonitor
from torch_sink.loop.precision import Precision, map_container
from torch_sink.loop.progress import epoch_length
from torch_sink.loop.results import collect_results

OLD_EVENTS = ("begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "end")


class Evaluation:
    """Runs one pass over a loader in evaluation mode.

    Args:
        network: called with the first member of each batch.
        eval_network: if given, called with the whole batch; returns (loss, output, labels).
        loss_fn: `loss_fn(output, *labels)`, or None for no loss.
        metrics: by name.
        precision: of the forward pass, or None.
        ranks: that evaluate, each its share.
        sink_mode: step events once for the pass, else once a batch.
    """

    def __init__(
        self,
        *,
        network: nn.Module,
        eval_network: nn.Module | None,
        loss_fn: Callable[..., Any] | None,
        metrics: dict[str, Metric],
        precision: Precision | None,
        ranks: Ranks,
        sink_mode: bool,
    ) -> None:
        check_bool("dataset_sink_mode", sink_mode)
        self._network, self._eval_network, self._loss_fn = network, eval_network, loss_fn
        self._metrics, self._precision, self._sink_mode = metrics, precision, sink_mode
        self._ranks, self._loss, self._samples = ranks, Loss(), 0

    def run(self, dataset: Any, callbacks: list[Callback]) -> dict[str, Any]:
        """One pass; returns the results by name."""
        from torch_sink.sink import SinkLoader

        device = next((parameter.device for parameter in self._network.parameters()), torch.device("cpu"))
        self._ranks.share_buffers()
        network = self._eval_network if self._eval_network is not None else self._ranks.inner
        self._samples = 0
        self._loss.reset()
        for metric in self._metrics.values():
            metric.reset()
        with ExitStack() as stack:
            stack.enter_context(evaluating(network))
            for callback in callbacks:
                stack.enter_context(callback)
            if isinstance(dataset, SinkLoader):
                loader = dataset
                stack.enter_context(dataset.whole_pass())
            else:
                loader = stack.enter_context(SinkLoader(dataset, device=device))
            if self._ranks.sharded:  # a forward pass gathers the weights from all ranks
                self._ranks.check_lengths(epoch_length(loader), None, device)
            return self._pass(loader, callbacks, device)

    def _pass(self, loader: Any, callbacks: list[Callback], device: torch.device) -> dict[str, Any]:
        arguments = RunArguments(
            eval_network=self._eval_network if self._eval_network is not None else self._network,
            network=self._network,
            valid_dataset=loader,
            metrics=self._metrics,
            loss_fn=self._loss_fn,
            batch_num=epoch_length(loader),
            cur_step_num=0,
            epoch_num=1,
            cur_epoch_num=1,
            list_callback=callbacks,
            dataset_sink_mode=self._sink_mode,
            mode="eval",
            parallel_mode="data_parallel" if self._ranks.many else "stand_alone",
            device_number=self._ranks.size,
        )
        context = RunContext(arguments)

        def event(name: str) -> None:
            for callback in callbacks:
                getattr(callback, name)(context)

        event("on_eval_begin")
        event("on_eval_epoch_begin")
        share_is_empty = self._ranks.many and arguments.batch_num == 0
        for index, batch in enumerate(() if share_is_empty else _batches(loader), 1):
            if index == 1 or not self._sink_mode:
                arguments.cur_step_num = (arguments.batch_num or index) if self._sink_mode else index
                event("on_eval_step_begin")
            arguments.net_outputs = self._batch(batch)
            arguments.cur_step_num = index
            if not self._sink_mode:
                event("on_eval_step_end")
        if self._sink_mode:
            event("on_eval_step_end")
        results = self._results(device)
        arguments.eval_results = {("eval_loss" if name == "loss" else name): value for name, value in results.items()}
        event("on_eval_epoch_end")
        event("on_eval_end")
        return results

    def _batch(self, batch: Any) -> Any:
        loss = None
        with self._precision.context() if self._precision is not None else nullcontext():
            if self._eval_network is not None:
                loss, output, *labels = call_with(self._eval_network, batch)
            else:
                if not isinstance(batch, (tuple, list)) or len(batch) < 2:
                    raise TypeError(
                        f"the batch is a {type(batch).__name__}; eval takes (x, y) batches, or an eval_network that "
                        "returns (loss, output, labels)"
                    )
                inputs, *labels = batch
                output = self._ranks.inner(inputs)
                output = self._precision.outputs(output) if self._precision is not None else output
                loss = self._loss_fn(output, *labels) if self._loss_fn is not None else None
        size = next((leaf.shape[0] for leaf in labels if isinstance(leaf, Tensor) and leaf.dim()), 1)
        self._samples += size
        if loss is not None:
            self._loss.update(loss, size)
        for metric in self._metrics.values():
            if not isinstance(metric, Loss):
                metric.update(output, *labels)
        return output

    def _results(self, device: torch.device) -> dict[str, Any]:
        metrics = {name: self._loss if isinstance(metric, Loss) else metric for name, metric in self._metrics.items()}
        if self._loss_fn is not None or self._eval_network is not None:
            metrics.setdefault("loss", self._loss)
        return collect_results(metrics, self._ranks, self._samples, device)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each module's mode is put back."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


class FitEvaluation(Callback):
    """Evaluates at the ends of epochs, before the other callbacks see them.

    Args:
        evaluation: runs the pass.
        dataset: to evaluate on.
        frequency: every so many epochs, or the epochs' numbers.
        callbacks: those of `fit`; TimeMonitor and custom ones get the evaluation's events.

    Raises:
        TypeError, ValueError: `frequency` is neither.
    """

    def __init__(self, evaluation: Evaluation, dataset: Any, frequency: Any, callbacks: list[Callback]) -> None:
        if isinstance(frequency, (list, tuple, set)):
            for number in frequency:
                check_count("valid_frequency", number, minimum=1)
        else:
            check_count("valid_frequency", frequency, minimum=1)
        self._evaluation, self._dataset, self._frequency = evaluation, dataset, frequency
        self._callbacks = [member for member in callbacks if isinstance(member, TimeMonitor) or is_custom(member)]

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        arguments = run_context.original_args()
        epoch, frequency = arguments.cur_epoch_num, self._frequency
        due = epoch in frequency if isinstance(frequency, (list, tuple, set)) else epoch % frequency == 0
        if not due:
            arguments.eval_results = {}
            return
        results = self._evaluation.run(self._dataset, [_EvalOnly(member) for member in self._callbacks])
        arguments.eval_results = {("eval_loss" if name == "loss" else name): value for name, value in results.items()}


class _EvalOnly(Callback):
    """Hands the evaluation's events on, but not entering and leaving: the run does that."""

    def __init__(self, inner: Callback) -> None:
        self._inner = inner
        for event in ("begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "end"):
            setattr(self, f"on_eval_{event}", getattr(inner, f"on_eval_{event}"))


def is_custom(callback: Callback) -> bool:
    """Whether the callback's class is a user's."""
    return not type(callback).__module__.startswith("torch_sink.")


def check_fit_callbacks(callbacks: list[Callback]) -> None:
    """Raise ValueError for custom callbacks that override the old event names: fit could not tell train from eval."""
    for callback in callbacks:
        old = [name for name in OLD_EVENTS if getattr(type(callback), name) is not getattr(Callback, name)]
        if old and is_custom(callback):
            raise ValueError(
                f"{type(callback).__name__} overrides {', '.join(old)}, which in fit would mean training and "
                f"evaluation alike; override on_train_{old[0]} or on_eval_{old[0]} instead"
            )


def move_to(value: Any, device: torch.device) -> Any:
    """Move the tensors in nested containers to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return map_container(lambda member: move_to(member, device), value)


def _batches(loader: Any) -> Iterator[Any]:
    """The loader's batches; making them may keep the host busy, computing with them may not."""
    with host_sync_allowed():
        iterator = iter(loader)
    while True:
        with host_sync_allowed():
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch
