"""What ran in stock code on the CPU instead of on the device: how often, and why.

What a data worker counts travels with its batches to the process that started it. A process that sends no batches, such
as one of a pool, reports for itself.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from PIL import Image

from torch_sink.common import after_fork_in_child
from torch_sink.damage.report import DecodeReport, decode_report
from torch_sink.errors import UnsupportedOperation
from torch_sink.image.core.origins import Origin, said_beside_recorded, said_of_nothing_recorded
from torch_sink.worker.batch import Note

# An operation, and the reason why it was not recorded.
Row = tuple[str, ...]
# What a process has counted: fallbacks, whether anything was recorded, how many images are kept, what made samples that
# were not recorded.
Counts = tuple[Counter[Row], bool, int, list[Origin]]


class FallbackReport:
    """Operations that ran in stock code. Truthy if there were any; `str()` is a table, with the broken files below it.

    Where nothing was recorded, `str()` says what the samples were made by, and what to open images with instead.

    Attributes:
        counts: {(operation, reason): how often}.
        has_recorded: something was recorded at all.
        kept: how many images datasets keep in memory, decoded once, in this process and its data workers.
        origins: what made samples that were not recorded.
        broken: what `decode_report()` says.
    """

    def __init__(
        self, counts: Counter[Row], has_recorded: bool, kept: int, origins: Sequence[Origin], broken: DecodeReport
    ) -> None:
        self.counts, self.has_recorded, self.kept = counts, has_recorded, kept
        self.origins, self.broken = origins, broken

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __len__(self) -> int:
        return len(self.counts)

    def __str__(self) -> str:
        lines = [self._table()] if self.counts else ["no fallbacks"] if self.has_recorded else []
        lines += self.said_of_origins
        if self.kept:
            lines.append(f"kept in memory, and decoded once: {self.kept} image{'s' * (self.kept > 1)}")
        return "\n".join([*lines, str(self.broken)] if self.broken else lines)

    @property
    def said_of_origins(self) -> list[str]:
        """What made samples that were not recorded, and what to do, as lines."""
        if self.has_recorded:
            return said_beside_recorded(self.origins)
        return [] if self.counts else said_of_nothing_recorded(self.origins)

    def _table(self) -> str:
        rows = [("operation", "reason", "count")]
        rows += [(operation, reason, str(count)) for (operation, reason), count in self.counts.most_common()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
        return "\n".join("  ".join(row).rstrip() for row in padded)

    __repr__ = __str__


class _Ledger:
    """The counts of this process since the backend was set; a forked child begins with empty ones.

    Attributes:
        report: names the counts; a data worker belongs to the report of the process that started it.
    """

    def __init__(self) -> None:
        self.strict, self.report = False, ""
        self.counts: Counter[Row]
        self.has_recorded: bool
        self.kept: int
        self.origins: dict[Origin, None]
        self._sent: Counts  # what `tell` has told
        self._has_news: bool  # for `tell`
        self.begin_in_child()

    def open(self, report: str | None, strict: bool) -> str:
        """Starts counting afresh, for the report of another process or, if None, for a new one; returns its name."""
        self._begin()
        self.report, self.strict = report or secrets.token_hex(8), strict
        return self.report

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside, counting begins afresh; afterwards it goes on with the counts from before."""
        before, strict, report = (self.counts, self.has_recorded, self.kept, self.origins), self.strict, self.report
        sent, has_news = self._sent, self._has_news
        arrived = self._set_aside[report] = []
        self._begin()
        self.report = ""
        try:
            yield
        finally:
            (self.counts, self.has_recorded, self.kept, self.origins), self.strict, self.report = before, strict, report
            self._sent, self._has_news = sent, has_news
            del self._set_aside[report]
            for news in arrived:
                self.arrive((report, news))

    def begin_in_child(self) -> None:
        """Begins with empty counts; after a fork with a new lock, which another thread of the parent may have held."""
        self._begin()
        self._lock = threading.Lock()
        self._set_aside: dict[str, list[Counts]] = {}  # what arrives for reports that are set aside

    def _begin(self) -> None:
        self.counts, self.has_recorded, self.kept, self.origins = Counter(), False, 0, {}
        self._sent, self._has_news = self.total(), False

    def add(self, operation: str, reason: str) -> None:
        row = operation, reason
        with self._lock:
            self.counts[row] = self.counts.get(row, 0) + 1
            self._has_news = True

    def note_recorded(self) -> None:
        """Notes, once, that something was recorded."""
        if not self.has_recorded:
            self.has_recorded = self._has_news = True

    def note_kept(self) -> None:
        """Counts an image that is kept in memory, and has its pixels now."""
        with self._lock:
            self.kept += 1
            self._has_news = True

    def note_origin(self, origin: Origin) -> None:
        """Notes, once, what made a sample that is not recorded."""
        if origin not in self.origins:
            with self._lock:
                self.origins[origin] = None
                self._has_news = True

    def total(self) -> Counts:
        """What this process has counted, and what has arrived from its data workers."""
        return self.counts.copy(), self.has_recorded, self.kept, [*self.origins]

    def tell(self) -> Note | None:
        """In a data worker: what was counted since the last call, for the process that started it; None if nothing."""
        if not self._has_news:
            return None
        self._has_news = False
        (counts, _, kept, origins), now = self._sent, self.total()
        self._sent = now
        return _arrived, (self.report, (now[0] - counts, now[1], now[2] - kept, now[3][len(origins) :]))

    def arrive(self, sent: tuple[str, Counts]) -> None:
        """Adds what a data worker has counted, unless its report is that of an earlier backend."""
        report, news = sent
        if report in self._set_aside:
            self._set_aside[report].append(news)
        elif report == self.report:
            counts, has_recorded, kept, origins = news
            with self._lock:
                self.counts.update(counts)
                self.has_recorded |= has_recorded
                self.kept += kept
                self.origins.update(dict.fromkeys(origins))
                self._has_news = True


