"""What an evaluation makes of a batch: loss, outputs and labels, by the ways in which a model can say them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from torch_sink.loop.callbacks.members import call_with
from torch_sink.loop.step.precision import Precision
from torch_sink.loop.step.step import batch_tensors

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


def by_network(network: nn.Module, precision: Precision) -> Judge:
    """`network(*batch)` -> (loss, output, *labels)."""
    return by_function(lambda batch: call_with(network, batch), precision)


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
