"""Distributed training: when gradients are reduced, and decisions that all ranks make together."""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from torch_sink.common.integrations import without_wrappers
from torch_sink.thread_waits import host_sync_allowed

_log = logging.getLogger("torch_sink")


class Ranks:
    """The processes that train one model: wrapped in DistributedDataParallel, or sharded by `fully_shard`.

    A process that trains alone gathers its own values, and its flags are those of all ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        fsdp: Any = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")  # else no part is wrapped
        if any(isinstance(one, getattr(fsdp, "FullyShardedDataParallel", ())) for one in model.modules()):
            raise TypeError(
                "the model is wrapped in FullyShardedDataParallel (FSDP1), whose losses and overflows would not be "
                "agreed on between the ranks; shard it with torch.distributed.fsdp.fully_shard(model), or wrap it in "
                "DistributedDataParallel"
            )
        self._given, self._model = model, cast(Any, without_wrappers(model))
        # Of the model, and of the tensors that processes exchange.
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.sharded = any(hasattr(parameter, "to_local") for parameter in model.parameters())
        # Parts of a model can be sharded without the whole.
        self._sharded_modules: list[Any] = [m for m in model.modules() if hasattr(m, "set_requires_gradient_sync")]
        self._replicated = isinstance(self._model, nn.parallel.DistributedDataParallel)
        together = (self.sharded or self._replicated) and dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if together else 1  # number of processes
        self.rank = dist.get_rank() if together else 0  # of this process

    @property
    def many(self) -> bool:
        """Whether there is more than one process."""
        return self.size > 1

    @property
    def inner(self) -> nn.Module:
        """The module inside DistributedDataParallel, whose forward needs no collective; else the model itself."""
        return self._model.module if self._replicated else self._given

    def gradient_sync(self, reduce: bool) -> AbstractContextManager[Any]:
        """A context for a forward and backward pass with or without a reduction of gradients over the ranks."""
        if self.many and self._replicated and not reduce:
            return cast(AbstractContextManager[Any], self._model.no_sync())
        if self.many:
            for module in self._sharded_modules:
                module.set_requires_gradient_sync(reduce, recurse=False)
        return nullcontext()

    def reset_reducer(self) -> None:
        """Reset DistributedDataParallel after an error in a backward pass, the rest of which it would wait for."""
        if self._replicated:
            self._model.reducer._reset_state()

    def share_buffers(self) -> None:
        """Give every rank the buffers of rank 0, as the next forward of DistributedDataParallel would."""
        if self.many and self._replicated and self._model.will_sync_module_buffers():
            self._model._sync_buffers()

    def sum(self, table: Tensor) -> None:
        """Add a tensor up over the ranks, in place."""
        dist.all_reduce(table)

    def wait(self) -> None:
        """Wait until every rank calls this; only if there are `many`."""
        dist.barrier()

    def any_of(self, flags: list[bool]) -> list[bool]:
        """Whether each flag is set on any rank, in one collective with one host sync."""
        if not self.many:
            return flags
        table = torch.tensor(flags, dtype=torch.float32, device=self.device)
        largest_of_ranks(table)
        with host_sync_allowed():
            return [value > 0 for value in table.tolist()]  # host sync

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in the order of ranks; any Python object that can be pickled."""
        if not self.many:
            return [value]
        gathered: list[Any] = [None] * self.size
        device: Any = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        # NCCL sends objects through the current device, which may be another than the model's.
        with host_sync_allowed(), device:
            dist.all_gather_object(gathered, value)  # host sync
        return gathered

    def check_lengths(self, length: int | None, max_steps: int | None) -> None:
        """Raise on all ranks unless all have the same number of steps in an epoch; None is an unknown length."""
        lengths = [length or 0 for length in self.gather(length)]
        shortest, longest = min(lengths), max(lengths)
        if shortest != longest and (max_steps is None or max_steps > shortest):
            raise ValueError(
                f"an epoch has {shortest} steps on one rank and {longest} on another, which would wait for the first; "
                "give all ranks as many batches: DistributedSampler(..., drop_last=True), or "
                "SinkLoader(batches_per_epoch=...)"
            )

    def agree_on_rates(self, flags: list[bool], optimizer: torch.optim.Optimizer) -> list[bool]:
        """Return whether each flag is set on any rank, and set the learning rates of all ranks to those of rank 0."""
        if not self.many:
            return flags
        with host_sync_allowed():
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            values = [*flags, *rates, *(-rate for rate in rates)]
            table = torch.tensor(values, dtype=torch.float64, device=self.device)
            largest_of_ranks(table)
            raised, highest, lowest = table.tensor_split([len(flags), len(flags) + len(rates)])
            if highest.tolist() != (-lowest).tolist():  # host sync
                _log.info("a callback set other learning rates on one rank than on another; all take those of rank 0")
                for group, rate in zip(optimizer.param_groups, self.gather(rates)[0], strict=True):
                    set_learning_rate(group, rate)
            return [value > 0 for value in raised.tolist()]


def largest_of_ranks(table: Tensor) -> None:
    """Take each element's maximum over the ranks, in place."""
    dist.all_reduce(table, dist.ReduceOp.MAX)


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    """Write a learning rate into a parameter group, in place where it is a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def forget_shardings() -> None:
    """Empty torch's cache of how operations on sharded tensors are sharded; later operations fill it again.

    The cache keeps process groups alive until the process ends, when gloo's threads can no longer be joined and
    sometimes abort the process.
    """
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
