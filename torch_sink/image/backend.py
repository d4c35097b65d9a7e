"""Switching the image backend."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.data import get_worker_info

from torch_sink.common import after_fork_in_child
from torch_sink.damage.report import check_policy, clear_report
from torch_sink.errors import SinkError
from torch_sink.image.core import state
from torch_sink.image.core.fallback import Aside, ledger
from torch_sink.image.core.state import State, available_device, default_device

_NAMES = ("device", "PIL", "accimage")


class _Block:
    """A `with image_backend(...)` that the process is inside of, and what is active again when it is left."""

    def __init__(self) -> None:
        _check_thread()
        counts = None if state.active is None else ledger.put_aside()
        self.outside: tuple[str, State | None, Aside | None] = get_image_backend(), state.active, counts
        self.thread, self.process = threading.current_thread(), os.getpid()

    @property
    def belongs_elsewhere(self) -> bool:
        """Whether another thread is inside; a forked child is inside of its parent's blocks, and may do as it likes."""
        is_here = self.thread is threading.current_thread() or self.process != os.getpid()
        return not is_here and self.thread.is_alive()


_inside: list[_Block] = []  # the outermost first
_switching = threading.RLock()


def set_image_backend(
    name: str,
    *,
    device: torch.device | str | None = None,
    strict: bool = False,
    on_decode_error: str = "raise",
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
            place, and where there is none, the next good one of the dataset. `decode_report()` lists the files.

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
    if name not in _NAMES:
        raise ValueError(
            f"unknown image backend {name!r}; choose one of {', '.join(map(repr, _NAMES))}, "
            "and the device by set_image_backend('device', device='cuda:0')"
        )
    check_policy(on_decode_error)
    if name != "device" and (device is not None or strict or on_decode_error != "raise"):
        raise ValueError(f"device, strict and on_decode_error belong to the 'device' backend, not to {name!r}")
    with _switching:
        _check_thread()
        if name != "device":
            _switch(name)
            return
        if not _inside or state.active is None:
            clear_report()
        place = _checked_device(device)
        is_interpreted = place in ("cpu", "") and os.environ.get("TRITON_INTERPRET", "0") == "1"
        _switch(name, State(place, strict, is_interpreted, ledger.open(None, strict), on_decode_error))


def get_image_backend() -> str:
    """The active image backend: "device", "PIL" or "accimage"."""
    import torchvision

    return torchvision.get_image_backend()


def _switch(name: str, settings: State | None = None) -> None:
    """`settings` are those of "device"."""
    if settings is not None:
        from torch_sink.image import reroute

        reroute.install(settings)
        return
    if state.active is not None:
        from torch_sink.image import reroute

        reroute.uninstall()
    import torchvision

    torchvision.set_image_backend(name)


@contextmanager
def image_backend(
    name: str,
    *,
    device: torch.device | str | None = None,
    strict: bool = False,
    on_decode_error: str = "raise",
) -> Iterator[None]:
    """`set_image_backend` for the time of a `with` block; afterwards what was active before is active again.

    So is the `fallback_report()` of a backend "device" around the block. The backend is one for the whole process:
    while one thread is inside of a block, other threads may neither enter one nor call `set_image_backend`. Blocks may
    be left in any order; when all are left, the backend is the one from before the first.

    Raises:
        SinkError: another thread is inside of a block.
    """
    with _switching:
        block = _Block()
        _inside.append(block)
    try:
        set_image_backend(name, device=device, strict=strict, on_decode_error=on_decode_error)
        yield
    finally:
        with _switching:
            _leave(block)


def _check_thread() -> None:
    for block in _inside:
        if block.belongs_elsewhere:
            raise SinkError(
                f"thread {block.thread.name!r} is inside of `with image_backend(...)`, and the image backend is "
                "one for the whole process; switch it before the threads start, or in one thread at a time"
            )


def _leave(block: _Block) -> None:
    """The innermost block puts back what is outside of it; for another one, the block inside of it does so later."""
    place = _inside.index(block)
    del _inside[place]
    name, settings, counts = block.outside
    if place < len(_inside):
        _, _, unneeded = _inside[place].outside
        _inside[place].outside = block.outside
        if unneeded is not None:
            ledger.discard(unneeded)
        return
    _switch(name, settings)
    if counts is not None:
        ledger.put_back(counts)


def _checked_device(device: torch.device | str | None) -> str:
    """The device, or what was asked for where accelerators may not be touched.

    That is in a data worker, never, and while spawn or forkserver runs an unguarded script again in a child, not before
    it knows what it is.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False) or process.daemon or get_worker_info() is not None:
        return "" if device is None else str(device)
    return default_device() if device is None else available_device(device, " (and 'meta', which only records)")


def _begin_in_child() -> None:
    """After a fork: another thread of the parent may have held the lock."""
    global _switching
    _switching = threading.RLock()


after_fork_in_child(_begin_in_child)
