"""Activation checkpoints recompute under the precision that they ran under."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

Reenter = Callable[[], AbstractContextManager[Any]]


class _Here(threading.local):
    """What a checkpoint that begins in this thread is to be recomputed in."""

    reenter: Reenter | None = None


_here, _lock = _Here(), threading.Lock()
_stock: list[Any] = []
_regions = 0


@contextmanager
def recomputing_in(reenter: Reenter) -> Iterator[None]:
    """Checkpoints that begin inside recompute their activations inside `reenter()`, whenever that is.

    torch.utils.checkpoint recomputes in the backward pass, where it restores autocast and nothing else. So while
    anything is inside here, two names of its module stand for functions that pass the context on; both forms of
    checkpoints, and all functions that are built upon them, look these names up when they are called. Compiled code
    needs none of this: there the compiler recomputes what it has traced.
    """
    if torch.compiler.is_compiling():
        yield
        return
    before, _here.reenter = _here.reenter, reenter
    _divert()
    try:
        yield
    finally:
        _restore()
        _here.reenter = before


def _divert() -> None:
    global _regions
    with _lock:
        _regions += 1
        if _regions == 1:
            _stock[:] = torch_checkpoint._CheckpointFrame, torch_checkpoint.CheckpointFunction
            torch_checkpoint._CheckpointFrame = _frame  # type: ignore[assignment, misc]
            torch_checkpoint.CheckpointFunction = _ReentrantCheckpoint  # type: ignore[assignment, misc]


def _restore() -> None:
    global _regions
    with _lock:
        _regions -= 1
        if _regions == 0:
            torch_checkpoint._CheckpointFrame, torch_checkpoint.CheckpointFunction = _stock  # type: ignore[misc]


def _frame(recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _stock[0](_inside(_here.reenter, recompute), *args, **kwargs)


class _ReentrantCheckpoint:
    """Stands for `CheckpointFunction`, of which only `apply` is used."""

    @staticmethod
    def apply(function: Callable[..., Any], *args: Any) -> Any:
        return _stock[1].apply(_inside(_here.reenter, function), *args)


def _inside(reenter: Reenter | None, function: Callable[..., Any]) -> Callable[..., Any]:
    if reenter is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with reenter():
            return function(*args, **kwargs)

    return run
