"""Copies between the host and a device.

They go through pinned memory, in the order of a stream, and the host need not wait. Tensors on the host name the CPU as
their device: scripts may have set another default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


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


def transfer(values: torch.Tensor, target: torch.Tensor) -> None:
    """Writes values of the host to `target`, in the order of the current stream of its device."""
    is_pinned = pins(target.device)
    target.copy_(values.pin_memory() if is_pinned else values, non_blocking=is_pinned)


def to_host(values: torch.Tensor) -> torch.Tensor:
    """The values on the host, once they are there; the wait is for them alone, and no fault where waits are faults."""
    return to_host_later(values)()


def current_stream(device: torch.device) -> Any:
    """The calling thread's current stream on a device."""
    return (torch.cuda if device.type == "cuda" else torch.accelerator).current_stream(device)


def end_of_work(device: torch.device) -> Any:
    """An event behind all work that the current stream of a device has so far; a thread that waits for it sleeps."""
    # torch.Event takes `blocking`, too, and spins all the same.
    event: Any = torch.cuda.Event(blocking=True) if device.type == "cuda" else torch.Event(device)
    event.record(current_stream(device))
    return event


def to_host_later(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begins to copy values to the host. Returns a function that waits for this copy alone, and returns the values."""
    if values.device.type == "cpu":
        return lambda: values
    on_host = host_buffer(values.shape, values.dtype, values.device)
    on_host.copy_(values, non_blocking=True)
    arrived = end_of_work(values.device)

    def arrive() -> torch.Tensor:
        arrived.synchronize()  # host sync
        return on_host

    return arrive
