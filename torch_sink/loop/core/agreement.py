"""What several processes decide once for all: stops, learning rates, monitored values, and the weights at the end."""

from __future__ import annotations

import logging
import math
import zlib
from typing import Any

import torch
from torch import Tensor

from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.core.host_sync import host_sync_allowed

_log = logging.getLogger("torch_sink")


def agree_on_rates(
    ranks: Ranks, flags: list[bool], optimizer: torch.optim.Optimizer, device: torch.device
) -> list[bool]:
    """Between two sinks, on every rank: whether each flag is set on any rank; learning rates become those of rank 0.

    One collective and one wait, and a second collective where the rates differ. It does not matter on which ranks the
    callbacks are that set the flags and rates.

    Args:
        ranks: more than one.
        flags: as many on each rank.
        optimizer: its groups' rates are compared.
        device: for the collectives.

    Returns:
        The flags, agreed on.
    """
    rates = rate_tensor(optimizer, device)
    raised = torch.tensor(flags, dtype=torch.float64, device=device)
    extremes = torch.cat([raised, rates, -rates])
    ranks.largest(extremes)
    with host_sync_allowed():
        numbers = extremes.tolist()  # host sync
    count = len(flags)
    highest, lowest = numbers[count : count + len(rates)], numbers[count + len(rates) :]
    if any(high != -low for high, low in zip(highest, lowest, strict=True)):
        ranks.send_from_first(rates)
        with host_sync_allowed():
            _log.info("a callback set other learning rates on one rank than on another; all take those of rank 0")
            for group, rate in zip(optimizer.param_groups, rates.tolist(), strict=True):  # host sync
                set_learning_rate(group, rate)
    return [number > 0 for number in numbers[:count]]


def rate_tensor(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor:
    """The groups' learning rates: float64 [groups], without a wait."""
    rates = [group["lr"] for group in optimizer.param_groups]
    if not any(isinstance(rate, Tensor) for rate in rates):
        return torch.tensor(rates, dtype=torch.float64, device=device)
    return torch.stack([torch.as_tensor(rate, dtype=torch.float64, device=device).reshape(()) for rate in rates])


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    """Write a learning rate into a parameter group, in place where it is a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def value_of_first(ranks: Ranks, value: float | None, device: torch.device) -> float | None:
    """The value that rank 0 has, on every rank; every rank calls it."""
    cell = torch.tensor([math.nan if value is None else value, float(value is not None)], device=device).double()
    ranks.send_from_first(cell)
    with host_sync_allowed():
        number, is_there = cell.tolist()  # host sync
    return number if is_there else None


def all_have(ranks: Ranks, names: list[str], device: torch.device) -> bool:
    """Whether every rank has the same names; every rank calls it."""
    code = zlib.crc32("\n".join(names).encode())
    extremes = torch.tensor([code, -code], device=device)
    ranks.largest(extremes)
    with host_sync_allowed():
        highest, lowest = extremes.tolist()  # host sync
    return bool(highest == -lowest)


def equalise_weights(ranks: Ranks, device: torch.device) -> None:
    """At a run's end, on every rank: where weights differ from rank to rank, all take those of rank 0, with a warning.

    They differ after a callback has changed them on one rank only, as `EarlyStopping(restore_best_weights=True)` does
    that only rank 0 has.

    Args:
        ranks: those of the model; nothing is done unless it is in DistributedDataParallel.
        device: for the collective.
    """
    weights = ranks.replicated_parameters()
    if not weights:
        return
    sums = torch.stack([_bits(weight).sum(dtype=torch.int64).to(device) for weight in weights])
    extremes = torch.cat([sums, -sums])
    ranks.largest(extremes)
    with host_sync_allowed():
        highest, lowest = extremes.reshape(2, -1).tolist()  # host sync
    different = [one for one, high, low in zip(weights, highest, lowest, strict=True) if high != -low]
    for weight in different:
        ranks.send_from_first(weight.data)
    if different:
        _log.warning(
            "%d of %d weights differed from rank to rank at the end of the run; all ranks have those of rank 0 now. "
            "Give all ranks the callbacks that change weights",
            len(different),
            len(weights),
        )


def _bits(weight: Tensor) -> Tensor:
    """The weight's bits as integers, so that sums of equal weights are equal, NaN and all."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    value = torch.view_as_real(weight.detach()) if weight.is_complex() else weight.detach()
    return value.view(integers[value.element_size()])
