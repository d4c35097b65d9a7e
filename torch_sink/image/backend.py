"""Switching the image backend."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from torch_sink.image import state
from torch_sink.image.fallback import ledger
from torch_sink.image.state import State, default_device

_NAMES = ("device", "PIL", "accimage")


class _Choice(NamedTuple):
    """What was asked for, to restore it later."""

    name: str
    device: str | None = None
    strict: bool = False


_current = _Choice("PIL")


def set_image_backend(name: str, *, device: torch.device | str | None = None, strict: bool = False) -> None:
    """Chooses who makes the pixels of torchvision's datasets and transforms.

    Args:
        name: "device" records what torchvision's code asks for and runs it in kernels on a device; "PIL" and
            "accimage" are torchvision's own backends.
        device: for "device": where pixels are made. Default: the current accelerator, else the CPU. "meta" records
            only: shapes and types are right, using the values of a batch raises.
        strict: for "device": an operation that would run in stock code on the CPU raises `UnsupportedOperation`.

    Raises:
        ValueError: an unknown name, or `device` or `strict` given for another backend than "device".
        RuntimeError: the device is not there.

    Example:
        >>> set_image_backend("device", device="cpu")
        >>> get_image_backend()
        'device'
        >>> set_image_backend("PIL")
    """
    global _current
    if name not in _NAMES:
        raise ValueError(f"unknown image backend {name!r}; choose one of {', '.join(map(repr, _NAMES))}")
    if name == "device":
        chosen = _checked_device(device)
        _switch_on(chosen, strict)
        _current = _Choice(name, chosen, strict)
        return
    if device is not None or strict:
        raise ValueError(f"device and strict belong to the 'device' backend, not to {name!r}")
    _switch_off(name)
    _current = _Choice(name)


def get_image_backend() -> str:
    """The active image backend: "device", "PIL" or "accimage"."""
    if _current.name == "device":
        return "device"
    import torchvision

    return torchvision.get_image_backend()


@contextmanager
def image_backend(name: str, *, device: torch.device | str | None = None, strict: bool = False) -> Iterator[None]:
    """`set_image_backend` for the time of a `with` block; afterwards what was active before is active again.

    So is the `fallback_report()` of a backend "device" around the block.
    """
    before, settings = _current if _current.name == "device" else _Choice(get_image_backend()), state.active
    with ledger.set_aside() if settings is not None else nullcontext():
        set_image_backend(name, device=device, strict=strict)
        try:
            yield
        finally:
            set_image_backend(before.name, device=before.device, strict=before.strict)
            state.set_active(settings)  # it names the folder of its report


def _may_ask_for_devices() -> bool:
    """False in a data worker, and while spawn or forkserver runs an unguarded script again in a child.

    Neither may touch an accelerator: the one never, the other not before it knows what it is.
    """
    process = multiprocessing.current_process()
    return not getattr(process, "_inheriting", False) and not process.daemon and get_worker_info() is None


def _checked_device(device: torch.device | str | None) -> str:
    if not _may_ask_for_devices():
        return "" if device is None else str(device)
    if device is None:
        return default_device()
    available = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    chosen = torch.device(device)
    if chosen.type in ("cpu", "meta"):
        return chosen.type
    if available is None or available.type != chosen.type:
        raise RuntimeError(
            f"device {str(chosen)!r} is not available on this machine; available: "
            f"{'cpu' if available is None else f'{available.type}, cpu'} (and 'meta', which only records)"
        )
    count = torch.accelerator.device_count()
    if chosen.index is not None and chosen.index >= count:
        raise RuntimeError(f"device {str(chosen)!r} is not available: this machine has {count} of them")
    return str(chosen)


def _switch_on(device: str, strict: bool) -> None:
    import torchvision

    from torch_sink.image import reroute

    interpreted = device in ("cpu", "") and os.environ.get("TRITON_INTERPRET", "0") == "1"
    reroute.install(State(device, strict, interpreted, ledger.open(None, strict)))
    _take_over(torchvision)


def _switch_off(name: str) -> None:
    import torchvision

    if _current.name == "device":
        from torch_sink.image import reroute

        reroute.uninstall()
        _give_back(torchvision)
    torchvision.set_image_backend(name)


_stock_setter: list[Any] = []


def _take_over(torchvision: Any) -> None:
    """torchvision's own switch agrees with ours while "device" is active."""
    if not _stock_setter:
        _stock_setter.append(torchvision.set_image_backend)
        torchvision.set_image_backend = set_image_backend
    torchvision._image_backend = "device"


def _give_back(torchvision: Any) -> None:
    torchvision.set_image_backend = _stock_setter.pop()
    torchvision._image_backend = "PIL"
