"""What ran in stock code on the CPU instead of on the device: how often, and why.

Data workers and forked children are separate processes, so each keeps its counts in a small file of its own in a folder
that the training process named; the report adds them up. Nothing that goes wrong with these files reaches user code.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import torch

from torch_sink.common import after_fork_in_child, is_running
from torch_sink.damage.report import DecodeReport, decode_report
from torch_sink.errors import UnsupportedOperation

# An operation, and the reason why it was not recorded.
Row = tuple[str, ...]
_RECORDED: Row = ("", "")  # among the counts of a child: that something was recorded at all
_COUNT_DIGITS = 12


class FallbackReport:
    """Operations that ran in stock code. Truthy if there were any; `str()` is a table, with the broken files below it.

    Attributes:
        counts: {(operation, reason): how often}.
        has_recorded: something was recorded at all.
        broken: what `decode_report()` says.
    """

    def __init__(self, counts: Counter[Row], has_recorded: bool, broken: DecodeReport) -> None:
        self.counts, self.has_recorded, self.broken = counts, has_recorded, broken

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __len__(self) -> int:
        return len(self.counts)

    def __str__(self) -> str:
        return f"{self._table()}\n{self.broken}" if self.broken else self._table()

    def _table(self) -> str:
        if not self.counts:
            what = "nothing that was recorded" if self.has_recorded else "nothing was recorded: whatever ran,"
            return f"{what} ran in stock code"
        rows = [("operation", "reason", "count")]
        rows += [(operation, reason, str(count)) for (operation, reason), count in self.counts.most_common()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
        return "\n".join("  ".join(row).rstrip() for row in padded)

    __repr__ = __str__


# The counts of a ledger and where its children leave theirs, while another one is in use.
Aside = dict[str, Any]


class _ChildFile:
    """The counts of a child process, in a file of its own that the process which reports can read at any time.

    One line a row: a count of fixed width, then what is counted. A new row is appended, a count is written over the
    old one, so that whoever reads finds whole lines, and a child that is killed loses nothing.

    Args:
        folder: where the process that reports looks; made by the first child that has something to say.
    """

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / f"{os.getpid()}_{secrets.token_hex(8)}"
        self._places: dict[Row, int] = {}
        self._end = 0

    def write(self, row: Row, count: int) -> None:
        """Writes one count. A disk that is full, or a folder that is gone, costs the report this count and no more."""
        with contextlib.suppress(OSError), self._open() as file:
            if row in self._places:
                file.seek(self._places[row])
                file.write(b"%0*d" % (_COUNT_DIGITS, count))
            else:
                line = b"%0*d %s\n" % (_COUNT_DIGITS, count, json.dumps(row).encode())
                file.seek(self._end)
                file.write(line)
                self._places[row], self._end = self._end, self._end + len(line)

    def _open(self) -> BinaryIO:
        try:
            return open(self.path, "r+b" if self._places else "xb")
        except FileNotFoundError:
            if not _is_owner_alive(self.path.parent):
                raise
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            self._places, self._end = {}, 0
            return open(self.path, "xb")


def _is_owner_alive(folder: Path) -> bool:
    """Whether the process that named the folder can still remove it."""
    return is_running(int(folder.name.split("_")[-2]))


def _read_counts(folder: str) -> Iterator[tuple[Row, int]]:
    for file in Path(folder).glob("*"):
        with contextlib.suppress(OSError, ValueError):  # removed meanwhile, or no file of ours
            *lines, _ = file.read_text().split("\n")  # behind the last whole line: one that is being written
            for line in lines:
                count, row = line.split(" ", 1)
                yield tuple(json.loads(row)), int(count)


class _Ledger:
    """The counts of this process, and where its children leave theirs.

    A forked child begins with counts of its own: those of its parent stay the parent's.
    """

    def __init__(self) -> None:
        self.counts: Counter[Row] = Counter()
        self.has_recorded = False
        self.strict = False
        self.folder = ""
        self.file: _ChildFile | None = None
        self._lock = threading.Lock()
        self._named: list[str] = []

    def open(self, folder: str | None, strict: bool) -> str:
        """Starts counting afresh.

        Args:
            folder: that of the parent, in a worker; None where this process reports, and names one.
            strict: fallbacks raise.

        Returns:
            The folder. "" where there is no place for temporary files: the report then lacks the children's counts.
        """
        self.close()
        self.strict, self.counts, self.has_recorded = strict, Counter(), False
        self.folder = self._name_folder() if folder is None else folder
        self.file = _ChildFile(folder) if folder else None
        return self.folder

    def _name_folder(self) -> str:
        try:
            place = tempfile.gettempdir()
        except OSError:
            return ""
        self._named.append(str(Path(place, f"torch_sink_fallback_{os.getpid()}_{secrets.token_hex(8)}")))
        return self._named[-1]

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Puts back the counts of this process, and where its children leave theirs."""
        kept = self.put_aside()
        try:
            yield
        finally:
            self.put_back(kept)

    def put_aside(self) -> Aside:
        """Begins without counts; `put_back` goes on with those from before."""
        kept = {name: getattr(self, name) for name in ("counts", "has_recorded", "strict", "folder", "file")}
        # Without a folder of its own the ledger has none to clear.
        self.folder, self.counts, self.has_recorded, self.file = "", Counter(), False, None
        return kept

    def put_back(self, kept: Aside) -> None:
        """Forgets what was counted since, and goes on with what was put aside."""
        self.close()
        vars(self).update(kept)

    def discard(self, kept: Aside) -> None:
        """Removes what was put aside and nobody asks for any more."""
        if kept["folder"] and kept["file"] is None:
            shutil.rmtree(kept["folder"], ignore_errors=True)

    def close(self) -> None:
        """Removes what children left."""
        if self.folder and self.file is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close_all(self) -> None:
        """At exit: also what children left after the backend was switched off."""
        for folder in self._named:
            shutil.rmtree(folder, ignore_errors=True)

    def begin_in_child(self) -> None:
        """After a fork: another thread of the parent may have held the lock."""
        self._lock, self._named, self.counts, self.has_recorded = threading.Lock(), [], Counter(), False
        self.file = _ChildFile(self.folder) if self.folder else None

    def add(self, operation: str, reason: str) -> None:
        row = operation, reason
        with self._lock:
            self.counts[row] += 1
            if self.file is not None:
                self.file.write(row, self.counts[row])

    def note_recorded(self) -> None:
        """Notes, once, that something was recorded."""
        if self.has_recorded:
            return
        self.has_recorded = True
        if self.file is not None:
            with self._lock:
                self.file.write(_RECORDED, 1)

    def total(self) -> Counter[Row]:
        counts = Counter(self.counts)
        if self.folder and self.file is None:
            for row, count in _read_counts(self.folder):
                counts[row] += count
        return counts


