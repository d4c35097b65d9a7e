"""Lazy images and tensors are called what the stock ones are called, in every error message that names a type."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def named_as(stock: type) -> Callable[[Class], Class]:
    """Gives a class the name of the stock class that its objects stand for; pickles find it by `sink_class`."""

    def name(cls: Class) -> Class:
        cls.sink_class = cls.__module__, cls.__qualname__  # type: ignore[attr-defined]
        cls.__module__, cls.__qualname__, cls.__name__ = stock.__module__, stock.__qualname__, stock.__name__
        return cls

    return name


def unpickled(sink_class: tuple[str, str], *args: Any) -> Any:
    """An object of the class that was defined in that module under that name: what pickles call."""
    module, name = sink_class
    return getattr(importlib.import_module(module), name)(*args)
