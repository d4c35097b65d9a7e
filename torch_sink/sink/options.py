"""Checks the arguments of a SinkLoader, and finds the device and the slots that fit them."""

from __future__ import annotations

import torch

from torch_sink.sink.device import DeviceOps
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