ledger = _Ledger()
after_fork_in_child(ledger.begin_in_child)


def _arrived(sent: tuple[str, Counts]) -> None:
    ledger.arrive(sent)


class _Executing(threading.local):
    """Counts the contexts that a thread is in; a generator for each would take as long as a small call of torch."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: Any) -> None:
        self.depth -= 1


MUTED = _Executing()


def fallback_report() -> FallbackReport:
    """What ran in stock code since the backend was set, in this process and in the data workers that it started.

    What a data worker counts arrives with its batches. A process that sends no batches, such as one of a pool or of
    joblib, counts for itself: call this function there. Without a device, what would have run there with one.
    """
    return FallbackReport(*ledger.total(), decode_report())


def is_executing() -> bool:
    """True inside `executing()`, where functions that have stand-ins run as stock code."""
    return MUTED.depth > 0


# How many modes stand between a call and torch; a default device is one of the first kind. 1 where torch does not say.
count_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
count_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


@contextmanager
def _executing_on_host() -> Iterator[None]:
    with MUTED, torch.device("cpu"):
        yield


def executing() -> AbstractContextManager[None]:
    """A context in which stock code makes pixels, on the host: nothing is recorded, and no fallback is reported."""
    # Where a script has set a default device, `pil_to_tensor` would make its tensor there.
    return _executing_on_host() if count_function_modes() else MUTED


def image_of(array: np.ndarray) -> Image.Image:
    """An ordinary image of an array, whether or not the program's own `Image.fromarray` makes one."""
    with executing():
        return Image.fromarray(array)


def report_fallback(operation: str, reason: str, inner_module: str | None = None) -> None:
    """Counts one fallback, or raises `UnsupportedOperation` where the backend was set with `strict=True`.

    With `inner_module`, the nearest caller outside this package and that module is added to the reason.
    """
    if is_executing():
        return
    if inner_module is not None:
        reason = f"{reason}: {_caller(inner_module)}"
    if ledger.strict:
        raise UnsupportedOperation(
            f"{operation} would run in stock code on the CPU ({reason}); leave it out, or set the backend with "
            "strict=False"
        )
    ledger.add(operation, reason)


# Packages that read pixels on behalf of their callers.
_INNER_MODULES = ("torch_sink", "numpy", "PIL", "functools")
# `Compose`, `Lambda` and their like, which call functions of C, which have no frame.
_CONTAINERS = (
    "torchvision.transforms.transforms",
    "torchvision.transforms.v2._container",
    "torchvision.transforms.v2._misc",
)


def _caller(inner_module: str) -> str:
    """The nearest code outside of the libraries that read pixels for others, as module and name."""
    inner = (*_INNER_MODULES, inner_module)
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        called = _name_of_called(frame.f_locals) if module in _CONTAINERS else None
        if called or module.partition(".")[0] not in inner:
            return called or f"{module}.{placed(qualified_name(frame), code)}"
        frame = frame.f_back
    return "unknown caller"


def qualified_name(frame: FrameType) -> str:
    """The `co_qualname` of a running function; in Python 3.10, which lacks it, at most with the name of its class.

    Before Python 3.13, whoever reads `f_locals` leaves them in the frame: a training loop would keep a batch alive.
    """
    code = frame.f_code
    if hasattr(code, "co_qualname"):
        return str(code.co_qualname).replace("<locals>.", "")
    if code.co_varnames[:1] != ("self",):
        return str(code.co_name)
    classes = type(frame.f_locals.get("self")).__mro__
    owners = [cls.__qualname__ for cls in classes if getattr(vars(cls).get(code.co_name), "__code__", None) is code]
    return ".".join([*owners[:1], code.co_name])


def placed(name: str, code: CodeType | None) -> str:
    """A function's name; with its file and line for a lambda, of which a program may have many."""
    if code is None or code.co_name != "<lambda>":
        return name
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def name_of(called: Any) -> str:
    """The name of a function, or of an object's class."""
    name = str(getattr(called, "__qualname__", type(called).__name__)).replace("<locals>.", "")
    return placed(name, getattr(called, "__code__", None))


def _name_of_called(names: Mapping[str, Any]) -> str | None:
    """What a container of transforms with these local variables has called, or None where it is no container."""
    for called in (names.get("t"), names.get("transform"), getattr(names.get("self"), "lambd", None)):
        if callable(called):
            return f"{called.__module__}.{name_of(called)}"
    return None
