"""From metrics on the device to numbers on the host: over the ranks in one collective, to the host in one copy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.core.host_sync import host_sync_allowed
from torch_sink.loop.evaluation.metrics import Metric

_log = logging.getLogger("torch_sink")
_warned: set[type] = set()


def collect_results(metrics: dict[str, Metric], ranks: Ranks, samples: int, device: torch.device) -> dict[str, Any]:
    """Compute all metrics; every rank calls it, and gets the same numbers.

    Args:
        metrics: by name; see Metric.
        ranks: that evaluated, each its share.
        samples: of this rank's share.
        device: for the collective.

    Returns:
        Python numbers by name. What a metric computes that is no number or tensor of one element stays as it is.
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
            shares.append((name, _weighted(value, samples, device), _mean))
    for name, total, compute in _over_ranks(shares, ranks, device):
        values[name] = compute(total)
    return _on_host(values, device)


def _over_ranks(shares: list[Any], ranks: Ranks, device: torch.device) -> list[Any]:
    """The shares with their tensors added up over the ranks, in one collective."""
    if not ranks.many or not shares:
        return shares
    table = torch.cat([share.to(device, torch.float64).flatten() for _, share, _ in shares])
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
