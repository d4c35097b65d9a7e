"""What opens images, for streams that are guarded while the image backend is off: it gives placeholders as well."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch_sink.common.patches import Patches
from torch_sink.damage.report import BrokenFile, broken_file
from torch_sink.damage.samples import is_reading_stream, note_opened, note_pixels, note_placeholder

# Of an image whose sample will be left out; stock code's own checks must accept it.
PLACEHOLDER_SIZE = (1024, 1024)
_is_on = {"backend": False}
_inside = threading.local()


def set_backend(is_on: bool) -> None:
    """Says whether the image backend, which has openers of its own, is on in this process."""
    _is_on["backend"] = is_on


def place_openers() -> Patches:
    """Puts the stand-ins in their places; undoing what is returned puts the stock functions back."""
    patches = Patches()
    patches.replace(importlib.import_module("PIL.Image"), "open", _or_placeholder)
    if "torchvision.datasets.folder" in sys.modules:
        patches.replace(sys.modules["torchvision.datasets.folder"], "pil_loader", _or_placeholder)
    return patches


def _or_placeholder(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def load(*args: Any, **kwargs: Any) -> Any:
        is_inside = getattr(_inside, "an_opener", False)
        if is_inside or _is_on["backend"] or not is_reading_stream():
            return stock(*args, **kwargs)
        _inside.an_opener = True
        try:
            return _opened(stock, *args, **kwargs)
        finally:
            _inside.an_opener = False

    return load


def _opened(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def load() -> Any:
        image = stock(*args, **kwargs)
        try:
            image.load()
        except BaseException:
            image.close()
            raise
        return image

    found = open_in_stream(load)
    if not isinstance(found, BrokenFile):
        return found
    note_pixels(found)  # an ordinary image tells nobody that it is used
    return importlib.import_module("PIL.Image").new("RGB", PLACEHOLDER_SIZE)


def open_in_stream(load: Callable[[], Any]) -> Any:
    """The image that a guarded stream opens, or the file in whose place it gets a placeholder, which is noted.

    Args:
        load: opens and loads it: all that can be broken has to raise at once, for later its exception would end the
            stream.
    """
    note_opened()
    try:
        return load()
    except Exception as error:
        broken = broken_file(error, "")
        if broken is None:
            raise
    note_placeholder(broken)
    return broken
