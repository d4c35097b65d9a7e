"""What is to become of broken files (they raise, are skipped or are replaced), and what became of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch_sink.damage.cause import BrokenFile

POLICIES = ("raise", "skip", "replace")


class _OfThread(threading.local):
    policy: str | None = None


_of_process = "raise"
_of_thread = _OfThread()
# Called when a thread gets a policy of its own, other than "raise".
when_one_is_set: list[Callable[[], None]] = []


def check_policy(policy: str) -> str:
    """The policy.

    Raises:
        ValueError: there is none of that name.
    """
    if policy not in POLICIES:
        allowed = ", ".join(map(repr, POLICIES))
        raise ValueError(f"on_decode_error={policy!r} is not allowed: give one of {allowed}")
    return policy


def current_policy() -> str:
    """What holds for the files that the calling thread opens, and for the loaders whose iterators it makes."""
    return _of_thread.policy or _of_process


def set_policy(policy: str) -> None:
    """Says what holds in this process where a thread has nothing else."""
    global _of_process
    _of_process = policy


def or_current(policy: str) -> str:
    """What holds where `policy` was asked for: "raise" leaves it to the process."""
    return policy if policy != "raise" else current_policy()


@contextmanager
def policy_of_thread(policy: str) -> Iterator[None]:
    """Inside, `policy` holds in the calling thread; "raise" leaves to the process what holds."""
    if policy == "raise":
        yield
        return
    is_new = policy != current_policy()
    before, _of_thread.policy = _of_thread.policy, policy
    try:
        if is_new:
            for call in when_one_is_set:
                call()
        yield
    finally:
        _of_thread.policy = before


# --- what became of them

_log = logging.getLogger("torch_sink")
_LINES_LOGGED = 10


@dataclass(frozen=True)
class Loss:
    """Samples of one batch whose files are broken.

    Attributes:
        skipped: samples that were dropped.
        replaced: samples in whose place another one stands.
        files: what was broken, with the reasons.
    """

    skipped: int = 0
    replaced: int = 0
    files: tuple[BrokenFile, ...] = ()

    def __add__(self, other: Loss) -> Loss:
        if not other:
            return self
        return Loss(self.skipped + other.skipped, self.replaced + other.replaced, self.files + other.files)

    def __bool__(self) -> bool:
        return bool(self.skipped or self.replaced)


NO_LOSS = Loss()


@dataclass
class DecodeReport:
    """Files that stock code cannot open or decode. Truthy if there were any; `str()` lists them.

    Attributes:
        skipped: samples dropped under `on_decode_error="skip"`; a file counts each time that it comes.
        replaced: samples replaced under `on_decode_error="replace"`.
        files: {path: what stock code said}, in the order in which they came first.
    """

    skipped: int = 0
    replaced: int = 0
    files: dict[str, str] = field(default_factory=dict)

    def add(self, loss: Loss) -> None:
        """Counts what a batch lost."""
        self.skipped += loss.skipped
        self.replaced += loss.replaced
        for path, reason in loss.files:
            self.files.setdefault(path, reason)

    def __bool__(self) -> bool:
        return bool(self.skipped or self.replaced)

    def __len__(self) -> int:
        return len(self.files)

    def __str__(self) -> str:
        return "\n".join([self.summary(), *(f"  {path}: {reason}" for path, reason in self.files.items())])

    def summary(self) -> str:
        """The counts, in one line."""
        if not self:
            return "no broken files"
        return f"{self.skipped} samples skipped, {self.replaced} replaced; {len(self.files)} broken files"

    def log(self) -> None:
        """Tells the counts and the first files, as a warning."""
        lines = str(self).splitlines()
        if len(lines) > 1 + _LINES_LOGGED:
            more = len(lines) - 1 - _LINES_LOGGED
            lines[1 + _LINES_LOGGED :] = [f"  and {more} more: see torch_sink.decode_report()"]
        _log.warning("%s", "\n".join(lines))


_total = DecodeReport()
_lock = threading.Lock()


def add_to_report(loss: Loss) -> None:
    """Counts what a batch lost, in this process."""
    with _lock:
        _total.add(loss)


def decode_report() -> DecodeReport:
    """The broken files of all batches that arrived in this process since the image backend was set.

    Batches of data workers are counted when they arrive, and those of every `SinkLoader` when they are consumed. At the
    end of each pass that met broken files, the counts and the first files are also logged as a warning of the logger
    "torch_sink".

    Examples:
        >>> print(decode_report())
        no broken files
    """
    with _lock:
        return DecodeReport(_total.skipped, _total.replaced, dict(_total.files))


def clear_report() -> None:
    """Begins to count anew."""
    global _total
    with _lock:
        _total = DecodeReport()
