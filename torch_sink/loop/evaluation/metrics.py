"""Evaluation metrics whose state stays on the device until the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Metric(Protocol):
    """What `Model(metrics=...)` takes; the metrics of torchmetrics fit.

    With more than one process, a metric that also has `sums()` (a tensor that adds up over the ranks) and
    `compute_from(sums)` is computed from the sums of all ranks. Metrics of torchmetrics reduce themselves. Of any other
    one, the ranks' values are averaged, weighted by samples: exact for means over samples only.
    """

    def reset(self) -> None: ...
    def update(self, output: Any, *labels: Any) -> None: ...
    def compute(self) -> Any: ...


class MeanMetric:
    """Mean of a value over samples, of all ranks; subclasses say which value, and need not know of ranks.

    The state is one tensor on the device, written in place: a captured graph may hold its address.
    """

    def __init__(self) -> None:
        self._state: Tensor | None = None

    def reset(self) -> None:
        """Forget all samples."""
        if self._state is not None:
            self._state.zero_()

    def add(self, total: Tensor, count: int) -> None:
        """Take in the sum of `count` samples: float32 or float64 [] on the device."""
        state = self._state
        if state is None or state.device != total.device:
            with torch.inference_mode(False):  # a state made in inference mode could not be written outside of it
                state = self._state = torch.zeros(2, dtype=torch.float64, device=total.device)
        state[0].add_(total.detach())
        state[1].add_(count)

    def sums(self) -> Tensor:
        """The sum over samples and their number: float64 [2] on the device."""
        return torch.zeros(2, dtype=torch.float64, device="cpu") if self._state is None else self._state

    def compute_from(self, sums: Tensor) -> Tensor:
        """The mean that belongs to what `sums` returned: float64 []; NaN without samples."""
        return sums[0] / sums[1]

    def compute(self) -> Tensor:
        """The mean as float64 [] on the device; NaN without samples."""
        return self.compute_from(self.sums())


class Loss(MeanMetric):
    """Mean loss over samples; a batch counts by its size."""

    def update(self, loss: Tensor, batch_size: int) -> None:
        """Take in the mean loss of a batch, or one value a sample."""
        self.add(loss.mean() * batch_size, batch_size)


class TopK(MeanMetric):
    """Share of samples whose label is among the k best scores.

    Args:
        k: how many scores count.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self._k = k

    def update(self, output: Tensor, *labels: Tensor) -> None:
        """Take in scores [batch, classes, ...] and labels: int [batch, ...], or one-hot or soft [batch, classes]."""
        if not isinstance(output, Tensor) or output.dim() < 2:
            got = list(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
            raise ValueError(
                f"accuracy and top5 take scores [batch, classes, ...], and the output is {got}; for a network that "
                "returns something else pass a function that gives (loss, output, labels): Model(..., "
                "eval_network=...), StepLoop.evaluate(..., forward=...)"
            )
        target = labels[0]
        if target.dim() == output.dim():
            target = target.argmax(1)
        best = output.topk(min(self._k, output.shape[1]), dim=1).indices
        hits = (best == target.unsqueeze(1)).any(1)
        self.add(hits.sum(), hits.numel())


def make_metrics(metrics: Any) -> dict[str, Metric]:
    """Turn the `metrics` argument into name -> metric.

    Args:
        metrics: None, a set or list of "accuracy", "top5" and "loss", or name -> object with `reset`, `update` and
            `compute`.

    Raises:
        ValueError: unknown name.
        TypeError: anything else.
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        for name, metric in metrics.items():
            missing = [
                method for method in ("reset", "update", "compute") if not callable(getattr(metric, method, None))
            ]
            if missing:
                raise TypeError(f"metric {name!r} ({type(metric).__name__}) has no {', '.join(missing)}()")
        return dict(metrics)
    if isinstance(metrics, (set, frozenset, list, tuple)):
        return {name: _named(name) for name in sorted(metrics)}
    raise TypeError(f"metrics is a {type(metrics).__name__}; pass a set of names, or a dict of name -> metric")


def _named(name: str) -> Metric:
    if name == "accuracy":
        return TopK(1)
    if name == "top5":
        return TopK(5)
    if name == "loss":
        return Loss()
    raise ValueError(f"unknown metric {name!r}; the names are 'accuracy', 'top5', 'loss', or pass a dict of objects")
