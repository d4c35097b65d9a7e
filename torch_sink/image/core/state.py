"""The settings of the backend, which travel to every worker; which device there is, and copies to it and from it.

Copies go through pinned memory, in the order of a stream, and the host need not wait. Tensors on the host name it as
their device: scripts may have set another default.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch


class State(NamedTuple):
    """Settings of the active "device" backend.

    Attributes:
        device: where pixels are made, as a string, so that a worker needs no device to read it; "" until it is asked.
        strict: fallbacks raise.
        interpreted: kernels run on the CPU under Triton's interpreter.
        fallback_folder: where workers leave their fallback counts.
        on_decode_error: what becomes of broken files, "raise", "skip" or "replace".
    """

    device: str
    strict: bool
    interpreted: bool
    fallback_folder: str
    on_decode_error: str = "raise"

    @property
    def executes_at_once(self) -> bool:
        """True where `collate` makes the pixels itself: on the CPU, without the interpreter."""
        return self.device == "cpu" and not self.interpreted


# `torch_sink.set_image_backend`, which stands in for torchvision's; its module imports the table of stand-ins.
set_backend: Callable[..., None]
active: State | None = None  # the settings of this process; None while the backend is off


def settled() -> State | None:
    """The active settings with the device known: a process that is being started may not ask for it yet."""
    global active
    if active is not None and not active.device:
        active = active._replace(device=default_device())
    return active


def makes_pixels_here() -> bool:
    """True where pixels are made in stock code, in the process that collates them."""
    now = settled()
    return now is None or now.executes_at_once


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def default_device() -> str:
    """The current accelerator, else the CPU."""
    return str(_accelerator() or "cpu")


def available_device(device: torch.device | str, others: str = "") -> str:
    """A device that is there, or "meta", as a string.

    Args:
        device: what was asked for.
        others: what else may be asked for, for the message.

    Raises:
        RuntimeError: it is not there; the message says what is.
        ValueError: it is the name of none.
    """
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a device, such as 'cuda' or 'cpu': {error}") from error
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
    """True in a child process on a machine without a device: what it sends elsewhere has its pixels made before."""
    is_child = multiprocessing.parent_process() is not None
    return is_child and (active is None or active.executes_at_once)


# --- copies between host and device


def pins(device: torch.device) -> bool:
    """True where copies to and from `device` can go on while the host does something else."""
    return device.type not in ("cpu", "meta")


def host_buffer(shape: int | torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """New memory on the host for what comes from `device` or goes there; pinned unless that is the host itself."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pins(device))


def to_device(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The values on `device`, copied in the order of its current stream; they themselves where that is the host."""
    on_host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if not pins(device) or on_host.device.type != "cpu":
        return on_host.to(device)
    return on_host.pin_memory().to(device, non_blocking=True)


def send(values: torch.Tensor, room: torch.Tensor) -> None:
    """Writes values of the host to `room`, in the order of the current stream of its device."""
    is_pinned = pins(room.device)
    room.copy_(values.pin_memory() if is_pinned else values, non_blocking=is_pinned)


def to_host(values: torch.Tensor) -> torch.Tensor:
    """The values on the host, once they are there; the wait is for them alone, and no fault where waits are faults."""
    return to_host_later(values)()


def _end_of_work(device: torch.device) -> Any:
    """An event behind what the current stream of a device was given so far; a thread sleeps while it waits for it."""
    if device.type == "cuda":
        # torch.Event takes `blocking`, too, and spins all the same.
        arrived = torch.cuda.Event(blocking=True)
        arrived.record(torch.cuda.current_stream(device))
        return arrived
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def to_host_later(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Sends values to the host. Returns what waits for them alone, whatever is launched meanwhile, and gives them."""
    if values.device.type == "cpu":
        return lambda: values
    on_host = host_buffer(values.shape, values.dtype, values.device)
    on_host.copy_(values, non_blocking=True)
    arrived = _end_of_work(values.device)

    def arrive() -> torch.Tensor:
        arrived.synchronize()  # host sync
        return on_host

    return arrive
