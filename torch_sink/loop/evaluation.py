"""Evaluation and prediction with one network: metrics on the device, one host sync per pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from torch_sink.common.ranks import warn
from torch_sink.errors import add_note
from torch_sink.loop.callbacks import Callback, RunArguments, RunContext, ranks_in_context, tell
from torch_sink.loop.core.batches import call_with, epoch_length, map_tensors
from torch_sink.loop.core.sample_counter import SampleCounter
from torch_sink.loop.engines.build import EngineSettings, Inference
from torch_sink.loop.metrics import ClassMetric, Loss, MeanMetric, Metrics, collect_results, make_metrics, sums_samples
from torch_sink.loop.step.precision import ForwardPass, Function, Judged
from torch_sink.loop.step.state import TrainState

if TYPE_CHECKING:
    from torch_sink.sink.kept import KeptLoaders

_KEPT = 8  # evaluation functions whose compiled code and graphs are kept


class Evaluator:
    """Evaluates and predicts with one network, without the wrapper of DistributedDataParallel.

    A batch is evaluated by `eval_network(*batch)` -> (loss, output, labels), by the training loop's `forward`, or by
    `loss_fn`. Compiled code and graphs are kept from one evaluation to the next.
    """

    def __init__(
        self,
        state: TrainState,
        settings: EngineSettings,
        loaders: KeptLoaders,
        *,
        eval_network: nn.Module | None = None,
    ) -> None:
        self.network, self._ranks, self._loss_fn = state.model, state.ranks, state.loss_fn
        self._precision, self._settings, self._loaders = state.precision, settings, loaders
        self._evaluated = eval_network if eval_network is not None else state.model
        self._function = state.forward
        if eval_network is not None:
            self._function = lambda _, batch: call_with(eval_network, batch)
        self._has_loss = any(one is not None for one in (state.loss_fn, state.forward, eval_network))
        self._trains = state.forward is not None and eval_network is None
        self._judges: OrderedDict[Hashable, Inference] = OrderedDict()
        self._predictor: Inference | None = None

    def evaluate(
        self,
        dataset: Any,
        metrics: Metrics | None,
        *,
        forward: Function | None = None,
        callbacks: Iterable[Callback] = (),
        sink_mode: bool = True,
    ) -> dict[str, Any]:
        """Evaluates one pass over a loader or SinkLoader, whose position stays as it was; returns the results by name.

        Callbacks get step events once for the pass (`sink_mode`), or once per batch.
        """
        metrics = make_metrics(metrics)
        blind = [name for name, metric in metrics.items() if not isinstance(metric, Loss)]
        if self._trains and forward is None and blind:
            raise ValueError(
                f"metrics {', '.join(blind)} need outputs and labels, and this loop's forward= returns a loss; "
                "pass evaluate(loader, metrics=..., forward=lambda model, batch: (loss, output, labels))"
            )
        for metric in metrics.values():
            if isinstance(metric, ClassMetric):
                metric.follow_loss(self._loss_fn)
        self._precision.follow(self.network)
        judge = self._judge(forward)
        if self._has_loss or forward is not None:
            metrics.setdefault("loss", Loss())
        by_loss_fn = forward is None and self._function is None
        for metric in metrics.values():
            if isinstance(metric, Loss):
                metric.adds_up = by_loss_fn and sums_samples(self._loss_fn)
        with self._loaders.over(dataset) as loader, loader._whole_pass():
            if self._ranks.sharded:  # each forward pass gathers the weights from all ranks
                self._ranks.check_lengths(epoch_length(loader), None)
            self._ranks.share_buffers()
            about = RunArguments(eval_network=self._evaluated, network=self.network, loss_fn=self._loss_fn)
            about.update(mode="eval", valid_dataset=loader, metrics=metrics, list_callback=callbacks)
            about.update(epoch_num=1, cur_epoch_num=1, batch_num=epoch_length(loader), cur_step_num=0)
            about.update(ranks_in_context(self._ranks), dataset_sink_mode=sink_mode)
            event = partial(tell, callbacks, context=RunContext(about))
            with evaluating(self._evaluated), judge.running(loader):
                return self._run(judge, loader, about, event)

    def compile_ahead(self, dataset: Any) -> None:
        """Compile and capture what `evaluate` will run; dataset and random generators stay as they were."""
        judge = self._judge(None)
        with (
            self._loaders.over(dataset) as loader,
            loader._rehearsal() as batches,
            evaluating(self._evaluated),
            judge.running(loader),
        ):
            for batch in islice(batches, 3):  # uncaptured, trial, captured
                judge(batch)

    def predict(self, inputs: tuple[Any, ...]) -> Any:
        """Outputs of the network, in memory that no later call overwrites."""
        from torch_sink.sink import SinkLoader

        first = inputs[0] if inputs else None
        if first is None or isinstance(first, (DataLoader, Dataset, SinkLoader)):
            raise TypeError(f"predict got {'nothing' if first is None else f'a {type(first).__name__}'}; {_PREDICT}")
        if self._predictor is None:
            self._predictor = Inference(self._outputs, self.network, self._settings)
        self._precision.follow(self.network)
        inputs = map_tensors(lambda tensor: tensor.to(self._settings.device), inputs)
        with evaluating(self.network), self._predictor.running(None):
            own = torch.clone if self._predictor.reuses_results else lambda tensor: tensor
            return map_tensors(own, self._predictor(inputs))  # the original outputs must be freed here

    def explain(self) -> list[str]:
        """The modes of evaluations, and why some ran in a lower mode, as lines; empty before the first evaluation."""
        judges = [f"evaluation: mode {one.mode}, batches of the latest: {one.counts}" for one in self._judges.values()]
        return [*judges, *(f"note on evaluation: {line}" for line in self._settings.reasons.lines())]

    def close(self) -> None:
        """Free compiled code and graphs, and remove the hooks of mixed precision."""
        for inference in (*self._judges.values(), self._predictor):
            if inference is not None:
                inference.close()
        self._judges.clear()
        self._predictor = None
        self._precision.close()

    def _run(
        self, judge: Inference, loader: Any, arguments: RunArguments, event: Callable[[str], None]
    ) -> dict[str, Any]:
        metrics, sink_mode, samples = arguments.metrics, arguments.dataset_sink_mode, 0
        # The next replay overwrites these results, and the next batch this one, which a metric may keep.
        keeps = judge.reuses_results or not all(isinstance(metric, MeanMetric) for metric in metrics.values())
        copies = keeps and self._ranks.device.type != "cpu"
        for metric in metrics.values():
            metric.reset()
            if isinstance(metric, nn.Module):
                metric.to(self._ranks.device)  # metrics of torchmetrics move to the device of the outputs
        event("on_eval_begin")
        event("on_eval_epoch_begin")
        named: dict[str, Loss] = {}
        share_is_empty = self._ranks.many and arguments.batch_num == 0
        counter, batches = SampleCounter(loader.loader), iter(()) if share_is_empty else loader._epoch(None)
        for index, batch in enumerate(batches, 1):
            if index == 1 or not sink_mode:
                arguments.cur_step_num = (arguments.batch_num or index) if sink_mode else index
                event("on_eval_step_begin")
            inside, samples_in_it = loader._known_of_latest(batches, batch)
            size = counter.count(batch, inside) if samples_in_it is None else samples_in_it
            judged: Judged = judge(batch)
            if copies:
                output, labels = map_tensors(torch.clone, (judged.output, judged.labels))
                judged = judged._replace(output=output, labels=labels)
            for name, value in judged.named.items():
                named.setdefault(name, Loss()).update(value, size)
            for metric in metrics.values():
                if not isinstance(metric, Loss):
                    metric.update(judged.output, *judged.labels)
                elif judged.loss is not None:
                    metric.update(judged.loss, size)
            samples += size
            arguments.net_outputs, arguments.cur_step_num = judged.output, index
            if not sink_mode:
                event("on_eval_step_end")
        # Of an iterator that has ended the traversal has warned.
        if not arguments.cur_step_num and not self._ranks.many and not isinstance(loader.loader, Iterator):
            warn("%s gave no batch to evaluate: the results are NaN", type(loader.loader).__name__)
        if sink_mode:
            event("on_eval_step_end")
        if self._ranks.many and self._trains:  # a rank without a batch does not know the names
            names = sorted({name for names in self._ranks.gather([*named]) for name in names})
            named = {name: named.get(name, Loss()) for name in names}
        results = collect_results({**named, **metrics}, self._ranks, samples)
        arguments.eval_results = monitored(results)
        event("on_eval_epoch_end")
        event("on_eval_end")
        return results

    def _judge(self, forward: Function | None) -> Inference:
        """The function that evaluates a batch; the latest few are kept."""
        key = forward if isinstance(forward, Hashable) else id(forward)
        if key not in self._judges:
            function, trains = forward or self._function, self._trains and forward is None
            passes = ForwardPass(self.network, self._loss_fn, function, self._precision)
            judge = passes.mean_loss if trains else passes.judged
            self._judges[key] = Inference(judge, self._evaluated, self._settings, (self._loss_fn, function))
            if len(self._judges) > _KEPT:
                self._judges.popitem(last=False)[1].close()
        self._judges.move_to_end(key)
        return self._judges[key]

    def _outputs(self, inputs: tuple[Any, ...]) -> Any:
        try:
            with self._precision.context():
                return self._precision.outputs(self.network(*inputs))
        except Exception as error:
            if not isinstance(inputs[0], torch.Tensor):
                add_note(error, _PREDICT)
            raise


_PREDICT = (
    "predict takes what the network takes for one batch, as in model.predict(images); for all batches of a loader: "
    "[model.predict(images) for images, labels in loader]"
)


def monitored(results: dict[str, Any]) -> dict[str, Any]:
    """The results under the names that callbacks monitor: "eval_loss" for the loss."""
    return {("eval_loss" if name == "loss" else name): value for name, value in results.items()}


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """A context with the network in evaluation mode and without gradients; every module's mode is restored.

    By `train(mode)`, which modules override to change more than a flag: LoRA layers merge and split weights there.
    """
    modes = [(module, module.training) for module in network.modules()]
    training = network.training
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        network.train(training)
        for module, was_training in modes:  # parents first: what a module does to those inside is put right afterwards
            if module.training != was_training:  # the program has frozen it, as it does with BatchNorm
                module.train(was_training)
        for module, was_training in modes:  # an override chooses another mode, or a second parent has just set its own
            module.training = was_training
