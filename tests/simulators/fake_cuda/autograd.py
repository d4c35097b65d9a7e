"""Backward passes: torch's own engine, in the calling thread, with what a capture forbids it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .device import FakeCuda


def backward_of(cuda: FakeCuda, run: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass of the engine; inside a capture a node of another stream is found as the driver finds it."""

    def backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
        handles, before = [], cuda.in_thread_of_engine
        if cuda.captures.here() is not None:
            handles = [node.register_prehook(partial(_check_stale, cuda)) for node in _accumulating_nodes(roots)]
        try:
            cuda.in_thread_of_engine = before or torch._C._is_multithreading_enabled()
            with single_threaded():
                return run(roots, *args, **kwargs)
        finally:
            cuda.in_thread_of_engine = before
            for handle in handles:
                handle.remove()

    return backward


def _check_stale(cuda: FakeCuda, gradients: Any) -> None:
    capture, stream = cuda.captures.here(), cuda.current_stream()
    if capture is not None and stream not in capture.streams and not cuda.overrides_stale_streams:
        capture.fail(f"operation not permitted when stream is capturing (AccumulateGrad of {stream})")


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """The engine has no threads for devices that are not there."""
    before = torch._C._is_multithreading_enabled()
    torch._C._set_multithreading_enabled(False)
    try:
        yield
    finally:
        torch._C._set_multithreading_enabled(before)


def _accumulating_nodes(roots: Any) -> list[Any]:
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen, found = set(), []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.append(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found