ledger = _Ledger()
atexit.register(ledger.close_all)
after_fork_in_child(ledger.begin_in_child)
_muted = threading.local()


def fallback_report() -> FallbackReport:
    """What ran in stock code since the backend was set, in this process and in the data workers that it started."""
    counts = ledger.total()
    has_recorded = counts.pop(_RECORDED, 0) > 0
    return FallbackReport(counts, has_recorded or ledger.has_recorded, decode_report())


def is_executing() -> bool:
    """True inside `executing()`: stock code must stay stock code, also where it calls what has a stand-in."""
    return getattr(_muted, "depth", 0) > 0


@contextmanager
def executing() -> Iterator[None]:
    """Inside, stock code runs because a plan says so, on the host: nothing is recorded and nothing reported."""
    before = getattr(_muted, "depth", 0)
    _muted.depth = before + 1
    # Where a script has set a default device, `pil_to_tensor` would make its tensor there.
    has_default = torch._C._len_torch_function_stack() > 0
    try:
        with torch.device("cpu") if has_default else nullcontext():
            yield
    finally:
        _muted.depth = before


def report_fallback(operation: str, reason: str, inner_module: str | None = None) -> None:
    """Counts one fallback.

    Args:
        operation: what was asked for.
        reason: why it could not be recorded.
        inner_module: where given, the nearest caller outside this package and that module is added to the reason.

    Raises:
        UnsupportedOperation: the backend was set with `strict=True`.
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


# Code that reads pixels for somebody else.
_INNER_MODULES = ("torch_sink", "numpy", "PIL", "functools")
# `Compose`, `Lambda` and their like, which call what may be written in C and have no frame of its own.
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
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in inner:
            return _name_of_called(frame, module) or f"{module}.{_name_of(frame)}"
        frame = frame.f_back
    return "unknown caller"


def _name_of(frame: FrameType) -> str:
    code = frame.f_code
    owner = type(frame.f_locals["self"]).__name__ + "." if "self" in frame.f_locals else ""
    return getattr(code, "co_qualname", owner + code.co_name).replace("<locals>.", "")


def _name_of_called(frame: FrameType, module: str) -> str:
    """What a container of transforms has called, or "" where the frame is none of a container."""
    names = frame.f_locals if module in _CONTAINERS else {}
    for called in (names.get("t"), names.get("transform"), getattr(names.get("self"), "lambd", None)):
        if callable(called):
            return f"{called.__module__}.{getattr(called, '__qualname__', type(called).__name__)}"
    return ""
