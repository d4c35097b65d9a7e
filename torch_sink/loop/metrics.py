"""Metrics with their state on the device, and their results: one collective and one copy to the host per pass."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_sink.loop.core.distributed import Ranks
from torch_sink.thread_waits import host_sync_allowed

_log = logging.getLogger("torch_sink")


class MeanMetric:
    """Base of metrics that are the mean of a value over all samples of all ranks."""

    def __init__(self) -> None:
        self._state: Tensor | None = None

    def reset(self) -> None:
        """Drop all samples."""
        self._state = None

    def add(self, total: Tensor, count: int) -> None:
        """Add the sum of a value over `count` samples: `total` is float32 or float64 [] on the device."""
        if self._state is None:
            self._state = torch.zeros(2, dtype=torch.float64, device=total.device)
        self._state[0].add_(total.detach())
        self._state[1].add_(count)

    def sums(self) -> Tensor:
        """The sum of the value, and the number of samples: float64 [2] on the device."""
        return torch.zeros(2, dtype=torch.float64, device="cpu") if self._state is None else self._state

    def compute_from(self, sums: Tensor) -> Tensor:
        """The mean for a result of `sums`: float64 []; NaN without samples."""
        return sums[0] / sums[1]

    def compute(self) -> Tensor:
        """The mean over the samples of this rank: float64 [] on the device; NaN without samples."""
        return self.compute_from(self.sums())


class Loss(MeanMetric):
    """Mean loss over samples; each batch is weighted by its size."""

    def update(self, loss: Tensor, batch_size: int) -> None:
        """Add the mean loss of a batch, or a loss of one value per sample."""
        self.add(loss.mean() * batch_size, batch_size)


class TopK(MeanMetric):
    """Share of samples whose label is among the k highest scores."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self._k = k
        self._has_warned = False

    def update(self, output: Tensor, *labels: Tensor) -> None:
        """Add scores [batch, classes, ...] and labels: int [batch, ...], or one-hot or soft [batch, classes, ...]."""
        if not isinstance(output, Tensor) or output.dim() < 2:
            got = list(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
            raise ValueError(
                f"accuracy and top5 take scores [batch, classes, ...], and the output is {got}; for a network that "
                "returns something else pass a function that gives (loss, output, labels): Model(..., "
                "eval_network=...), StepLoop.evaluate(..., forward=...)"
            )
        classes = labels[0]
        if classes.shape == output.shape:
            classes = classes.argmax(1)
        if classes.shape != (wanted := (*output.shape[:1], *output.shape[2:])):
            raise ValueError(
                f"accuracy and top5 compare scores {list(output.shape)} with labels {list(wanted)}, and the labels are "
                f"{list(classes.shape)}; for these pass a metric of your own"
            )
        if output.shape[1] <= self._k and not self._has_warned:
            self._has_warned = True
            name, count = "accuracy" if self._k == 1 else f"top{self._k}", output.shape[1]
            _log.warning("%s says nothing: of %d classes all are among the best %d", name, count, self._k)
        best = output.topk(min(self._k, output.shape[1]), dim=1).indices
        hits = (best == classes.unsqueeze(1)).any(1)
        self.add(hits.sum(), hits.numel())


def make_metrics(metrics: Any) -> dict[str, Any]:
    """Turn the `metrics` argument (None, a set or list of names, or name -> object) into name -> metric.

    A metric has `reset()`, `update(output, *labels)` and `compute()`. With more than one process, a metric that also
    has `sums()` (a tensor to add over the ranks) and `compute_from(sums)` is computed from the sums of all ranks.
    Metrics of torchmetrics reduce themselves. For any other metric, the result is the ranks' values averaged by number
    of samples, which is exact for means over samples only.
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        for name, metric in metrics.items():
            if isinstance(metric, type):
                kind = metric.__name__
                raise TypeError(f"metric {name!r} is the class {kind}; pass an instance: {kind}()")
            missing = [part for part in ("reset", "update", "compute") if not callable(getattr(metric, part, None))]
            if missing:
                raise TypeError(f"metric {name!r} ({type(metric).__name__}) has no {', '.join(missing)}()")
        return dict(metrics)
    if not isinstance(metrics, (set, frozenset, list, tuple)):
        raise TypeError(f"metrics is a {type(metrics).__name__}; pass a set of names, or a dict of name -> metric")
    known: dict[str, Any] = {"accuracy": TopK(1), "top5": TopK(5), "loss": Loss()}
    for name in metrics:
        if name not in known:
            raise ValueError(
                f"unknown metric {name!r}; the names are 'accuracy', 'top5', 'loss', or pass a dict of objects"
            )
    return {name: known[name] for name in sorted(metrics)}


def collect_results(metrics: dict[str, Any], ranks: Ranks, samples: int) -> dict[str, Any]:
    """Computes the results by name, as Python numbers; every rank calls this and gets the same numbers.

    A result that is no number or tensor of one element stays as it is; on a rank without `samples` it is NaN.
    """
    values: dict[str, Any] = {}
    shares: dict[str, Tensor] = {}
    for name, metric in metrics.items():
        if _adds_up(metric):
            values[name], shares[name] = math.nan, metric.sums()
        elif not ranks.many or _reduces_itself(metric):
            values[name] = metric.compute()
        else:
            # A rank without samples cannot compute a value, nor know whether the value of others is a number: all
            # metrics have a share in the table.
            values[name] = value = metric.compute() if samples else math.nan
            shares[name] = torch.zeros(2, dtype=torch.float64, device=ranks.device)
            if samples and _is_number(value):
                _warn_of_mean(type(metric).__name__)
                with host_sync_allowed():
                    number = torch.as_tensor(value, dtype=torch.float64, device=ranks.device).detach().reshape(())
                shares[name] = torch.stack([number * samples, torch.full_like(number, samples)])
    if ranks.many and shares:  # one collective for all
        table = torch.cat([share.to(ranks.device, torch.float64).flatten() for share in shares.values()])
        ranks.sum(table)
        parts = table.split([share.numel() for share in shares.values()])
        shares = {name: part.reshape(shares[name].shape) for name, part in zip(shares, parts, strict=True)}
    for name, total in shares.items():
        if _adds_up(metrics[name]):
            values[name] = metrics[name].compute_from(total)
        elif _is_number(values[name]):
            values[name] = total[0] / total[1]
    return _on_host(values, ranks.device)


def _adds_up(metric: Any) -> bool:
    return all(callable(getattr(metric, part, None)) for part in ("sums", "compute_from"))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _reduces_itself(metric: Any) -> bool:
    """Whether a metric gathers its state from all ranks, as those of torchmetrics do unless `sync_on_compute=False`."""
    own = any(base.__module__.partition(".")[0] == "torchmetrics" for base in type(metric).__mro__)
    return own and bool(getattr(metric, "sync_on_compute", True))


@functools.cache
def _warn_of_mean(kind: str) -> None:
    _log.warning(
        "metrics of type %s cannot be added up over the ranks: the value is the mean of theirs, weighted by samples, "
        "which is exact for means over samples only; give it sums() and compute_from(sums), or use torchmetrics",
        kind,
    )


def _on_host(values: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Replaces tensors of one element, also in nested containers, by Python numbers, in one copy to the host."""
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
