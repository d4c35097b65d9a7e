"""Switching the image backend."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, get_args

import torch
from torch.utils.data import get_worker_info

from torch_sink.common import after_fork_in_child
from torch_sink.common.arguments import check_choice, explains_wrong_calls
from torch_sink.common.patches import unknown_releases
from torch_sink.damage.report import POLICIES, Policy, clear_report
from torch_sink.errors import SinkError
from torch_sink.image.core import settings
from torch_sink.image.core.fallback import ledger
from torch_sink.image.core.settings import Settings, available_device, default_device

Backend = Literal["device", "PIL", "accimage"]


_switching = threading.RLock()  # held while the backend changes
_inside: list[threading.Thread] = []  # the thread of each `with image_backend(...)` block that is open


@explains_wrong_calls()
def set_image_backend(
    name: Backend,
    *,
    device: torch.device | str | None = None,
    strict: bool = False,
    on_decode_error: Policy = "raise",
) -> None:
    """Chooses who makes the pixels of torchvision's datasets and transforms.

    Args:
        name: "device" records what torchvision's code asks for and runs it in kernels on a device; "PIL" and
            "accimage" are torchvision's own backends.
        device: for "device": where pixels are made. Default: the current accelerator, else the CPU. "meta" records
            only: shapes and types are right, using the values of a batch raises.
        strict: for "device": an operation that would run in stock code on the CPU raises `UnsupportedOperation`.
        on_decode_error: for "device": what becomes of a DataLoader's samples whose files stock code cannot open or
            decode. "raise" is stock code's exception. Under "skip" the sample is dropped from its batch, and a batch
            of which nothing is left is left out. Under "replace" the next good sample of the batch stands in its
            place, and where there is none, the next good one of the dataset. `decode_report()` lists the files. An
            `IterableDataset` raises under each of them: an error ends its generator.

    Raises:
        ValueError: an unknown name or policy, or one of the other arguments given for another backend than "device".
        RuntimeError: the device is not there.
        SinkError: another thread is inside of `with image_backend(...)`.

    Examples:
        >>> set_image_backend("device", device="cpu")
        >>> get_image_backend()
        'device'
        >>> set_image_backend("PIL")
    """
    with _switching:
        _check_thread()
        _set(name, device, strict, on_decode_error)
        if name == "device":
            clear_report()


settings.set_backend = set_image_backend


def _check_thread() -> None:
    # A thread that ended inside of a block does not count.
    if any(thread is not threading.current_thread() and thread.is_alive() for thread in _inside):
        raise SinkError(
            "another thread is inside of `with image_backend(...)`, and the image backend is one for the whole "
            "process; switch it before the threads start, or in one thread at a time"
        )


def _set(name: Backend, device: torch.device | str | None, strict: bool, on_decode_error: Policy) -> None:
    if name not in get_args(Backend):
        raise ValueError(
            f"unknown image backend {name!r}; choose one of {', '.join(map(repr, get_args(Backend)))}, "
            "and the device by set_image_backend('device', device='cuda:0')"
        )
    check_choice("on_decode_error", on_decode_error, POLICIES)
    if name == "device":
        chosen = _checked_device(device)
        is_interpreted = chosen in ("cpu", "") and os.environ.get("TRITON_INTERPRET", "0") == "1"
        _switch(name, Settings(chosen, strict, is_interpreted, ledger.open(None, strict), on_decode_error))
    elif device is not None or strict or on_decode_error != "raise":
        raise ValueError(f"device, strict and on_decode_error belong to the 'device' backend, not to {name!r}")
    else:
        _switch(name)


def get_image_backend() -> Backend:
    """The active image backend: "device", "PIL" or "accimage"."""
    import torchvision

    return torchvision.get_image_backend()


def _switch(name: Backend, of_device: Settings | None = None) -> None:
    """Switches to a backend; `of_device` are the settings of "device"."""
    import torchvision

    try:
        from torch_sink.image import reroute
    except (ImportError, AttributeError) as error:
        raise unknown_releases(str(error)) from error

    if of_device is not None:
        reroute.install(of_device)
    else:
        reroute.uninstall()
        torchvision.set_image_backend(name)


@explains_wrong_calls()
@contextmanager
def image_backend(
    name: Backend,
    *,
    device: torch.device | str | None = None,
    strict: bool = False,
    on_decode_error: Policy = "raise",
) -> Iterator[None]:
    """`set_image_backend` for the time of a `with` block; afterwards what was active before is active again.

    So is the `fallback_report()` of a backend "device" around the block. The backend is one for the whole process:
    while one thread is inside of a block, other threads may neither enter one nor call `set_image_backend`.

    Raises:
        SinkError: another thread is inside of a block.
    """
    thread = threading.current_thread()
    with _switching:
        _check_thread()
        _inside.append(thread)
        outside, before = get_image_backend(), settings.active
    try:
        with nullcontext() if before is None else ledger.set_aside():
            try:
                _set(name, device, strict, on_decode_error)
                if before is None and name == "device":
                    clear_report()
                yield
            finally:
                _switch(outside, before)
    finally:
        if thread in _inside:  # a forked child has left them all
            _inside.remove(thread)


def _checked_device(device: torch.device | str | None) -> str:
    """The device that pixels are made on; where accelerators may not be touched, the one asked for, or "".

    A data worker may never touch them, and a child that spawn or forkserver started not before it has run the script.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False) or process.daemon or get_worker_info() is not None:
        return "" if device is None else str(device)
    return default_device() if device is None else available_device(device, " (and 'meta', which only records)")


def _begin_in_child() -> None:
    """After a fork: another thread of the parent may have held the lock, or have been inside of a block."""
    global _switching
    _switching = threading.RLock()
    _inside.clear()


after_fork_in_child(_begin_in_child)
