"""Checks the arguments of a SinkLoader, and finds what fits them: ways to begin passes, slots for the device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torch_sink.common.integrations import inner_loader
from torch_sink.sink.device import DeviceOps
from torch_sink.sink.openers import DataLoaderOpener, Opener
from torch_sink.sink.resuming import ByIndexLists, ByMakingAgain, ByOwnState, Resuming
from torch_sink.sink.ring import DeviceRing
from torch_sink.sink.slots import ImageFormat, Slots

DEFAULT_SLOTS = 3


def check_arguments(
    batches_per_epoch: int | None, slots: int | None, max_bytes: int | None, timeout_seconds: float
) -> None:
    """Checks the arguments of a `SinkLoader` that are numbers.

    Raises:
        TypeError: one is of another type.
        ValueError: one is out of range.
    """
    given = {"batches_per_epoch": batches_per_epoch, "slots": slots, "max_bytes": max_bytes}
    for name, value in given.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
        if value < 1:
            default = "one pass of the loader" if name == "batches_per_epoch" else "the default"
            raise ValueError(f"{name}={value} is not allowed: give a positive number, or None for {default}")
    if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, (int, float)):
        kind = type(timeout_seconds).__name__
        raise TypeError(f"timeout_seconds must be a number, got {timeout_seconds!r} of type {kind}")
    if not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds={timeout_seconds} is not allowed: give a positive number of seconds")


def make_slots(form: ImageFormat, slots: int | None, max_bytes: int | None, reads_pinned: bool) -> Slots:
    """Slots for the device of `form`; `reads_pinned` as for a `DeviceRing`."""
    count = DEFAULT_SLOTS if slots is None else slots
    if form.device.type == "cpu":
        return Slots(count, form)
    return DeviceRing(count, form, DeviceOps(form.device), max_bytes, reads_pinned)


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


def open_loader(loader: Any, policy: str | None = None) -> Resuming:
    """How passes of `loader` are begun and resumed; `policy` is what becomes of samples with broken files.

    Raises:
        TypeError: neither iterable nor callable, a dataset of samples, a class, or a dict of loaders.
    """
    loader = inner_loader(loader)
    if isinstance(loader, DataLoader):
        iterates = type(loader).__iter__
        if iterates is DataLoader.__iter__:
            opener = DataLoaderOpener(loader, policy)
            has_lists = opener.is_map_style and loader.batch_sampler is not None
            return ByIndexLists(opener) if has_lists else ByMakingAgain(opener)
        if iterates.__module__.startswith("torchdata."):
            return ByOwnState(DataLoaderOpener(loader, policy, sends_states=True))
        # Others make iterators in their own way (those of training libraries, timm's): as any iterable.
    _check_gives_batches(loader)
    return ByMakingAgain(Opener(loader, policy))


def _check_gives_batches(loader: Any) -> None:
    is_map_style = hasattr(type(loader), "__getitem__") and not isinstance(loader, Iterable)  # as torch's Datasets are
    if is_map_style or (isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)):
        raise TypeError(
            f"{type(loader).__name__} gives samples, not batches: this is a Dataset; wrap it in a "
            "DataLoader(dataset, batch_size=...)"
        )
    if isinstance(loader, type) and not issubclass(loader, Iterator):
        raise TypeError(f"loader is the class {loader.__name__}; pass an instance: {loader.__name__}(...)")
    if isinstance(loader, Mapping):
        raise TypeError(f"loader is a {type(loader).__name__}; pass one of its values, or make a SinkLoader of each")
    if isinstance(loader, (str, os.PathLike)):
        raise TypeError(
            f"loader is a path, {os.fspath(loader)!r}; pass batches, such as a "
            "DataLoader(datasets.ImageFolder(path, transform), batch_size=...)"
        )
    if not isinstance(loader, Iterable) and not callable(loader):
        raise TypeError(
            f"loader must be an iterable of batches or a function that returns an iterator, got {type(loader).__name__}"
        )
