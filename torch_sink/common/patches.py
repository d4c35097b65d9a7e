"""Functions of other packages that torch_sink replaces while it needs to, and puts back.

Several features replace the same function: the image backend and a timeline both prepare data workers. What each of
them replaces is a layer over what was there. Layers go in any order, and with the last of a place the very same object
is back.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

MISSING = object()
WORKER_LOOPS = ("torch.utils.data._utils.worker", "torchdata.stateful_dataloader.stateful_dataloader")
Make = Callable[[Any], Any]


class _Place:
    """One replaced attribute or key: what was there, and the layers over it, the lowest first."""

    def __init__(self, owner: Any, name: Any) -> None:
        self.owner, self.name, self.stock = owner, name, read(owner, name)
        self.layers: list[tuple[Patches, Make]] = []

    def original(self) -> Any:
        """What a call of the stock function calls; for an inherited method, that of the base class."""
        if self.stock is MISSING and isinstance(self.owner, type):
            return getattr(super(self.owner, self.owner), self.name)
        return _function(self.stock)

    def fill(self) -> None:
        """Make all stand-ins anew, each from what lies below it."""
        value = self.original() if self.layers else self.stock
        for _, make in self.layers:
            value = make(_function(value))
        _write(self.owner, self.name, value)


_places: dict[tuple[int, Any], _Place] = {}


class Patches:
    """What one feature replaces."""

    def __init__(self) -> None:
        self.places: list[_Place] = []

    def __bool__(self) -> bool:
        return bool(self.places)

    def replaces(self, owner: Any, name: Any) -> bool:
        """Whether this feature has a layer there."""
        place = _places.get((id(owner), name))
        return place is not None and any(feature is self for feature, _ in place.layers)

    def replace(self, owner: Any, name: Any, make: Make) -> None:
        """Put a stand-in over what is there now.

        Args:
            owner: a module, a class or a dict.
            name: attribute or key.
            make: what is there -> stand-in. Called again when a layer below this one goes.
        """
        place = _places.setdefault((id(owner), name), _Place(owner, name))
        place.layers.append((self, make))
        try:
            place.fill()
        except BaseException:
            self._take_off(place)
            raise
        self.places.append(place)

    def undo(self) -> None:
        """Take all layers of this feature off."""
        while self.places:
            self._take_off(self.places.pop())

    def _take_off(self, place: _Place) -> None:
        place.layers = [(feature, make) for feature, make in place.layers if feature is not self]
        if not place.layers:
            del _places[id(place.owner), place.name]
        place.fill()


def read(owner: Any, name: Any) -> Any:
    """What is stored there, a `staticmethod` as such; MISSING where nothing is, or where it is inherited."""
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
    """Stand-in for the `_worker_loop` of torch or torchdata that prepares the worker before the loop runs.

    It is pickled to spawned workers with those below it; the stock loop is found there by its module.

    Args:
        below: the stock loop, or another stand-in.
    """

    def __init__(self, below: Callable[..., None]) -> None:
        self.below: Callable[..., None] | None = below
        self.module: str = below.module if isinstance(below, WorkerLoop) else below.__module__

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "below": self.below if isinstance(self.below, WorkerLoop) else None}

    def stock(self) -> Callable[..., None]:
        """The loop itself."""
        module = importlib.import_module(self.module)
        place = _places.get((id(module), "_worker_loop"))
        return place.original() if place is not None else module._worker_loop

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run what lies below, in the worker."""
        return (self.below or self.stock())(*args, **kwargs)
