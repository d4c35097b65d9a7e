"""The forward pass of a batch under a precision, the same for training and for judging."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from torch_sink.loop.core.batches import batch_tensors
from torch_sink.loop.step.precision import Precision

Function = Callable[[nn.Module, Any], Any]


class Judged(NamedTuple):
    """A batch, evaluated: losses and other means count by its samples, metrics get output and labels."""

    loss: Tensor | None
    output: Any
    labels: tuple[Any, ...]
    named: dict[str, Tensor]
    samples: int


class ForwardPass:
    """Calls a model with a batch, under a precision: what "compile" compiles, for training and for evaluation.

    Args:
        function: `function(model, batch)`, or None for `loss_fn(model(x), *labels)` of batches (x, *labels).
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, function: Function | None, precision: Precision
    ) -> None:
        self._model, self._loss_fn, self._function, self._precision = model, loss_fn, function, precision

    def loss(self, batch: Any) -> tuple[Any, dict[str, Tensor]]:
        """The loss of a batch, still attached to its graph, and the named values that `function` returns beside it."""
        if self._function is None:
            _check_pair(batch)
            return self._precision.outputs(self._run(batch)[0]), {}
        result = self._run(batch)
        loss, named = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(named, dict):
            raise TypeError(f"forward returned (loss, {type(named).__name__}); return loss, or (loss, dict)")
        return self._precision.outputs(loss), named

    def mean_loss(self, batch: Any) -> Judged:
        """A batch judged by the function that trains: the loss, or (loss, dict of named tensors)."""
        result = self._run(batch)
        loss, named = result if isinstance(result, tuple) else (result, {})
        return Judged(loss, None, (), dict(named), _count_samples((), batch))

    def judged(self, batch: Any) -> Judged:
        """A batch judged by the loss function, or by a `function` that returns (loss, output, *labels)."""
        if self._function is None and (not isinstance(batch, (tuple, list)) or len(batch) < 2):
            raise TypeError(
                f"the batch is a {type(batch).__name__}; an evaluation takes (x, y) batches, or a function that gives "
                "(loss, output, labels): Model(..., eval_network=...), StepLoop.evaluate(..., forward=...)"
            )
        result = self._run(batch)
        if not isinstance(result, (tuple, list)) or not result:
            raise TypeError(f"the evaluation gave a {type(result).__name__}; return (loss, output, labels)")
        loss, output, *labels = (*result, None) if len(result) == 1 else result
        return Judged(loss, self._precision.outputs(output), tuple(labels), {}, _count_samples(labels, batch))

    def _run(self, batch: Any) -> Any:
        """What `function` returns, or (loss, output, *labels)."""
        precision = self._precision
        with precision.context():
            if self._function is not None:
                return self._function(self._model, batch)
            inputs, *labels = batch
            output = precision.outputs(self._model(inputs))
            if self._loss_fn is None:
                return None, output, *labels
            with precision.loss_context():
                return self._loss_fn(output, *labels), output, *labels


def _check_pair(batch: Any) -> None:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, (tuple, list, dict)) else ""
        raise TypeError(
            f"the batch is a {type(batch).__name__}{size}; a tuple or list (x, y) trains by loss_fn(model(x), y), "
            "for anything else pass forward=lambda model, batch: loss"
        )


def _count_samples(labels: Any, batch: Any) -> int:
    """The length of the first label with a dimension, else of the batch's first tensor with one."""
    tensors = (*batch_tensors(list(labels)), *batch_tensors(batch))
    return next((tensor.shape[0] for tensor in tensors if tensor.dim()), 1)
