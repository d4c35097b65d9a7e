"""Checks the arguments of a SinkLoader, and finds what fits them: a source for the loader, slots for the device."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from torch_sink.damage.report import check_policy
from torch_sink.sink.queue.device import DeviceOps
from torch_sink.sink.queue.ring import DeviceRing
from torch_sink.sink.queue.slots import ImageFormat, Slots
from torch_sink.sink.sources.base import FactorySource, Source
from torch_sink.sink.sources.dataloader import DataLoaderSource
from torch_sink.sink.sources.own_iterator import OwnIteratorSource, StatefulSource, WrapperSource
from torch_sink.sink.sources.watch import data_loaders_in

DEFAULT_SLOTS = 3
MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last)


@dataclass(frozen=True)
class SinkOptions:
    """The arguments of a SinkLoader, checked."""

    sink_size: int
    device: torch.device
    slots: int | None
    max_bytes: int | None
    dtype: torch.dtype | None
    memory_format: torch.memory_format
    on_decode_error: str
    timeout_seconds: float

    def __post_init__(self) -> None:
        _check_int("sink_size", self.sink_size)
        if self.sink_size == 0 or self.sink_size < -1:
            raise ValueError(
                f"sink_size={self.sink_size} is not allowed: give a positive number of batches per epoch, "
                "or -1 for one pass of the loader"
            )
        for name in ("slots", "max_bytes"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value)
                if value < 1:
                    raise ValueError(f"{name}={value} is not allowed: give a positive number, or None for the default")
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype or None, got {self.dtype!r}")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(f"dtype={self.dtype} is not allowed: image batches are made in a floating-point dtype")
        if self.memory_format not in MEMORY_FORMATS:
            allowed = ", ".join(str(one) for one in MEMORY_FORMATS)
            raise ValueError(f"memory_format={self.memory_format} is not allowed: give one of {allowed}")
        check_policy(self.on_decode_error)
        _check_timeout(self.timeout_seconds)

    @property
    def slot_count(self) -> int:
        """Slots asked for, before `max_bytes` is looked at."""
        return DEFAULT_SLOTS if self.slots is None else self.slots

    @property
    def image_format(self) -> ImageFormat:
        """How image batches are produced."""
        return ImageFormat(self.device, self.dtype, self.memory_format, self.on_decode_error)


def make_slots(options: SinkOptions, reads_pinned: bool) -> Slots:
    """Slots for the device of `options`; `reads_pinned` as for a `DeviceRing`."""
    if options.device.type == "cpu":
        return Slots(options.slot_count, options.image_format)
    ops = DeviceOps(options.device)
    return DeviceRing(options.slot_count, options.image_format, ops, options.max_bytes, reads_pinned)


def _check_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")


def _check_timeout(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"timeout_seconds must be a number, got {value!r} of type {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"timeout_seconds={value} is not allowed: give a positive number of seconds")


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device to deliver to: as given, else the current accelerator, else the CPU.

    Raises:
        ValueError: the device is of an unsupported kind, or not there.
    """
    if device is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a device: {error}") from error
    if wanted.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(wanted)!r} is not supported by SinkLoader: give 'cpu' or 'cuda'")
    if wanted.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or (wanted.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={str(wanted)!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices. "
            "Give device='cpu', or None for what this machine has."
        )
    return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)


def open_source(loader: Any) -> Source:
    """The source that fits `loader`.

    Raises:
        TypeError: neither iterable nor callable, or a dataset of samples.
    """
    if type(loader).__name__ == "_FabricDataLoader":
        loader = loader._dataloader  # Lightning Fabric's wrapper moves batches to the device, which the slots do
    if isinstance(loader, DataLoader):
        if type(loader).__iter__ is DataLoader.__iter__:
            return DataLoaderSource(loader)
        keeps_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        # Accelerate's loaders always have these methods, which fail unless they wrap a StatefulDataLoader.
        keeps_state = keeps_state and getattr(loader, "use_stateful_dataloader", True)
        return StatefulSource(loader) if keeps_state else OwnIteratorSource(loader)
    if _is_map_style(loader):
        raise TypeError(
            f"{type(loader).__name__} gives samples, not batches: this is a Dataset; wrap it in a "
            "DataLoader(dataset, batch_size=...)"
        )
    if isinstance(loader, (str, os.PathLike)):
        raise TypeError(
            f"loader is a path, {os.fspath(loader)!r}; pass batches, such as a "
            "DataLoader(datasets.ImageFolder(path, transform), batch_size=...)"
        )
    if isinstance(loader, Iterable):
        return WrapperSource(loader) if any(one.num_workers for one in data_loaders_in(loader)) else Source(loader)
    if callable(loader):
        return FactorySource(loader)
    raise TypeError(
        f"loader must be an iterable of batches or a function that returns an iterator, got {type(loader).__name__}"
    )


def _is_map_style(loader: Any) -> bool:
    """Whether `loader` maps indices to samples: a torch Dataset, or what passes for one."""
    if isinstance(loader, Dataset):
        return not isinstance(loader, IterableDataset)
    return hasattr(type(loader), "__getitem__") and not isinstance(loader, Iterable)


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
    samplers = (SequentialSampler, RandomSampler)
    return type(loader.sampler) in samplers and type(loader.batch_sampler) in (BatchSampler, type(None))
