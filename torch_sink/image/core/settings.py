"""The settings of the backend, which travel to every worker, and the devices of this machine."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import NamedTuple

import torch

from torch_sink.common.arguments import named_device
from torch_sink.damage.report import Policy


class Settings(NamedTuple):
    """Settings of the active "device" backend.

    Attributes:
        device: where pixels are made, as a string, so that a worker needs no device to read it; "" until it is asked.
        strict: fallbacks raise.
        interpreted: kernels run on the CPU under Triton's interpreter.
        report: the fallback report that workers count for.
        on_decode_error: what becomes of broken files, "raise", "skip" or "replace".
    """

    device: str
    strict: bool
    interpreted: bool
    report: str
    on_decode_error: Policy = "raise"

    @property
    def executes_at_once(self) -> bool:
        """True where `collate` makes the pixels itself: on the CPU, without the interpreter."""
        return self.device == "cpu" and not self.interpreted


# `torch_sink.set_image_backend`, which stands in for torchvision's; its module imports the table of stand-ins.
set_backend: Callable[..., None]
active: Settings | None = None  # the settings of this process; None while the backend is off
is_for_device = False  # it is known that a device makes the pixels: what each recorded call asks first


def activate(wanted: Settings | None) -> None:
    """Sets the settings of this process; None while the backend is off."""
    global active, is_for_device
    active = wanted
    is_for_device = wanted is not None and wanted.device != "" and not wanted.executes_at_once


def settled() -> Settings | None:
    """The active settings with the device known: a process that is being started may not ask for it yet."""
    if active is not None and not active.device:
        activate(active._replace(device=default_device()))
    return active


def makes_pixels_here() -> bool:
    """True where pixels are made in stock code, in the process that collates them."""
    now = active if active is not None and active.device else settled()
    return now is None or now.executes_at_once


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def default_device() -> str:
    """The current accelerator, else the CPU."""
    return str(_accelerator() or "cpu")


def available_device(device: torch.device | str, others: str = "") -> str:
    """A device that is there, or "meta", as a string; `others` is what else may be asked for, for the message.

    Raises:
        RuntimeError: it is not there; the message says what is.
        ValueError: it is the name of none.
    """
    chosen = named_device(device)
    if chosen.type in ("cpu", "meta"):
        return chosen.type
    available = _accelerator()
    if available is None or available.type != chosen.type:
        raise RuntimeError(
            f"device {str(chosen)!r} is not available on this machine; available: "
            f"{'cpu' if available is None else f'{available.type}, cpu'}{others}"
        )
    count = torch.accelerator.device_count()
    if chosen.index is not None and chosen.index >= count:
        raise RuntimeError(f"device {str(chosen)!r} is not available: this machine has {count} of them")
    return str(chosen)


def sends_pixels() -> bool:
    """True in a child process on a machine without a device, which makes the pixels of all that it sends elsewhere."""
    is_child = multiprocessing.parent_process() is not None
    return is_child and (active is None or active.executes_at_once)
