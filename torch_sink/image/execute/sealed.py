"""A value that crosses to another process as bytes, which nobody opens before it is asked for."""

from __future__ import annotations

import pickle
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Sealed(Generic[T]):
    """Holds a value, or its pickle until `value` is asked for."""

    __slots__ = ("_pickled", "_value")

    def __init__(self, value: T) -> None:
        self._value = value
        self._pickled: bytes | None = None

    @property
    def value(self) -> T:
        """The value; opened the first time where it came from another process."""
        if self._pickled is not None:
            self._value, self._pickled = pickle.loads(self._pickled), None
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        return _sealed, (self._pickled or pickle.dumps(self._value, pickle.HIGHEST_PROTOCOL),)


def _sealed(pickled: bytes) -> Sealed[Any]:
    sealed = Sealed[Any](None)
    sealed._pickled = pickled
    return sealed
