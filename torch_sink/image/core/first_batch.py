"""Looks at the first batch that a process fetches, until something is recorded: what it holds, and what made it.

The report of fallbacks says it where nothing was recorded.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image

from torch_sink.common.containers import leaves
from torch_sink.image.core.fallback import ledger, qualified_name
from torch_sink.image.core.origins import CALLED, GAVE, GAVE_NO_IMAGE, GOT, Origin
from torch_sink.worker.batch import WorkerBatch

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")})
# Its code calls what the user gives it, as an `ImageFolder` calls its `loader`.
_CARRIER = "torchvision.datasets."
# Their functions do not decode, or are named by what they got.
_NOT_NAMED = {"", "__main__", "builtins", "torch_sink", "torchvision", *sys.stdlib_module_names}
_MOST_EVENTS = 5000  # to look at more would take a time that is felt
_MOST_NAMED = 8


def look_at_first(fetcher: Any) -> Any:
    """Makes one of torch's fetchers note what its first batch is made by, if nothing has been recorded until then."""
    if ledger.has_recorded or ledger.origins:
        return fetcher
    known = weakref.ref(fetcher)  # a cycle would keep the workers alive

    def fetch(index: Any) -> Any:
        found: Any = known()
        del found.fetch
        with _noted_calls() as calls:
            batch = found.fetch(index)
        if not ledger.has_recorded:
            sent = batch if type(batch) is WorkerBatch else None
            with contextlib.suppress(Exception):  # of a user's class that cannot be looked through
                for origin in origins_of(found.dataset, batch if sent is None else sent.batch, calls):
                    ledger.note_origin(origin)
            if sent is not None and (note := ledger.tell()) is not None:
                sent.notes.append(note)
        return batch

    fetcher.fetch = fetch
    return fetcher


def note_array(function: Callable[..., Any], values: np.ndarray) -> None:
    """Notes that a functional of torchvision got an image as an array: as a Pillow image it would be recorded."""
    if not ledger.has_recorded or values.dtype == np.uint8:
        transform = type(sys._getframe(2).f_locals.get("self"))  # what called the functional
        of_torchvision = transform.__module__.startswith("torchvision.transforms.")
        called: Any = transform if of_torchvision else function
        package = "transforms.v2" if ".v2." in called.__module__ else "transforms"
        name = called.__qualname__ if of_torchvision else f"functional.{called.__qualname__}"
        ledger.note_origin((f"{package}.{name}", GOT, f"a numpy {values.dtype} array"))


def origins_of(dataset: Any, batch: Any, calls: dict[str, None] | None = None) -> Iterator[Origin]:
    """What a batch of a dataset holds, and which functions made it."""
    while type(dataset).__module__.startswith("torch.utils.data") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset  # of a `Subset`, for instance
    kind = type(dataset)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("__main__.").replace("<locals>.", "")
    held: dict[str, None] = {}
    may_be_image = False
    for leaf in leaves(batch):
        if isinstance(leaf, (torch.Tensor, np.ndarray)):
            dtype = str(leaf.dtype).removeprefix("torch.")
            held[f"{dtype} {list(leaf.shape)}"] = None
            may_be_image |= leaf.ndim > 1 and dtype.startswith(("uint8", "float", "bfloat"))
        elif not isinstance(leaf, (int, float)):
            held[type(leaf).__name__] = None
            may_be_image |= isinstance(leaf, Image.Image)
    shown = [*list(held)[:_MOST_NAMED], *["..."] * (len(held) > _MOST_NAMED)]
    yield name, GAVE if may_be_image else GAVE_NO_IMAGE, ", ".join(shown) or "numbers"
    for called in list(calls or ())[:_MOST_NAMED]:
        yield name, CALLED, called


@contextmanager
def _noted_calls() -> Iterator[dict[str, None]]:
    """Yields the names of the functions of other libraries that the user's code calls inside, in the order of calls.

    A profiler that the user has set stays, and nothing is noted.
    """
    names: dict[str, None] = {}
    events = 0

    def note(frame: FrameType, event: str, function: Any) -> None:
        nonlocal events
        events += 1
        if ledger.has_recorded or events > _MOST_EVENTS:
            sys.setprofile(None)
            return
        try:
            note_call(frame, event, function)
        except Exception:  # it would be raised in the user's code
            sys.setprofile(None)

    def note_call(frame: FrameType, event: str, function: Any) -> None:
        if event == "call" and frame.f_back is not None and _is_watched(frame.f_back) and not _is_watched(frame):
            _note(names, str(frame.f_globals.get("__name__")), qualified_name(frame))
        elif event == "c_call" and _is_watched(frame):
            _note(names, _module_of(function), function.__name__)

    if sys.getprofile() is not None:
        yield names
        return
    sys.setprofile(note)
    try:
        yield names
    finally:
        if sys.getprofile() is note:
            sys.setprofile(None)


def _note(names: dict[str, None], module: str, name: str) -> None:
    package, name = module.partition(".")[0], name.removesuffix(".__call__")
    parts, (first, *others) = module.split("."), name.split(".")
    if package in _NOT_NAMED or any(part.startswith(("_", "<")) for part in (first, *others)):
        return
    paths = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    # As users write it: `numpy.load`, which is defined deeper inside.
    path = next((path for path in paths if first in getattr(sys.modules.get(path), "__dict__", {})), module)
    names[f"{path}.{name}"] = None


def _is_users(frame: FrameType) -> bool:
    module, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
    return not (file.startswith((*_LIBRARIES, "<frozen ")) or module.startswith("torch_sink."))


def _is_watched(frame: FrameType) -> bool:
    return _is_users(frame) or str(frame.f_globals.get("__name__")).startswith(_CARRIER)


def _module_of(function: Any) -> str:
    """The module of a function of C; "" for methods, which change what others made.

    Functions of OpenCV, for instance, do not say their module, but stand in it.
    """
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, (type, ModuleType)):
        return ""
    if module := getattr(function, "__module__", None):
        return str(module)
    name, loaded = function.__name__, [*sys.modules.items()]
    return next((module for module, held in loaded if getattr(held, "__dict__", {}).get(name) is function), "")
