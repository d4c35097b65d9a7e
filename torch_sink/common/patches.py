"""Replaces functions of other packages, and puts them back.

Several features may replace the same function: the image backend and a timeline both wrap the main loop of data
workers. Each replacement is a layer over the ones before. Layers can be removed in any order; once the last one is
gone, the attribute is the original object again.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from multiprocessing import reduction
from types import FunctionType, ModuleType
from typing import Any

import torch

MISSING = object()
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


def original(owner: Any, name: Any) -> Any:
    """The function that is an attribute of `owner`, whatever features have put in its place."""
    place = _places.get((id(owner), name))
    return getattr(owner, name) if place is None else place.original()


def is_written_in(module: ModuleType, function: Any) -> bool:
    """True for a function from the file of a module; a program may have put another one in its place."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == module.__file__


# --- pickles


def dump_with_stock_functions(stock: Callable[..., None], obj: Any, file: Any, protocol: Any = None) -> None:
    """For `multiprocessing.reduction.dump`, which writes what a new process is given.

    A dataset may hold functions that the program imported before they were replaced: pickle finds a stand-in under
    their names.
    """
    if not is_written_in(reduction, stock):
        stock(obj, file, protocol)  # the program's own
        return
    replaced = {id(place.stock) for place in list(_places.values()) if isinstance(place.stock, FunctionType)}

    class Pickler(reduction.ForkingPickler):  # which a program may have replaced
        def reducer_override(self, obj: Any) -> Any:
            if id(obj) in replaced:
                return stock_function, (obj.__module__, obj.__qualname__)
            override = getattr(super(), "reducer_override", None)
            return NotImplemented if override is None else override(obj)

    Pickler(file, protocol).dump(obj)


def stock_function(module: str, qualname: str) -> Any:
    """The function of that name, whatever features have put in its place."""
    *path, name = qualname.split(".")
    return original(functools.reduce(getattr, path, importlib.import_module(module)), name)


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
