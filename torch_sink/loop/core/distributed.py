"""More than one process: when gradients are reduced, and what is decided once for all of them."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from torch_sink.thread_waits import host_sync_allowed

_log = logging.getLogger("torch_sink")


def without_wrappers(model: nn.Module) -> nn.Module:
    """Look through torch.compile's and Lightning Fabric's wrappers, down to the distributed or plain module."""
    while True:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "_forward_module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class Ranks:
    """The processes that train one model: wrapped in DistributedDataParallel, or sharded by `fully_shard`.

    Attributes:
        sharded: whether parameters are sharded (FSDP2).
        size: number of processes; 1 for a model that is not distributed.
        rank: number of this one.
        device: of the model, and of what the processes tell each other.
    """

    def __init__(self, model: nn.Module) -> None:
        self._given, self._model = model, cast(Any, without_wrappers(model))
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.sharded = any(hasattr(parameter, "to_local") for parameter in model.parameters())
        # The whole model need not be sharded itself: its parts are enough.
        self._sharded_modules: list[Any] = [m for m in model.modules() if hasattr(m, "set_requires_gradient_sync")]
        self._replicated = isinstance(self._model, nn.parallel.DistributedDataParallel)
        together = (self.sharded or self._replicated) and dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0

    @property
    def many(self) -> bool:
        """Whether there is more than one process."""
        return self.size > 1

    @property
    def inner(self) -> nn.Module:
        """The module inside DistributedDataParallel, whose forward takes no collective; else the model itself."""
        return self._model.module if self._replicated else self._given

    def gradient_sync(self) -> Callable[[bool], AbstractContextManager[Any]] | None:
        """The context of a backward pass, by whether gradients are reduced in it; None if there is one process."""
        if not self.many:
            return None
        if self._replicated:
            return lambda reduce: nullcontext() if reduce else self._model.no_sync()
        return self._sharded_sync

    def _sharded_sync(self, reduce: bool) -> AbstractContextManager[Any]:
        for module in self._sharded_modules:
            module.set_requires_gradient_sync(reduce, recurse=False)
        return nullcontext()

    def share_buffers(self) -> None:
        """Give every rank the buffers of rank 0, as the next forward of DistributedDataParallel would."""
        if self.many and self._replicated and self._model.will_sync_module_buffers():
            self._model._sync_buffers()

    def sum(self, table: Tensor) -> None:
        """Add a tensor up over the ranks, in place."""
        dist.all_reduce(table)

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self.many:
            dist.barrier()

    def extremes(self, values: Tensor) -> tuple[list[float], list[float]]:
        """The largest and the smallest of each value on any rank: one collective, one wait."""
        table = torch.stack([values, -values])
        largest_of_ranks(table)
        with host_sync_allowed():
            highest, negated = table.tolist()  # host sync
        return highest, [-value for value in negated]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.extremes(torch.tensor([float(flag)], device=self.device))[0] == [1]

    def value_of_first(self, value: float | None) -> float | None:
        """The value that rank 0 has, on every rank."""
        numbers = [math.nan if value is None else value, float(value is not None)]
        cell = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.broadcast(cell, 0)
        with host_sync_allowed():
            number, is_there = cell.tolist()  # host sync
        return number if is_there else None

    def all_have(self, names: list[str]) -> bool:
        """Whether every rank has the same names."""
        (highest,), (lowest,) = self.extremes(torch.tensor([zlib.crc32("\n".join(names).encode())], device=self.device))
        return highest == lowest

    def union(self, names: Iterable[str]) -> list[str]:
        """The names that any rank has, in the same order on every rank."""
        gathered: list[list[str]] = [[] for _ in range(self.size)]
        device: Any = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with host_sync_allowed(), device:  # NCCL sends objects by the current device, which need not be the model's
            dist.all_gather_object(gathered, list(names))  # host sync
        return sorted({name for of_one in gathered for name in of_one})

    def check_lengths(self, length: int | None, max_steps: int | None) -> None:
        """Raise on all ranks unless all have as many steps in an epoch; None for a length that nobody knows."""
        if not self.many:
            return
        (longest,), (shortest,) = self.extremes(torch.tensor([length or 0], device=self.device))
        if shortest != longest and (max_steps is None or max_steps > shortest):
            raise ValueError(
                f"an epoch has {shortest} steps on one rank and {longest} on another, which would wait for the first; "
                "give all ranks as many batches: DistributedSampler(..., drop_last=True), or SinkLoader(sink_size=...)"
            )

    def agree_on_rates(self, flags: list[bool], optimizer: torch.optim.Optimizer) -> list[bool]:
        """Between two sinks: whether each flag is set on any rank; learning rates become those of rank 0."""
        rates = _rate_tensor(optimizer, self.device)
        raised = torch.tensor(flags, dtype=torch.float64, device=self.device)
        highest, lowest = self.extremes(torch.cat([raised, rates]))
        if highest[len(flags) :] != lowest[len(flags) :]:
            dist.broadcast(rates, 0)
            with host_sync_allowed():
                _log.info("a callback set other learning rates on one rank than on another; all take those of rank 0")
                for group, rate in zip(optimizer.param_groups, rates.tolist(), strict=True):  # host sync
                    set_learning_rate(group, rate)
        return [value > 0 for value in highest[: len(flags)]]


def largest_of_ranks(table: Tensor) -> None:
    """Take each element's maximum over the ranks, in place."""
    dist.all_reduce(table, dist.ReduceOp.MAX)


def _rate_tensor(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor:
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


def forget_shardings() -> None:
    """Empty torch's cache of how operations on sharded tensors are sharded; it fills again when they are used.

    It keeps process groups alive until the process ends, where gloo's threads can no longer be joined and now and then
    abort the process.
    """
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
