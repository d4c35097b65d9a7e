"""What DataLoaders, Lightning, Fabric and Accelerate do beyond their public interface, and how to go along with it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from torch_sink.common.ranks import group_rank

# Of a DataLoader: what `len(loader)` said last. Its iterators warn of every batch of an iterable dataset beyond that.
LENGTH_CALLED = "_IterableDataset_len_called"


@contextmanager
def without_length_warning(owner: Any) -> Iterator[None]:
    """Inside, `len(owner)` of a DataLoader has no effect on its iterators, or an iterator gives no warning of it."""
    before = getattr(owner, LENGTH_CALLED, None)
    try:
        if before is not None:
            setattr(owner, LENGTH_CALLED, None)
        yield
    finally:
        if hasattr(owner, LENGTH_CALLED):
            setattr(owner, LENGTH_CALLED, before)


def is_only_checked(frame: FrameType) -> bool:
    """Whether `frame` is Lightning's check that a loader is iterable, which drops the iterator that it makes.

    A pass that begins for this check would draw seeds that the plain program does not draw, and would use up a position
    that was loaded. Lightning checks every loader that is no DataLoader.
    """
    return frame.f_code.co_name == "_check_dataloader_iterable"


def inner_loader(loader: Any) -> Any:
    """The loader inside Fabric's wrapper, which only moves batches to the device; any other loader as it is."""
    return loader._dataloader if type(loader).__name__ == "_FabricDataLoader" else loader


def shows_epoch_as_iteration(value: Any) -> bool:
    """Whether this is an object of Accelerate, whose loaders number their passes as `iteration`."""
    return any(kind.__module__.partition(".")[0] == "accelerate" for kind in type(value).__mro__)


def warn_if_unsharded(loader: Any) -> None:
    """Warns if a loader is not sharded although Accelerate runs several processes.

    `Accelerator.prepare` shards DataLoaders, and returns a SinkLoader as it is.
    """
    state = sys.modules.get("accelerate.state")
    processes = 1 if state is None else state.PartialState._shared_state.get("num_processes", 1)
    if processes < 2 or group_rank() or type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return
    # torch's samplers for one process.
    samplers, batch_samplers = (SequentialSampler, RandomSampler), (BatchSampler, type(None))
    if type(loader.sampler) in samplers and type(loader.batch_sampler) in batch_samplers:
        warnings.warn(
            f"each of the {processes} processes reads all samples: accelerator.prepare() shards DataLoaders and "
            "returns a SinkLoader as it is. Wrap what it returns: SinkLoader(accelerator.prepare(loader)).",
            stacklevel=4,
        )


def own_scaler(optimizer: Any) -> torch.amp.GradScaler | None:
    """The enabled GradScaler of an optimizer that Accelerate or Fabric prepared for float16; None if there is none."""
    scaler = scaler_of(optimizer)
    return scaler if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None


def scheduler_repeats(scheduler: Any) -> int:
    """How often a scheduler steps per optimizer update.

    Accelerate's wrapper steps once for each process: a schedule counts the batches of one process, and each of several
    processes sees only its share of them.
    """
    if not getattr(scheduler, "step_with_optimizer", False) or getattr(scheduler, "split_batches", True):
        return 1
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def without_wrappers(model: nn.Module) -> nn.Module:
    """The distributed or plain module inside the wrappers of torch.compile and Fabric."""
    while True:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "_forward_module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside the wrappers of Accelerate and Fabric; any other object as it is."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def inner_scheduler(scheduler: Any) -> Any:
    """The scheduler inside Accelerate's wrapper; any other object as it is."""
    inner = getattr(scheduler, "scheduler", None)
    return inner if isinstance(inner, (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)) else scheduler


def scaler_of(optimizer: Any) -> Any:
    """The loss scaler of an optimizer that Accelerate or Fabric prepared, enabled or not; None if there is none."""
    scaler = getattr(optimizer, "scaler", None)  # Accelerate
    if scaler is None:
        scaler = getattr(getattr(getattr(optimizer, "_strategy", None), "precision", None), "scaler", None)  # Fabric
    return scaler


def backward_context(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Returns a context manager in which backward passes through the model have to run.

    A model that Fabric set up with mixed precision accepts backward passes only inside `fabric.backward`, which scales
    the loss and does nothing else. The loop scales the loss itself, so it sets Fabric's flag instead.
    """
    module: Any = sys.modules.get(type(model).__module__)
    if type(model).__name__ != "_FabricModule" or not hasattr(module, "_in_fabric_backward"):
        return nullcontext

    @contextmanager
    def inside() -> Iterator[None]:
        before, module._in_fabric_backward = module._in_fabric_backward, True
        try:
            yield
        finally:
            module._in_fabric_backward = before

    return inside
