"""Several processes of Accelerate, and a loader that gives each of them all samples."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

_UNSHARDED = (SequentialSampler, RandomSampler)


def warn_if_unsharded(loader: Any) -> None:
    """Warns where `Accelerator.prepare` was given a SinkLoader instead of the DataLoader; it returns that as it is."""
    state = sys.modules.get("accelerate.state")
    processes = 1 if state is None else state.PartialState._shared_state.get("num_processes", 1)
    if processes > 1 and _is_unsharded(loader):
        warnings.warn(
            f"each of the {processes} processes reads all samples: accelerator.prepare() shards DataLoaders and "
            "returns a SinkLoader as it is. Wrap what it returns: SinkLoader(accelerator.prepare(loader)).",
            stacklevel=4,
        )


def _is_unsharded(loader: Any) -> bool:
    """True for a DataLoader with torch's own samplers, of which none knows of other processes."""
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return False
    return type(loader.sampler) in _UNSHARDED and type(loader.batch_sampler) in (BatchSampler, type(None))
