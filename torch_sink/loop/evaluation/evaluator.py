"""One pass of an evaluation: what is made of each batch, metrics on the device, one host sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_sink.loop.callbacks.base import Callback, RunArguments, RunContext, tell
from torch_sink.loop.core.batches import batch_tensors, epoch_length, map_tensors
from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.engines.build import Inference, Runner
from torch_sink.loop.evaluation.metrics import Loss, MeanMetric, Metric, collect_results
from torch_sink.loop.step.precision import Precision
from torch_sink.thread_waits import host_sync_allowed

Judge = Callable[[Any], "Judged"]


class Judged(NamedTuple):
    """A batch, evaluated.

    Attributes:
        loss: mean over the samples, or one value a sample; None without a loss.
        output: what metrics get first; None where nobody said it.
        labels: what metrics get after it.
        named: further means over the samples, by name.
        samples: in the batch.
    """

    loss: Tensor | None
    output: Any
    labels: tuple[Any, ...]
    named: dict[str, Tensor]
    samples: int


def supervised(network: nn.Module, loss_fn: Callable[..., Any] | None, precision: Precision) -> Judge:
    """`loss_fn(network(x), *labels)` of batches (x, labels, ...)."""

    def judge(batch: Any) -> Judged:
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise TypeError(
                f"the batch is a {type(batch).__name__}; an evaluation takes (x, y) batches, or a function that gives "
                "(loss, output, labels): Model(..., eval_network=...), StepLoop.evaluate(..., forward=...)"
            )
        inputs, *labels = batch
        with precision.context():
            output = precision.outputs(network(inputs))
            loss = loss_fn(output, *labels) if loss_fn is not None else None
        return Judged(loss, output, tuple(labels), {}, count_samples(labels, batch))

    return judge


def by_function(function: Callable[[Any], Any], precision: Precision) -> Judge:
    """`function(batch)` -> (loss, output, *labels)."""

    def judge(batch: Any) -> Judged:
        with precision.context():
            result = function(batch)
            if not isinstance(result, (tuple, list)) or not result:
                raise TypeError(f"the evaluation gave a {type(result).__name__}; return (loss, output, labels)")
            loss, output, *labels = (*result, None) if len(result) == 1 else result
        return Judged(loss, precision.outputs(output), tuple(labels), {}, count_samples(labels, batch))

    return judge


def by_forward(network: nn.Module, forward: Callable[[nn.Module, Any], Any], precision: Precision) -> Judge:
    """A training loop's `forward(network, batch)` -> loss, or (loss, dict of named tensors)."""

    def judge(batch: Any) -> Judged:
        with precision.context():
            result = forward(network, batch)
        loss, named = result if isinstance(result, tuple) else (result, {})
        return Judged(loss, None, (), dict(named), count_samples((), batch))

    return judge


def count_samples(labels: Any, batch: Any) -> int:
    """The length of the first label with a dimension, else of the batch's first tensor with one."""
    for tensor in (*batch_tensors(list(labels)), *batch_tensors(batch)):
        if tensor.dim():
            return tensor.shape[0]
    return 1


