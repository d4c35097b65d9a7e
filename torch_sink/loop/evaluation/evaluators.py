"""The evaluations of one network: compiled code and recordings are made once for what is asked for repeatedly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from torch import nn

from torch_sink.loop.callbacks.base import Callback
from torch_sink.loop.core.batches import call_with, map_tensors, sink_over
from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.engines.build import Inference, Runner, Settings
from torch_sink.loop.evaluation.evaluator import (
    Evaluator,
    Judge,
    by_forward,
    by_function,
    copied,
    evaluating,
    supervised,
)
from torch_sink.loop.evaluation.metrics import Loss, make_metrics
from torch_sink.loop.step.precision import Precision

_KEPT = 8
Forward = Callable[[nn.Module, Any], Any]


class Evaluators:
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
        self._network, self._ranks, self._loss_fn, self._forward = network, ranks, loss_fn, forward
        self._evaluated = eval_network if eval_network is not None else self._network
        self._eval_network, self._precision, self._settings = eval_network, precision, settings
        self._inferences: OrderedDict[Any, tuple[Inference, Any]] = OrderedDict()
        self._evaluators: OrderedDict[Any, tuple[Evaluator, Any]] = OrderedDict()
        self._predictor: Any = None

    def evaluate(
        self,
        dataset: Any,
        metrics: Any,
        *,
        forward: Forward | None = None,
        callbacks: list[Callback] | None = None,
        sink_mode: bool = True,
        **fields: Any,
    ) -> dict[str, Any]:
        """One pass over a loader or SinkLoader, which it leaves where it was; see `Evaluator.run`."""
        evaluator = self._evaluator(metrics, forward)
        with sink_over(dataset, self._settings.device) as loader, loader.whole_pass():
            return evaluator.run(loader, callbacks or [], sink_mode=sink_mode, stays=loader is dataset, **fields)

    def compile_ahead(self, dataset: Any, metrics: Any) -> None:
        """Compile and record what `evaluate` will run; dataset and random generators are left as they were."""
        evaluator = self._evaluator(metrics, None)
        with sink_over(dataset, self._settings.device) as loader, loader.rehearsal() as batches:
            stays = loader is dataset
            # Once unrecorded, then once for each slot; what lies in no slot is copied to one place.
            evaluator.warm(islice(batches, 1 + (loader.ring_slots if stays else 1)), loader, stays=stays)

    def predict(self, inputs: tuple[Any, ...]) -> Any:
        """Outputs of the network, in memory of their own."""
        if self._predictor is None:
            inference = Inference(self._outputs, self._network, self._settings)
            self._predictor = Runner(inference.forward, inference)
        inputs = map_tensors(lambda tensor: tensor.to(self._settings.device), inputs)
        with evaluating(self._network), self._predictor.running(None, stays=False):
            outputs = self._predictor(inputs)
            return copied(outputs) if self._predictor.reuses_results else outputs

    def explain(self) -> list[str]:
        """How evaluations run, and what ran in a lower mode; empty before the first."""
        lines = self._settings.reasons.lines()
        modes = sorted({inference.mode for inference, _ in self._inferences.values()})
        return [f"evaluation: mode {mode}" for mode in modes] + [f"note on evaluation: {line}" for line in lines]

    def close(self) -> None:
        """Release what the device holds."""
        for evaluator, _ in self._evaluators.values():
            evaluator.close()
        if self._predictor is not None:
            self._predictor.close()
        self._evaluators.clear()
        self._inferences.clear()
        self._predictor = None

    def _evaluator(self, metrics: Any, forward: Forward | None) -> Evaluator:
        made = make_metrics(metrics)  # also where one is kept: what cannot be used never is
        named = frozenset(metrics) if isinstance(metrics, (set, frozenset, list, tuple)) else None
        objects = tuple((name, id(one)) for name, one in metrics.items()) if isinstance(metrics, Mapping) else None
        key = named, objects, id(forward)
        if key not in self._evaluators:
            if made and self._forward is not None and forward is None and self._eval_network is None:
                _check_needs_no_output(made)
            evaluator = Evaluator(
                self._evaluated,
                self._inference(forward),
                made,
                has_loss=forward is not None or self._has_loss,
                ranks=self._ranks,
            )
            self._evaluators[key] = evaluator, (metrics, forward)  # what the key names must live as long
            if len(self._evaluators) > _KEPT:
                self._evaluators.popitem(last=False)[1][0].close()
        self._evaluators.move_to_end(key)
        return self._evaluators[key][0]

    @property
    def _has_loss(self) -> bool:
        return any(one is not None for one in (self._loss_fn, self._forward, self._eval_network))

    def _inference(self, forward: Forward | None) -> Inference:
        if id(forward) not in self._inferences:
            inference = Inference(self._judge(forward), self._evaluated, self._settings)
            self._inferences[id(forward)] = inference, forward
            if len(self._inferences) > _KEPT:
                self._inferences.popitem(last=False)
        return self._inferences[id(forward)][0]

    def _judge(self, forward: Forward | None) -> Judge:
        network = self._network
        if forward is not None:
            return by_function(lambda batch: forward(network, batch), self._precision)
        if self._eval_network is not None:
            eval_network = self._eval_network
            return by_function(lambda batch: call_with(eval_network, batch), self._precision)
        if self._forward is not None:
            return by_forward(network, self._forward, self._precision)
        return supervised(network, self._loss_fn, self._precision)

    def _outputs(self, inputs: tuple[Any, ...]) -> Any:
        with self._precision.context():
            return self._precision.outputs(self._network(*inputs))


def _check_needs_no_output(metrics: dict[str, Any]) -> None:
    blind = [name for name, metric in metrics.items() if not isinstance(metric, Loss)]
    if blind:
        raise ValueError(
            f"metrics {', '.join(blind)} need outputs and labels, and this loop's forward= returns a loss; pass "
            "evaluate(loader, metrics=..., forward=lambda model, batch: (loss, output, labels))"
        )
