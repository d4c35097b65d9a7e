"""`set_epoch`: which parts of a loader have it, at which epoch each stands, and how a training goes on from there."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch_sink.common import reference
from torch_sink.common.integrations import shows_epoch_as_iteration

_PARTS = {"loader": ("sampler", "batch_sampler", "dataset"), "sampler": ("sampler", "batch_sampler")}
_DEPTH = 3  # a batch sampler of a library holds torch's, which holds a sampler
# Where an object shows its epoch: torch's samplers and most others, Hugging Face's datasets.
_SHOWN_AS = ("epoch", "_epoch")

# What objects were told here, and whether they showed it afterwards: by identity, because datasets may be equal or have
# no hash. One that did not may count something else, such as its draws, from another number or not at all.
_told: dict[int, tuple[Callable[[], Any], int, bool]] = {}


def owners_of(loader: Any) -> dict[str, Any]:
    """The loader, its samplers and datasets with a method `set_epoch(epoch)`, each once, by their place in it."""
    found: dict[str, Any] = {}
    level = [("loader", "loader", loader)]
    for _ in range(_DEPTH + 1):
        parts = []
        for path, kind, part in level:
            if _has_set_epoch(part) and not any(part is one for one in found.values()):
                found[path] = part
            for name in _PARTS.get(kind, ("dataset",)):
                if (inner := getattr(part, name, None)) is not None:
                    inner_kind = "dataset" if name == "dataset" else "sampler"
                    parts.append((name if part is loader else f"{path}.{name}", inner_kind, inner))
        level = parts
    return found


def _has_set_epoch(part: Any) -> bool:
    """Whether an object has a `set_epoch` that can be called with an epoch alone, as torch's samplers have."""
    set_epoch = getattr(part, "set_epoch", None)
    if not callable(set_epoch):
        return False
    try:
        inspect.signature(set_epoch).bind(0)
    except TypeError:  # another method of this name, which the program calls
        return False
    except ValueError:
        pass  # it shows no signature
    return True


def _shown_by(owner: Any) -> int | None:
    """The number that an object shows; None if it shows none."""
    for name in (*_SHOWN_AS, "iteration") if shows_epoch_as_iteration(owner) else _SHOWN_AS:
        try:
            return operator.index(getattr(owner, name, None))  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            continue  # there is no such number
    return None


def _epoch_of(owner: Any) -> int | None:
    """The epoch at which an object stands; None if it does not show it and was told none."""
    known, told, is_shown = _told.get(id(owner), (None, None, True))
    if known is None or known() is not owner:
        return _shown_by(owner)
    return _shown_by(owner) if is_shown else told


def _tell(owner: Any, epoch: int) -> bool:
    """Calls `set_epoch`; returns whether the object then shows this epoch."""
    owner.set_epoch(epoch)
    number, is_shown = id(owner), _shown_by(owner) == epoch
    _told[number] = reference(owner, lambda: _told.pop(number, None)), epoch, is_shown
    return is_shown


def epochs_of(loader: Any) -> dict[str, int]:
    """The epochs at which the parts of a loader stand; those of which it is not known are left out."""
    known = {path: _epoch_of(owner) for path, owner in owners_of(loader).items()}
    return {path: epoch for path, epoch in known.items() if epoch is not None}


def set_epochs(loader: Any, epochs: Mapping[str, int]) -> dict[str, int]:
    """Calls `set_epoch` of the parts that stand elsewhere; returns where these stood."""
    before = {}
    for path, owner in owners_of(loader).items():
        now = _epoch_of(owner)
        if path in epochs and now != epochs[path]:
            was_told = id(owner) in _told
            is_shown = _tell(owner, epochs[path])
            if now is not None and (is_shown or was_told):
                before[path] = now
    return before


@contextmanager
def at_epochs(loader: Any, epochs: Mapping[str, int]) -> Iterator[None]:
    """Inside, the parts of a loader stand at these epochs; afterwards where they stood."""
    before = set_epochs(loader, epochs)
    try:
        yield
    finally:
        set_epochs(loader, before)


def set_next_epochs(loader: Any, began: Mapping[str, int]) -> None:
    """Calls `set_epoch` for the pass after one that began at the epochs `began`.

    A part that stands elsewhere by now was told so by the program, or goes on by itself: its value holds. A part that
    does not show its epoch counts from 0.
    """
    for path, owner in owners_of(loader).items():
        now = _epoch_of(owner)
        if now is None or now == began.get(path, now):
            was_told = id(owner) in _told
            if not _tell(owner, (now or 0) + 1) and not was_told and now:
                _tell(owner, 1)  # what it showed so far was no epoch


def begin_epochs_at(loader: Any, epoch: int) -> None:
    """Calls `set_epoch` of the parts that stand at 0, or do not show where, for a training that begins at `epoch`."""
    for owner in owners_of(loader).values():
        if not _epoch_of(owner):
            _tell(owner, epoch)


def epochs_in(state: dict[str, Any]) -> dict[str, int]:
    """The epochs in the state of a SinkLoader; an earlier version has told the samplers the number of each pass."""
    number = int(state["pass_number"])
    told = {"sampler": number, "batch_sampler": number, "batch_sampler.sampler": number}
    return {path: int(epoch) for path, epoch in state.get("epochs", told).items()}
