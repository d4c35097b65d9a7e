"""An uncaptured step that tells whether its capture would fail, because a failed one is hard to recover from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from torch_sink.loop.core.host_sync import is_foreign
from torch_sink.thread_waits import device_waits


def waits_noted(problems: list[str]) -> AbstractContextManager[None]:
    """Context that adds a line to `problems` for each wait of this thread that torch's sync debug mode sees inside."""
    return device_waits(lambda: problems.append(f"the host waits for the device at {_place()}"))


@contextmanager
def stale_streams_noted(problems: list[str], parameters: Sequence[Tensor], stream: Any) -> Iterator[None]:
    """Add a line to `problems` if gradients of `parameters` are accumulated on another stream than `stream`.

    Autograd remembers the stream on which a parameter was first used for as long as anything holds its node: a loss
    that is still alive, or DistributedDataParallel. A capture ends where autograd goes back to that stream.
    """
    stale: list[Any] = []

    def look(_: Any) -> None:
        current = torch.cuda.current_stream(stream.device)
        if current != stream:
            stale.append(current)

    handles = [_accumulating_node(parameter).register_prehook(look) for parameter in parameters if _is_plain(parameter)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if stale:
        problems.append(
            f"gradients of {len(stale)} parameters are bound to another stream, by a loss from before the run that is "
            "still alive or by DistributedDataParallel (newer releases of torch capture them all the same)"
        )


def _is_plain(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.is_cuda and not hasattr(parameter, "to_local")


@torch.enable_grad()
def _accumulating_node(parameter: Tensor) -> Any:
    function: Any = parameter.view_as(parameter).grad_fn
    return function.next_functions[0][0]


def _place() -> str:
    """The line outside torch and the loop that waits, or the optimizer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        optimizer = frame.f_locals.get("self")
        if frame.f_code.co_name == "step" and isinstance(optimizer, torch.optim.Optimizer):
            return f"{type(optimizer).__name__}.step"
        if is_foreign(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown place"
