"""Replaces functions of other packages, and puts them back.

Several features may replace the same function: the image backend and a timeline both wrap the main loop of data
workers. Each replacement is a layer over the ones before. Layers can be removed in any order; once the last one is
gone, the attribute is the original object again.
"""

from __future__ import annotations

import atexit
import importlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

MISSING = object()
WORKER_LOOPS = ("torch.utils.data._utils.worker", "torchdata.stateful_dataloader.stateful_dataloader")
Make = Callable[[Any], Any]


class _Place:
    """One replaced attribute or key: its original value, and the layers over it, the lowest first."""

    def __init__(self, owner: Any, name: Any) -> None:
        self.owner, self.name, self.stock = owner, name, read(owner, name)
        self.layers: list[tuple[Patches, Make]] = []

    def original(self) -> Any:
        """The original function; for an inherited method, that of the base class."""
        if self.stock is MISSING and isinstance(self.owner, type):
            return getattr(super(self.owner, self.owner), self.name)
        return _function(self.stock)

    def fill(self) -> None:
        """Build all stand-ins again, each over the one below it."""
        value = self.original() if self.layers else self.stock
        for _, make in self.layers:
            value = make(_function(value))
        _write(self.owner, self.name, value)


_places: dict[tuple[int, Any], _Place] = {}


class Patches:
    """The functions that one feature replaces."""

    def __init__(self) -> None:
        self.places: list[_Place] = []

    def __bool__(self) -> bool:
        return bool(self.places)

    def replaces(self, owner: Any, name: Any) -> bool:
        """Whether this feature replaces the attribute or key `name` of `owner`."""
        place = _places.get((id(owner), name))
        return place is not None and any(feature is self for feature, _ in place.layers)

    def replace(self, owner: Any, name: Any, make: Make) -> None:
        """Put a stand-in over the current value of an attribute or key.

        Args:
            owner: a module, a class or a dict.
            name: attribute or key.
            make: current value -> stand-in. Called again when a layer below this one is removed.
        """
        place = _places.setdefault((id(owner), name), _Place(owner, name))
        place.layers.append((self, make))
        try:
            place.fill()
        except BaseException:
            self._remove_from(place)
            raise
        self.places.append(place)

    def undo(self) -> None:
        """Remove all layers of this feature."""
        while self.places:
            self._remove_from(self.places.pop())

    def _remove_from(self, place: _Place) -> None:
        place.layers = [(feature, make) for feature, make in place.layers if feature is not self]
        if not place.layers:
            del _places[id(place.owner), place.name]
        place.fill()


def read(owner: Any, name: Any) -> Any:
    """The stored value, a `staticmethod` not unwrapped; MISSING if there is none, or if it is inherited."""
    return (owner if isinstance(owner, dict) else vars(owner)).get(name, MISSING)


def unknown_releases(what: str) -> RuntimeError:
    """The error for something of torch or torchvision that the installed releases lack."""
    import torchvision

    return RuntimeError(
        f"{what}: this version of torch_sink does not know torchvision {torchvision.__version__} and torch "
        f"{torch.__version__}; install a newer torch_sink, or releases of torch and torchvision that it names"
    )


def _function(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod) else value


def _write(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, dict):
        owner.pop(name, None) if value is MISSING else owner.update({name: value})
    elif value is not MISSING:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


class WorkerLoop:
    """Base of stand-ins for `_worker_loop` of torch or torchdata, which prepare a data worker before the loop runs.

    A stand-in is pickled to spawned workers together with the stand-ins below it. The stock loop is not pickled: the
    worker looks it up in its module.

    Args:
        below: the stock loop, or another stand-in.
    """

    def __init__(self, below: Callable[..., None]) -> None:
        self.below: Callable[..., None] | None = below
        self.module: str = below.module if isinstance(below, WorkerLoop) else below.__module__

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "below": self.below if isinstance(self.below, WorkerLoop) else None}

    def stock(self) -> Callable[..., None]:
        """The worker loop of torch or torchdata."""
        module = importlib.import_module(self.module)
        place = _places.get((id(module), "_worker_loop"))
        return place.original() if place is not None else module._worker_loop

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the stand-in or the stock loop below, in the worker."""
        wait_for_senders_at_exit()
        return (self.below or self.stock())(*args, **kwargs)


def wait_for_senders_at_exit() -> None:
    """Makes a data worker call `wait_for_senders` when it ends, once, however many features ask for it."""
    atexit.unregister(wait_for_senders)
    atexit.register(wait_for_senders)


def wait_for_senders() -> None:
    """Waits, for a second at most in all, until no thread that sends a spawned data worker's batches is pickling.

    torch tells a worker that has to end early not to wait for these threads. One that is inside of torch when the
    interpreter has ended would abort the process: "terminate called without an active exception". One that waits for a
    reader is left there. Forked workers exit without an end of the interpreter.
    """
    deadline = time.monotonic() + 1
    for thread in threading.enumerate():
        place, seen = None, 0
        while thread.name == "QueueFeederThread" and thread.is_alive() and time.monotonic() < deadline:
            frame = sys._current_frames().get(thread.ident or 0)
            now = (frame.f_code, frame.f_lasti) if frame and frame.f_globals["__name__"] in _SENDING else None
            place, seen = now, seen + 1 if now == place else 0
            if now is not None and seen == _STANDS_STILL:
                break
            thread.join(0.01)


# Modules whose functions are the innermost of a thread that writes to a pipe, or waits for the lock of the pipe.
_SENDING = ("multiprocessing.connection", "multiprocessing.queues")
# A thread that is seen so often at one place, every 10 ms, is not on its way from there to the next batch.
_STANDS_STILL = 5
