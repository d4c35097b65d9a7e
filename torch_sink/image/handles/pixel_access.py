"""What `load()` gives before there are pixels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch_sink.image.core.fallback import is_executing

_LOADS_FOR_THE_HEADER = ("exif_transpose",)  # of Pillow's own functions


class PixelAccess:
    """What `load()` returns to code outside Pillow, which mostly wants the file read and its error raised.

    The file is read, and errors of its header were raised, already; pixels are made when one of them is asked for.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load, self._pixels = load, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def __getitem__(self, position: Any) -> Any:
        return self._real()[position]

    def __setitem__(self, position: Any, value: Any) -> None:
        self._real()[position] = value

    def _real(self) -> Any:
        if self._pixels is None:
            self._pixels = self._load()
        return self._pixels


def asked_by_user() -> bool:
    """False where Pillow or this package called the function that asks: they go on to use what it made."""
    caller = sys._getframe(2)
    name = caller.f_globals.get("__name__", "")
    inside = name.startswith(("PIL.", "torch_sink.image.")) and caller.f_code.co_name not in _LOADS_FOR_THE_HEADER
    return not inside and not is_executing()
