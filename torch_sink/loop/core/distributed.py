"""More than one process: when gradients are reduced, what is agreed on, who writes which part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from torch_sink.loop.core.host_sync import host_sync_allowed


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
    """

    def __init__(self, model: nn.Module) -> None:
        self._given, self._model = model, cast(Any, without_wrappers(model))
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

    def gradient_sync(self) -> Callable[[bool], AbstractContextManager[Any]] | None:
        """The context of a backward pass, by whether gradients are reduced in it; None if there is one process."""
        if not self.many:
            return None
        if self._replicated:
            return lambda reduce: nullcontext() if reduce else self._model.no_sync()
        return self._sharded_sync

    def found_inf_reduction(self) -> Callable[[Tensor], None] | None:
        """Makes the overflow flag equal on all ranks: a rank sees only its own shard or bucket order."""
        return self.largest if self.many else None

    def sum(self, table: Tensor) -> None:
        """Add a tensor up over the ranks, in place."""
        dist.all_reduce(table)

    def largest(self, table: Tensor) -> None:
        """Take each element's maximum over the ranks, in place."""
        dist.all_reduce(table, dist.ReduceOp.MAX)

    def send_from_first(self, tensor: Tensor) -> None:
        """Give every rank the tensor of rank 0, in place."""
        dist.broadcast(tensor, 0)

    @property
    def inner(self) -> nn.Module:
        """The module inside DistributedDataParallel, whose forward takes no collective; else the model itself."""
        return self._model.module if self._replicated else self._given

    def share_buffers(self) -> None:
        """Give every rank the buffers of rank 0, as the next forward of DistributedDataParallel would."""
        if self.many and self._replicated and self._model.will_sync_module_buffers():
            self._model._sync_buffers()

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Those that DistributedDataParallel keeps equal on all ranks; none if the model is in no such wrapper."""
        if not self._replicated:
            return []
        left_out = getattr(self._model, "parameters_to_ignore", ())
        return [parameter for name, parameter in self._model.module.named_parameters() if name not in left_out]

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether `flag` is true on any rank."""
        value = torch.tensor(float(flag), device=device)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        with host_sync_allowed():
            return bool(value.item() > 0)  # host sync

    def check_lengths(self, length: int | None, max_steps: int | None, device: torch.device) -> None:
        """Raise on all ranks unless all have as many steps in an epoch; None for a length that nobody knows.

        Raises:
            ValueError: names the shortest and the longest epoch.
        """
        if not self.many:
            return
        lengths = torch.tensor([length or 0, -(length or 0)], device=device)
        dist.all_reduce(lengths, dist.ReduceOp.MAX)
        with host_sync_allowed():
            longest, shortest = lengths.abs().tolist()  # host sync
        if shortest != longest and (max_steps is None or max_steps > shortest):
            raise ValueError(
                f"an epoch has {shortest} steps on one rank and {longest} on another, which would wait for the first; "
                "give all ranks as many batches: DistributedSampler(..., drop_last=True), or SinkLoader(sink_size=...)"
            )

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self.many:
            dist.barrier()

    def _sharded_sync(self, reduce: bool) -> AbstractContextManager[Any]:
        for module in self._sharded_modules:
            module.set_requires_gradient_sync(reduce, recurse=False)
        return nullcontext()


def save_shards(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Write the sharded model and optimizer, each rank its part; every rank calls it."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


def load_shards(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Read what `save_shards` wrote, also with another number of ranks; every rank calls it."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def forget_shardings() -> None:
    """Empty torch's cache of how operations on sharded tensors are sharded; it fills again when they are used.

    It keeps process groups alive until the process ends, where gloo's threads can no longer be joined and now and then
    abort the process.
    """
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
