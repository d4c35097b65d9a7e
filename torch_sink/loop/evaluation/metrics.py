"""Metrics: their state stays on the device until the end, when one collective and one copy make numbers of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_sink.loop.core.distributed import Ranks
from torch_sink.thread_waits import host_sync_allowed

_log = logging.getLogger("torch_sink")
_warned: set[type] = set()


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
        return _mean(sums)

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
    """Turn the `metrics` argument (None, a set or list of names, or name -> object) into name -> metric."""
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
    if name not in _NAMED:
        raise ValueError(
            f"unknown metric {name!r}; the names are 'accuracy', 'top5', 'loss', or pass a dict of objects"
        )
    return _NAMED[name]()


_NAMED: dict[str, Callable[[], Metric]] = {"accuracy": lambda: TopK(1), "top5": lambda: TopK(5), "loss": Loss}


def collect_results(metrics: dict[str, Metric], ranks: Ranks, samples: int) -> dict[str, Any]:
    """Python numbers by name; every rank calls it with the samples of its share, and gets the same numbers.

    What a metric computes that is no number or tensor of one element stays as it is.
    """
    values: dict[str, Any] = {}
    shares: list[tuple[str, Tensor, Callable[[Tensor], Any]]] = []
    for name, metric in metrics.items():
        summed: Any = metric
        if callable(getattr(metric, "sums", None)) and callable(getattr(metric, "compute_from", None)):
            values[name] = None
            shares.append((name, summed.sums(), summed.compute_from))
            continue
        averaged = ranks.many and not _reduces_itself(metric)
        # A rank without a share has no value, and what divides by the number of samples would fail.
        value = values[name] = 0.0 if averaged and samples == 0 else metric.compute()
        if averaged and _is_number(value):
            _warn_of_mean(name, metric)
            shares.append((name, _weighted(value, samples, ranks.device), _mean))
    for name, total, compute in _over_ranks(shares, ranks):
        values[name] = compute(total)
    return _on_host(values, ranks.device)


def _over_ranks(shares: list[Any], ranks: Ranks) -> list[Any]:
    """The shares with their tensors added up over the ranks, in one collective."""
    if not ranks.many or not shares:
        return shares
    table = torch.cat([share.to(ranks.device, torch.float64).flatten() for _, share, _ in shares])
    ranks.sum(table)
    parts = table.split([share.numel() for _, share, _ in shares])
    return [
        (name, part.reshape(share.shape), compute) for part, (name, share, compute) in zip(parts, shares, strict=True)
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _weighted(value: Any, samples: int, device: torch.device) -> Tensor:
    with host_sync_allowed():
        number = torch.as_tensor(value, dtype=torch.float64, device=device).detach().reshape(())
    weight = torch.full_like(number, samples)
    return torch.stack([torch.where(weight > 0, number * weight, 0.0), weight])


def _mean(sums: Tensor) -> Tensor:
    return sums[0] / sums[1]


def _reduces_itself(metric: Metric) -> bool:
    """Metrics of torchmetrics gather their states when they compute, unless they are told not to."""
    own = any(base.__module__.partition(".")[0] == "torchmetrics" for base in type(metric).__mro__)
    return own and getattr(metric, "sync_on_compute", True)


def _warn_of_mean(name: str, metric: Metric) -> None:
    if type(metric) not in _warned:
        _warned.add(type(metric))
        _log.warning(
            "metric %r (%s) cannot be added up over the ranks: its value is the mean of theirs, weighted by samples, "
            "which is exact for means over samples only; give it sums() and compute_from(sums), or use torchmetrics",
            name,
            type(metric).__name__,
        )


def _on_host(values: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Tensors of one element, also in nested containers, as Python numbers: all come to the host in one copy."""
    leaves, structure = torch.utils._pytree.tree_flatten(values)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.numel() == 1]
    if places:
        with host_sync_allowed():
            scalars = [leaves[index].detach().reshape(()).to(device, torch.float64) for index in places]
            numbers = torch.stack(scalars).tolist()  # host sync
        for index, number in zip(places, numbers, strict=True):
            leaves[index] = number
    result: dict[str, Any] = torch.utils._pytree.tree_unflatten(leaves, structure)
    return result