class Evaluator:
    """Runs passes in evaluation mode, each rank over its share; what was compiled and recorded is kept for the next.

    `inference.forward` makes Judged of a batch; `has_loss` tells whether there is a loss to show.
    """

    def __init__(
        self,
        network: nn.Module,
        inference: Inference,
        metrics: dict[str, Metric],
        *,
        has_loss: bool,
        ranks: Ranks,
    ) -> None:
        self._network, self._forward, self._metrics = network, inference.forward, metrics
        self._has_loss, self._ranks, self._device = has_loss, ranks, ranks.device
        self._loss = Loss()
        self._named: dict[str, Loss] = {}
        self._recorded = [m for m in metrics.values() if isinstance(m, MeanMetric) and not isinstance(m, Loss)]
        self._others = [m for m in metrics.values() if not isinstance(m, MeanMetric)]
        for metric in self._others:
            if isinstance(metric, nn.Module):
                metric.to(ranks.device)  # torchmetrics: the states go where the outputs are
        self._runner = Runner(self._step, inference)

    def run(
        self, loader: Any, callbacks: list[Callback], *, sink_mode: bool, stays: bool, **fields: Any
    ) -> dict[str, Any]:
        """The results by name of one pass: what one `iter()` of the SinkLoader gives.

        Callbacks get step events once for the pass (`sink_mode`), or once a batch, and further `fields` in the
        RunContext. `stays` tells whether the same loader will be evaluated again.
        """
        if self._ranks.sharded:  # a forward pass gathers the weights from all ranks
            self._ranks.check_lengths(epoch_length(loader), None)
        self._ranks.share_buffers()
        for metric in (self._loss, *self._named.values(), *self._metrics.values()):
            metric.reset()
        arguments = RunArguments(self._fields(loader, callbacks, sink_mode), **fields)
        with ExitStack() as stack:
            stack.enter_context(evaluating(self._network))
            stack.enter_context(self._runner.running(loader, stays=stays))
            for callback in callbacks:
                stack.enter_context(callback)
            return self._pass(loader, arguments, partial(tell, callbacks, context=RunContext(arguments)))

    def close(self) -> None:
        """Release what the device holds."""
        self._runner.close()

    def warm(self, batches: Iterator[Any], loader: Any, *, stays: bool) -> None:
        """Compile and record for these batches; their results are forgotten."""
        with evaluating(self._network), self._runner.running(loader, stays=stays):
            for batch in batches:
                self._runner(batch)

    def _pass(self, loader: Any, arguments: RunArguments, event: Callable[[str], None]) -> dict[str, Any]:
        event("on_eval_begin")
        event("on_eval_epoch_begin")
        samples, sink_mode = 0, arguments.dataset_sink_mode
        share_is_empty = self._ranks.many and arguments.batch_num == 0
        for index, batch in enumerate(() if share_is_empty else _batches(loader), 1):
            if index == 1 or not sink_mode:
                arguments.cur_step_num = (arguments.batch_num or index) if sink_mode else index
                event("on_eval_step_begin")
            judged = self._batch(batch)
            samples += judged.samples
            arguments.net_outputs, arguments.cur_step_num = judged.output, index
            if not sink_mode:
                event("on_eval_step_end")
        if sink_mode:
            event("on_eval_step_end")
        results = collect_results(self._shown(), self._ranks, samples)
        arguments.eval_results = monitored(results)
        event("on_eval_epoch_end")
        event("on_eval_end")
        return results

    def _batch(self, batch: Any) -> Judged:
        judged: Judged = self._runner(batch)
        if self._device.type != "cpu" and (self._others or self._runner.reuses_results):
            # The next batch takes the place of this one, and the next replay that of these results.
            judged = judged._replace(output=copied(judged.output), labels=copied(judged.labels))
        for metric in self._others:
            metric.update(judged.output, *judged.labels)
        return judged

    def _step(self, batch: Any) -> Judged:
        """What is recorded: nothing of it is decided by values, and states stay where they are."""
        judged: Judged = self._forward(batch)
        if judged.loss is not None:
            self._loss.update(judged.loss, judged.samples)
        for name, value in judged.named.items():
            self._named.setdefault(name, Loss()).update(value, judged.samples)
        for metric in self._recorded:
            metric.update(judged.output, *judged.labels)
        return judged

    def _shown(self) -> dict[str, Metric]:
        """What the results are made of; all losses are one."""
        shown = {name: self._loss if isinstance(metric, Loss) else metric for name, metric in self._metrics.items()}
        if self._has_loss:
            shown.setdefault("loss", self._loss)
        return {**self._named, **shown}

    def _fields(self, loader: Any, callbacks: list[Callback], sink_mode: bool) -> dict[str, Any]:
        return {
            "eval_network": self._network,
            "network": self._network,
            "valid_dataset": loader,
            "metrics": self._metrics,
            "batch_num": epoch_length(loader),
            "cur_step_num": 0,
            "epoch_num": 1,
            "cur_epoch_num": 1,
            "list_callback": callbacks,
            "dataset_sink_mode": sink_mode,
            "mode": "eval",
            "parallel_mode": "data_parallel" if self._ranks.many else "stand_alone",
            "device_number": self._ranks.size,
        }


def monitored(results: dict[str, Any]) -> dict[str, Any]:
    """The results under the names that monitors use: "eval_loss" for the loss."""
    return {("eval_loss" if name == "loss" else name): value for name, value in results.items()}


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


def copied(value: Any) -> Any:
    """A copy of every tensor in nested containers."""
    return map_tensors(torch.clone, value)


def _batches(loader: Any) -> Iterator[Any]:
    """The loader's batches; making them may keep the host busy, computing with them may not."""
    with host_sync_allowed():
        iterator, end = iter(loader), object()
    while True:
        with host_sync_allowed():
            batch = next(iterator, end)
        if batch is end:
            return
        yield batch
