"""Evaluates a network: metrics on the device, one pass over a loader, one host sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_sink.loop.callbacks.base import Callback, RunArguments, RunContext
from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.core.host_sync import host_sync_allowed
from torch_sink.loop.core.progress import epoch_length
from torch_sink.loop.engines.inference import Inference
from torch_sink.loop.evaluation.judging import Judged
from torch_sink.loop.evaluation.metrics import Loss, MeanMetric, Metric
from torch_sink.loop.evaluation.results import collect_results
from torch_sink.loop.step.precision import map_container


class Evaluator:
    """Runs passes in evaluation mode; what was compiled and recorded is kept for the next pass.

    Args:
        network: put into evaluation mode.
        inference: its forward makes Judged of a batch.
        metrics: by name.
        has_loss: whether there is a loss to show.
        ranks: that evaluate, each its share.
        device: of the network.
    """

    def __init__(
        self,
        network: nn.Module,
        inference: Inference,
        metrics: dict[str, Metric],
        *,
        has_loss: bool,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._network, self._forward, self._metrics = network, inference.forward, metrics
        self._has_loss, self._ranks, self._device = has_loss, ranks, device
        self._loss = Loss()
        self._named: dict[str, Loss] = {}
        self._recorded = [m for m in metrics.values() if isinstance(m, MeanMetric) and not isinstance(m, Loss)]
        self._others = [m for m in metrics.values() if not isinstance(m, MeanMetric)]
        for metric in self._others:
            if isinstance(metric, nn.Module):
                metric.to(device)  # torchmetrics: the states go where the outputs are
        self._runner = inference.runner(self._step)

    def run(
        self, loader: Any, callbacks: list[Callback], *, sink_mode: bool, stays: bool, **fields: Any
    ) -> dict[str, Any]:
        """One pass.

        Args:
            loader: a SinkLoader; the pass is what one `iter()` of it gives.
            callbacks: get the evaluation's events.
            sink_mode: step events once for the pass, else once a batch.
            stays: whether the same loader will be evaluated again.
            fields: of the RunContext.

        Returns:
            The results by name.
        """
        if self._ranks.sharded:  # a forward pass gathers the weights from all ranks
            self._ranks.check_lengths(epoch_length(loader), None, self._device)
        self._ranks.share_buffers()
        for metric in (self._loss, *self._named.values(), *self._metrics.values()):
            metric.reset()
        arguments = RunArguments(self._fields(loader, callbacks, sink_mode), **fields)
        with ExitStack() as stack:
            stack.enter_context(evaluating(self._network))
            stack.enter_context(self._runner.running(loader, stays=stays))
            for callback in callbacks:
                stack.enter_context(callback)
            return self._pass(loader, arguments, _events(callbacks, RunContext(arguments)))

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
        results = collect_results(self._shown(), self._ranks, samples, self._device)
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
    return value.clone() if isinstance(value, Tensor) else map_container(copied, value)


def _events(callbacks: list[Callback], context: RunContext) -> Callable[[str], None]:
    def event(name: str) -> None:
        with host_sync_allowed():
            for callback in callbacks:
                getattr(callback, name)(context)

    return event


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
