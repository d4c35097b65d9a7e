"""Evaluation metrics whose state stays on the device until the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_sink.loop.host_sync import host_sync_allowed


class Metric(Protocol):
    """What `Model(metrics=...)` takes; the metrics of torchmetrics fit."""

    def reset(self) -> None: ...
    def update(self, output: Any, *labels: Any) -> None: ...
    def compute(self) -> Any: ...


class MeanMetric:
    """Mean of a value over samples; subclasses say which value."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count: Tensor | int = 0

    def reset(self) -> None:
        """Forget all samples."""
        self._sum, self._count = None, 0

    def add(self, total: Tensor, count: int) -> None:
        """Take in the sum of `count` samples: float32 or float64 [] on the device."""
        total = total.detach().double()
        self._sum = total if self._sum is None else self._sum + total
        self._count += count

    def compute(self) -> Tensor:
        """The mean as float64 [] on the device; NaN without samples."""
        return torch.tensor(float("nan")) if self._sum is None else self._sum / self._count


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


def fetch_results(results: dict[str, Any]) -> dict[str, Any]:
    """Bring computed metrics to the host as Python numbers, all in one copy; what is no scalar stays as it is."""
    scalars = {name: value for name, value in results.items() if isinstance(value, Tensor) and value.numel() == 1}
    if not scalars:
        return results
    device = next((value.device for value in scalars.values() if value.device.type != "cpu"), torch.device("cpu"))
    stacked = torch.stack([value.detach().reshape(()).to(device, torch.float64) for value in scalars.values()])
    with host_sync_allowed():
        numbers = stacked.tolist()  # host sync
    return {**results, **dict(zip(scalars, numbers, strict=True))}
