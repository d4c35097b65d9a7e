"""What is known of Lightning, Fabric and Accelerate by name: how they wrap loaders, optimizers and schedulers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler


def is_lightning_s_check(frame: FrameType) -> bool:
    """Whether an iterator is asked for by Lightning's check that it can have one, which throws it away.

    Begun for it, a pass would draw seeds that the plain program does not draw, and lose a position that was loaded.
    Lightning checks any loader but a DataLoader.
    """
    return frame.f_code.co_name == "_check_dataloader_iterable"


def without_fabric(loader: Any) -> Any:
    """The loader inside Fabric's wrapper, which moves batches to the device, as slots do; else the loader."""
    return loader._dataloader if type(loader).__name__ == "_FabricDataLoader" else loader


def warn_if_unsharded(loader: Any) -> None:
    """Warns where `Accelerator.prepare` was given a SinkLoader instead of the DataLoader; it returns that as it is."""
    state = sys.modules.get("accelerate.state")
    processes = 1 if state is None else state.PartialState._shared_state.get("num_processes", 1)
    if processes < 2 or type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return
    # torch's own samplers, of which none knows of other processes.
    samplers, batch_samplers = (SequentialSampler, RandomSampler), (BatchSampler, type(None))
    if type(loader.sampler) in samplers and type(loader.batch_sampler) in batch_samplers:
        warnings.warn(
            f"each of the {processes} processes reads all samples: accelerator.prepare() shards DataLoaders and "
            "returns a SinkLoader as it is. Wrap what it returns: SinkLoader(accelerator.prepare(loader)).",
            stacklevel=4,
        )


def own_scaler(optimizer: Any) -> torch.amp.GradScaler | None:
    """The enabled GradScaler that a prepared optimizer would step through: its model computes in float16."""
    scaler = scaler_of(optimizer)
    return scaler if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None


def scheduler_repeats(scheduler: Any) -> int:
    """Steps of a prepared scheduler per optimizer update.

    Accelerate's wrapper steps once for every process, because a schedule is written for the steps of one: each
    process sees its share of the batches only.
    """
    if not getattr(scheduler, "step_with_optimizer", False) or getattr(scheduler, "split_batches", True):
        return 1
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def scaler_of(optimizer: Any) -> Any:
    """The loss scaler of an optimizer that another library has prepared, enabled or not; None if it has none."""
    scaler = getattr(optimizer, "scaler", None)  # Accelerate
    if scaler is None:
        scaler = getattr(getattr(getattr(optimizer, "_strategy", None), "precision", None), "scaler", None)  # Fabric
    return scaler


def backward_context(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """What a backward pass through the model has to run in.

    A model that Fabric set up with mixed precision accepts backward passes of `fabric.backward` only, which scales the
    loss and does nothing else; the loop scales it itself.
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
