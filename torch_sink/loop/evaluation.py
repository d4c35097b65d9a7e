"""Evaluations of one network: metrics on the device, one host sync a pass; what was compiled and recorded is kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from torch_sink.loop.callbacks import Callback, RunArguments, RunContext, ranks_in_context, tell
from torch_sink.loop.core.batches import call_with, epoch_length, map_tensors, sink_over
from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.engines.build import Inference, Runner, Settings
from torch_sink.loop.metrics import Forward, Judged, Loss, MeanMetric, collect_results, judge_by, make_metrics
from torch_sink.loop.step.precision import Precision
from torch_sink.thread_waits import host_sync_allowed

_KEPT = 8


class Evaluator:
    """Evaluates and predicts with one network, without the wrapper of DistributedDataParallel.

    Judged by `eval_network(*batch)` -> (loss, output, labels), the training loop's `forward`, or `loss_fn`.
    """

    def __init__(
        self,
        network: nn.Module,
        ranks: Ranks,
        loss_fn: Callable[..., Any] | None,
        precision: Precision,
        settings: Settings,
        *,
        forward: Forward | None = None,
        eval_network: nn.Module | None = None,
    ) -> None:
        self._network, self._ranks, self._loss_fn = network, ranks, loss_fn
        self._precision, self._settings = precision, settings
        self._evaluated = eval_network if eval_network is not None else network
        self._function = forward
        if eval_network is not None:
            self._function = lambda _, batch: call_with(eval_network, batch)
        self._has_loss = any(one is not None for one in (loss_fn, forward, eval_network))
        self._trains = forward is not None and eval_network is None
        self._passes: OrderedDict[Any, _Pass] = OrderedDict()
        self._predictor: Runner | None = None

    def evaluate(
        self,
        dataset: Any,
        metrics: Any,
        *,
        forward: Forward | None = None,
        callbacks: list[Callback] | None = None,
        sink_mode: bool = True,
    ) -> dict[str, Any]:
        """The results by name of one pass over a loader or SinkLoader, which it leaves where it was.

        Callbacks get step events once for the pass (`sink_mode`), or once a batch.
        """
        evaluation = self._pass(metrics, forward)
        with sink_over(dataset, self._settings.device) as loader, loader.whole_pass():
            if self._ranks.sharded:  # a forward pass gathers the weights from all ranks
                self._ranks.check_lengths(epoch_length(loader), None)
            self._ranks.share_buffers()
            about = RunArguments(
                eval_network=self._evaluated, network=self._network, loss_fn=self._loss_fn, mode="eval"
            )
            about.update(valid_dataset=loader, metrics=evaluation.metrics, list_callback=callbacks or [])
            about.update(epoch_num=1, cur_epoch_num=1, batch_num=epoch_length(loader), cur_step_num=0)
            about.update(ranks_in_context(self._ranks), dataset_sink_mode=sink_mode)
            event = partial(tell, callbacks or [], context=RunContext(about))
            with evaluating(self._evaluated), evaluation.runner.running(loader):
                return self._run(evaluation, loader, about, event)

    def compile_ahead(self, dataset: Any, metrics: Any) -> None:
        """Compile and record what `evaluate` will run; dataset and random generators are left as they were."""
        runner = self._pass(metrics, None).runner
        with (
            sink_over(dataset, self._settings.device) as loader,
            loader.rehearsal() as batches,
            evaluating(self._evaluated),
            runner.running(loader),
        ):
            for batch in islice(batches, 2):  # once unrecorded, then recorded
                runner(batch)

    def predict(self, inputs: tuple[Any, ...]) -> Any:
        """Outputs of the network, in memory of their own."""
        if self._predictor is None:
            inference = Inference(self._outputs, self._network, self._settings)
            self._predictor = Runner(inference.forward, inference)
        inputs = map_tensors(lambda tensor: tensor.to(self._settings.device), inputs)
        with evaluating(self._network), self._predictor.running(None):
            outputs = self._predictor(inputs)
            return map_tensors(torch.clone, outputs) if self._predictor.reuses_results else outputs

    def explain(self) -> list[str]:
        """How evaluations run, and what ran in a lower mode; empty before the first."""
        modes = sorted({one.inference.mode for one in self._passes.values()})
        lines = [f"note on evaluation: {line}" for line in self._settings.reasons.lines()]
        return [*(f"evaluation: mode {mode}" for mode in modes), *lines]

    def close(self) -> None:
        """Release what the device holds, and leave the network as it was found."""
        for runner in (*(one.runner for one in self._passes.values()), self._predictor):
            if runner is not None:
                runner.close()
        self._passes.clear()
        self._predictor = None
        self._precision.close()

    def _run(
        self, evaluation: _Pass, loader: Any, arguments: RunArguments, event: Callable[[str], None]
    ) -> dict[str, Any]:
        evaluation.reset()
        event("on_eval_begin")
        event("on_eval_epoch_begin")
        samples, sink_mode = 0, arguments.dataset_sink_mode
        share_is_empty = self._ranks.many and arguments.batch_num == 0
        for index, batch in enumerate(() if share_is_empty else _batches(loader), 1):
            if index == 1 or not sink_mode:
                arguments.cur_step_num = (arguments.batch_num or index) if sink_mode else index
                event("on_eval_step_begin")
            judged = evaluation.take(batch)
            samples += judged.samples
            arguments.net_outputs, arguments.cur_step_num = judged.output, index
            if not sink_mode:
                event("on_eval_step_end")
        if sink_mode:
            event("on_eval_step_end")
        if self._ranks.many and self._trains:  # a rank without a batch does not know what is averaged
            names = sorted({name for names in self._ranks.gather([*evaluation.named]) for name in names})
            evaluation.named = {name: evaluation.named.get(name, Loss()) for name in names}
        results = collect_results(evaluation.metrics, self._ranks, samples)
        arguments.eval_results = monitored(results)
        event("on_eval_epoch_end")
        event("on_eval_end")
        return results

    def _pass(self, metrics: Any, forward: Forward | None) -> _Pass:
        """What evaluates with these metrics; made anew unless it is among the latest few."""
        made = make_metrics(metrics)
        key = id(forward), tuple(made), tuple(map(id, made.values())) if isinstance(metrics, Mapping) else None
        if key not in self._passes:
            trains = self._trains and forward is None
            blind = [name for name, metric in made.items() if not isinstance(metric, Loss)]
            if trains and blind:
                raise ValueError(
                    f"metrics {', '.join(blind)} need outputs and labels, and this loop's forward= returns a loss; "
                    "pass evaluate(loader, metrics=..., forward=lambda model, batch: (loss, output, labels))"
                )
            if self._has_loss or forward is not None:
                made.setdefault("loss", Loss())
            inference = next((one.inference for one in self._passes.values() if one.forward is forward), None)
            if inference is None:
                function = forward or self._function
                judge = judge_by(function, self._network, self._loss_fn, self._precision, trains=trains)
                inference = Inference(judge, self._evaluated, self._settings)
            self._passes[key] = _Pass(inference, forward, made, self._ranks.device)
            if len(self._passes) > _KEPT:
                self._passes.popitem(last=False)[1].runner.close()
        self._passes.move_to_end(key)
        return self._passes[key]

    def _outputs(self, inputs: tuple[Any, ...]) -> Any:
        with self._precision.context():
            return self._precision.outputs(self._network(*inputs))


class _Pass:
    """One set of metrics and what fills it; `inference.forward` makes Judged of a batch."""

    def __init__(
        self, inference: Inference, forward: Forward | None, metrics: dict[str, Any], device: torch.device
    ) -> None:
        self.inference, self.forward, self._metrics = inference, forward, metrics
        self.named: dict[str, Loss] = {}
        self._means = [metric for metric in metrics.values() if isinstance(metric, MeanMetric)]
        self._others = [metric for metric in metrics.values() if not isinstance(metric, MeanMetric)]
        for metric in self._others:
            if isinstance(metric, nn.Module):
                metric.to(device)  # torchmetrics: the states go where the outputs are
        self.runner = Runner(self._step, inference)
        self._moves = device.type != "cpu"

    @property
    def metrics(self) -> dict[str, Any]:
        """What the results are made of."""
        return {**self.named, **self._metrics}

    def reset(self) -> None:
        for metric in self.metrics.values():
            metric.reset()

    def take(self, batch: Any) -> Judged:
        judged: Judged = self.runner(batch)
        if self._moves and (self._others or self.runner.reuses_results):
            # The next batch takes the place of this one, and the next replay that of these results.
            output, labels = map_tensors(torch.clone, (judged.output, judged.labels))
            judged = judged._replace(output=output, labels=labels)
        for metric in self._others:
            metric.update(judged.output, *judged.labels)
        return judged

    def _step(self, batch: Any) -> Judged:
        """What is recorded: nothing of it is decided by values, and states stay where they are."""
        judged: Judged = self.inference.forward(batch)
        for name, value in judged.named.items():
            self.named.setdefault(name, Loss()).update(value, judged.samples)
        for metric in self._means:
            if not isinstance(metric, Loss):
                metric.update(judged.output, *judged.labels)  # type: ignore[attr-defined]
            elif judged.loss is not None:
                metric.update(judged.loss, judged.samples)
        return judged


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
