"""What ran in stock code on the CPU instead of on the device: how often, and why.

Workers are separate processes, so each keeps its counts in a small file of its own in a folder that the training
process named; the report adds them up. A worker that is killed loses what it counted in its last half second.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_sink.errors import UnsupportedOperation

_WRITE_EVERY_SECONDS = 0.5


class FallbackReport:
    """Operations that ran in stock code. Truthy if there were any; `str()` is a table.

    Attributes:
        counts: {(operation, reason): how often}.
    """

    def __init__(self, counts: Counter[tuple[str, str]]) -> None:
        self.counts = counts

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __len__(self) -> int:
        return len(self.counts)

    def __str__(self) -> str:
        if not self.counts:
            return "nothing ran in stock code"
        rows = [("operation", "reason", "count")]
        rows += [(operation, reason, str(count)) for (operation, reason), count in self.counts.most_common()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
        return "\n".join("  ".join(row).rstrip() for row in padded)

    __repr__ = __str__


class _Ledger:
    """The counts of this process, and the folder that collects those of its workers."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.strict = False
        self.folder: str | None = None
        self.owner = 0
        self.token = ""
        self._lock = threading.Lock()
        self._last_write = 0.0

    def open(self, folder: str | None, strict: bool) -> str:
        """Starts counting afresh. A worker passes the folder of its parent; without one, this process names its own.

        The folder is made by the first worker that has something to say.
        """
        self.close()
        self.strict, self.counts = strict, Counter()
        self.token = secrets.token_hex(8)
        if folder is not None:
            self.folder, self.owner = folder, 0
        else:
            self.folder = str(Path(tempfile.gettempdir()) / f"torch_sink_fallback_{self.token}")
            self.owner = os.getpid()
        return self.folder

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Puts back the counts of this process, and where its workers leave theirs."""
        kept = {name: getattr(self, name) for name in ("counts", "strict", "folder", "owner", "token")}
        # Without a folder of its own the ledger has none to clear.
        self.folder, self.counts = None, Counter()
        try:
            yield
        finally:
            self.close()
            vars(self).update(kept)

    def close(self) -> None:
        """Removes what workers left."""
        if self.folder is not None and self.owner == os.getpid():
            shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, operation: str, reason: str) -> None:
        with self._lock:
            self.counts[operation, reason] += 1
        if self.owner != os.getpid() and time.monotonic() - self._last_write > _WRITE_EVERY_SECONDS:
            self.write()

    def write(self) -> None:
        """Leaves a worker's counts where its parent finds them."""
        if self.folder is None or self.owner == os.getpid() or not self.counts:
            return
        self._last_write = time.monotonic()
        with self._lock:
            rows = [[operation, reason, count] for (operation, reason), count in self.counts.items()]
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            return
        target = Path(self.folder) / f"{self.token}.json"
        target.parent.mkdir(mode=0o700, exist_ok=True)
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(rows))
        partial.replace(target)

    def total(self) -> Counter[tuple[str, str]]:
        counts = Counter(self.counts)
        if self.folder is not None and self.owner == os.getpid():
            for file in Path(self.folder).glob("*.json"):
                for operation, reason, count in json.loads(file.read_text()):
                    counts[operation, reason] += count
        return counts


ledger = _Ledger()
atexit.register(ledger.close)
_muted = threading.local()


def fallback_report() -> FallbackReport:
    """What ran in stock code since the backend was set, in this process and in the data workers that it started."""
    return FallbackReport(ledger.total())


def is_executing() -> bool:
    """True inside `executing()`: stock code must stay stock code, also where it calls what has a stand-in."""
    return getattr(_muted, "depth", 0) > 0


@contextmanager
def executing() -> Iterator[None]:
    """Inside, stock code runs because a plan says so: nothing is recorded and nothing reported."""
    before = getattr(_muted, "depth", 0)
    _muted.depth = before + 1
    try:
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
        reason = f"{reason}: {_caller_outside(inner_module)}"
    if ledger.strict:
        raise UnsupportedOperation(
            f"{operation} would run in stock code on the CPU ({reason}); leave it out, or set the backend with "
            "strict=False"
        )
    ledger.add(operation, reason)


def _caller_outside(module: str) -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch_sink.image", module + ".")) and name != module:
            return f"{name}.{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown caller"
