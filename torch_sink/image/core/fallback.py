"""What ran in stock code on the CPU instead of on the device: how often, and why.

Each data worker and forked child writes its counts to a file in a folder of the process that set the backend; the
report adds them up. Errors with these files never reach user code.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from PIL import Image

from torch_sink.common import after_fork_in_child
from torch_sink.damage.report import DecodeReport, decode_report
from torch_sink.errors import UnsupportedOperation
from torch_sink.image.core.origins import Origin, said_beside_recorded, said_of_nothing_recorded

# An operation, and the reason why it was not recorded.
Row = tuple[str, ...]
# Rows in the files of children that are no fallbacks: whether anything was recorded, how many images are kept.
_HAS_RECORDED: Row = ()
_KEPT: Row = ("kept",)
_ORIGIN = 3  # the length of a row that says what made samples which were not recorded


class FallbackReport:
    """Operations that ran in stock code. Truthy if there were any; `str()` is a table, with the broken files below it.

    Where nothing was recorded, `str()` says what the samples were made by, and what to open images with instead.

    Attributes:
        counts: {(operation, reason): how often}.
        has_recorded: something was recorded at all.
        kept: how many images datasets keep in memory, decoded once, in all processes.
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
    """The counts of this process, and the folder where its children leave theirs.

    A child begins with empty counts. They are lines of one file: a new line replaces the file, and a new count is
    written over the old one, as a sample may have many fallbacks. So the file is whole also where a child was killed.
    """

    def __init__(self) -> None:
        self.counts: Counter[Row] = Counter()
        self.has_recorded = False
        self.kept = 0
        self.origins: dict[Origin, None] = {}
        self.added, self.latest = 0, _HAS_RECORDED  # how many fallbacks were counted, and the row of the last one
        self.strict = False
        self.folder = ""
        self._owner = 0  # the process that made the folder, and reports
        self._closes_at_exit = False
        self._offsets: dict[Row, int] = {}  # first byte of each count in this child's file
        self._text: Any = b""  # the file, mapped
        self.begin_in_child()

    def open(self, folder: str | None, strict: bool) -> str:
        """Starts counting afresh.

        `folder` is that of the parent, in a worker; None where this process reports, and makes one. Returns the folder,
        or "" where there is no place for temporary files: the report then lacks the children's counts.
        """
        self.close()
        self.counts, self.has_recorded, self.kept, self.origins, self.strict = Counter(), False, 0, {}, strict
        self.folder, self._owner, self._offsets, self._leaves = folder or "", 0, {}, folder is not None
        if folder is None:
            with contextlib.suppress(OSError):
                self.folder, self._owner = tempfile.mkdtemp(prefix="torch_sink_fallback_"), os.getpid()
            if not self._closes_at_exit:
                Finalize(None, self.close, exitpriority=0)  # children of multiprocessing end without `atexit`
                self._closes_at_exit = True
        return self.folder

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside, counting begins afresh; afterwards it goes on with the counts and the folder from before."""
        before = self.counts, self.has_recorded, self.kept, self.origins, self.strict, self.folder, self._owner
        in_file = self._leaves, self._offsets, self._text
        self.counts, self.has_recorded, self.kept, self.origins = Counter(), False, 0, {}
        self.folder, self._owner = "", 0
        try:
            yield
        finally:
            self.close()
            self.counts, self.has_recorded, self.kept, self.origins, self.strict, self.folder, self._owner = before
            self._leaves, self._offsets, self._text = in_file

    def close(self) -> None:
        """Removes the folder with the files of the children."""
        if self._owner == os.getpid():
            shutil.rmtree(self.folder, ignore_errors=True)

    def begin_in_child(self) -> None:
        """Begins with empty counts; after a fork with a new lock, which another thread of the parent may have held."""
        self.counts, self.has_recorded, self.kept, self.origins = Counter(), False, 0, {}
        self._lock = threading.Lock()
        self._name, self._offsets, self._closes_at_exit, self._leaves = secrets.token_hex(8), {}, False, True

    def add(self, operation: str, reason: str) -> None:
        row = operation, reason
        with self._lock:
            self.added, self.latest = self.added + 1, row
            self.counts[row] = count = self.counts.get(row, 0) + 1
            if self._leaves:
                self._leave(row, count)

    def note_recorded(self) -> None:
        """Notes, once, that something was recorded."""
        if not self.has_recorded:
            with self._lock:
                self.has_recorded = True
                self._leave(_HAS_RECORDED, 1)

    def note_kept(self) -> None:
        """Counts an image that is kept in memory, and has its pixels now."""
        with self._lock:
            self.kept += 1
            self._leave(_KEPT, self.kept)

    def note_origin(self, origin: Origin) -> None:
        """Notes, once, what made a sample that is not recorded."""
        if origin not in self.origins:
            with self._lock:
                self.origins[origin] = None
                self._leave(origin, 1)

    def _leave(self, row: Row, count: int) -> None:
        """Writes the count of a row to this child's file, or all of the file where it lacks that row.

        Where the disk is full or the folder is gone, the report lacks the counts of this child.
        """
        if not self._leaves or not self.folder:
            return
        if row in self._offsets:
            begin = self._offsets[row]
            self._text[begin : begin + 12] = b"%012d" % count
            return
        rows = {
            _HAS_RECORDED: int(self.has_recorded),
            _KEPT: self.kept,
            **dict.fromkeys(self.origins, 1),
            **self.counts,
        }
        file = Path(self.folder, self._name)
        with contextlib.suppress(OSError):
            text, offsets = b"", {}
            for known, times in rows.items():
                offsets[known] = len(text)
                text += b"%012d %s\n" % (times, json.dumps(known).encode())
            unfinished = file.with_name(f".{self._name}")
            unfinished.write_bytes(text)
            with open(unfinished, "r+b") as opened:
                self._text = mmap.mmap(opened.fileno(), 0)
            unfinished.replace(file)
            self._offsets = offsets

    def total(self) -> tuple[Counter[Row], bool, int, list[Origin]]:
        """For this process and its children: the counts, whether anything was recorded, how many images are kept, and
        what made samples that were not recorded.
        """
        counts = Counter(self.counts)
        files = Path(self.folder).glob("[!.]*") if self._owner == os.getpid() else ()
        for file in files:
            with contextlib.suppress(OSError):  # removed meanwhile
                for line in file.read_bytes().splitlines():
                    count, row = line.split(b" ", 1)
                    counts[tuple(json.loads(row))] += int(count)
        has_recorded = counts.pop(_HAS_RECORDED, 0) > 0 or self.has_recorded
        origins = [*dict.fromkeys([*self.origins, *(row for row in counts if len(row) == _ORIGIN)])]
        for origin in origins:
            counts.pop(origin, None)
        return counts, has_recorded, self.kept + counts.pop(_KEPT, 0), origins


ledger = _Ledger()
after_fork_in_child(ledger.begin_in_child)


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

    Without a device, what would have run there with one.
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
            return called or f"{module}.{placed(qualified_name(code, frame.f_locals), code)}"
        frame = frame.f_back
    return "unknown caller"


def qualified_name(code: CodeType, names: Mapping[str, Any]) -> str:
    """The `co_qualname` of a function's code; in Python 3.10, which lacks it, at most with the name of its class."""
    if hasattr(code, "co_qualname"):
        return str(code.co_qualname).replace("<locals>.", "")
    classes = type(names.get("self")).__mro__
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
