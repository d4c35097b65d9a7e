"""Broken files: which exceptions mean one, the policy for their samples, and the report of what was skipped.

A file is broken if the exception was raised while Pillow or torchvision opened, identified or decoded a file. So the
functions that open files need no stand-ins, and under the policy "raise" users see stock code's exception.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_tb
from types import FrameType
from typing import Any, Literal, NamedTuple, get_args

from torch.utils.data import get_worker_info

from torch_sink.common.ranks import warn_of_rank
from torch_sink.errors import DecodeError, SinkError, add_note


class BrokenFile(NamedTuple):
    """The path of a file that stock code cannot open or decode, or its sample's number, and stock code's message."""

    path: str
    reason: str


# Errors of the operating system that concern one file; others (no descriptor left, no memory, no network) concern the
# machine, and would affect the next file too.
_ABOUT_THE_FILE = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO,
     errno.ENODEV, errno.EINVAL, errno.EFBIG, errno.EOVERFLOW, errno.EIO)
)  # fmt: skip
# Functions of each module that open the file that a caller passes, or None for all of them. An error that they raise
# themselves, unless it is an OSError or RuntimeError, is about the argument.
_OPENERS = {
    "PIL.Image": ("open",),
    "torchvision.datasets.folder": ("pil_loader", "accimage_loader", "default_loader"),
    "torchvision.io.image": None,
    "torch_sink.image.handles.file": None,
    "torch_sink.image.decode.encoded": None,
}
_SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .png .webp .gif .bmp .tif .tiff .ppm .pgm .jp2 .avif .heic".split()  # noqa: SIM905
)


def broken_file(error: BaseException, sample: str) -> BrokenFile | None:
    """The broken file that caused a dataset's `error`, or an error in its chain of causes; None if no file did.

    `sample` takes the place of the path for an image without one.
    """
    cause: BaseException | None = error
    while cause is not None:
        if found := _broken_file(cause, sample):
            return found
        cause = cause.__cause__
    return None


# What is said of a broken file in an IterableDataset. `errors.py` knows it by its last words.
IN_A_STREAM = (
    "an exception ends the generator of an IterableDataset, so on_decode_error cannot leave this sample out: catch it "
    "where the file is opened, in the dataset's own code"
)


def name_file(error: Exception, advice: str = "") -> None:
    """Adds the path of the broken file that caused an error as a note, unless its message says it, and the advice."""
    broken = broken_file(error, "")
    if broken is None:
        return
    path = broken.path or _sample_of(error)
    _add_once(error, f"file: {path}" if path and path not in str(error) else "")
    _add_once(error, advice)


def _add_once(error: Exception, text: str) -> None:
    if not text or text in getattr(error, "__notes__", ()):
        return
    if get_worker_info() is not None and not hasattr(error, "add_note"):
        # Only the text of an error leaves a worker, and Python 3.10 writes no notes there.
        words = error.args
        error.args = (f"{words[0]}\n{text}",) if len(words) == 1 and isinstance(words[0], str) else words
    add_note(error, text)


def _sample_of(error: BaseException) -> str:
    """The sample of a map-style dataset that an error comes from, for files that were read as bytes; "" if unknown."""
    caller = ""
    for frame, _ in walk_tb(error.__traceback__):
        code, names = frame.f_code, frame.f_locals
        if caller == "torch.utils.data._utils.fetch" and code.co_name == "__getitem__" and code.co_argcount == 2:
            dataset, index = (names.get(name) for name in code.co_varnames[:2])
            return f"that of sample {index!r} of {type(dataset).__name__}"
        caller = str(frame.f_globals.get("__name__"))
    return ""


def _broken_file(error: BaseException, sample: str) -> BrokenFile | None:
    if isinstance(error, DecodeError):
        return BrokenFile(error.path, error.reason or str(error))
    if not isinstance(error, Exception) or isinstance(error, (SinkError, MemoryError)):
        return None
    if isinstance(error, OSError) and error.errno is not None and error.errno not in _ABOUT_THE_FILE:
        return None
    reason, named = str(error) or type(error).__name__, _text(getattr(error, "filename", None))
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    # Frames that open files, and those in Pillow's code for one format, or in the base of all formats.
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    in_pillow = [module == "PIL.ImageFile" or module.endswith("ImagePlugin") for module in modules]
    decoding = [frame for frame, reads in zip(frames, in_pillow, strict=True) if reads or _opens_files(frame)]
    if not decoding:  # code that opens an image file itself, such as by open() and read()
        is_image = isinstance(error, OSError) and os.path.splitext(named)[1].lower() in _SUFFIXES
        return BrokenFile(named, reason) if is_image else None
    if any("save" in frame.f_code.co_name for frame in decoding) or "closed file" in reason:
        return None
    if _opens_files(frames[-1]) and not isinstance(error, (OSError, RuntimeError)):
        return None
    path = _path(decoding) or named
    return BrokenFile(path or sample, reason.removesuffix(f" (in {path})"))


def _opens_files(frame: FrameType) -> bool:
    functions = _OPENERS.get(str(frame.f_globals.get("__name__")), ())
    return functions is None or frame.f_code.co_name in functions


def _path(frames: list[FrameType]) -> str:
    """The name of the file that the innermost frame with one works on; "" if none has a name."""
    for names in (frame.f_locals for frame in reversed(frames)):
        image = names.get("self")
        candidates = [names.get("filename"), names.get("path"), names.get("input")]
        candidates += [getattr(image, name, None) for name in ("filename", "lazy_name")]
        # Pillow lets go of a file before it raises; what it calls are methods of it.
        files = [getattr(names.get(name), "__self__", None) for name in ("seek", "read")]
        files += [names.get("fp"), getattr(image, "fp", None)]
        candidates += [getattr(file, "name", None) for file in files]
        if found := next(filter(None, map(_text, candidates)), ""):
            return found
    return ""


def _text(path: Any) -> str:
    """A path as text; "" for an object that is no path."""
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""


# --- the policy: what happens to samples with broken files

Policy = Literal["raise", "skip", "replace"]
POLICIES = get_args(Policy)


class _DecodeErrors(threading.local):
    """Where each thread finds its policy.

    Attributes:
        policy: for files that the calling thread opens, and for loaders whose iterators it makes.
    """

    policy: Policy = "raise"  # of the class: that of the process, for threads without another one


decode_errors = _DecodeErrors()


def set_policy(policy: Policy) -> None:
    """Sets the policy of this process, for threads without another one."""
    _DecodeErrors.policy = policy


@contextmanager
def policy_of_thread(policy: Policy | None) -> Iterator[None]:
    """A context in which `policy` holds in the calling thread; None changes nothing."""
    if policy is None:
        yield
        return
    before = vars(decode_errors).get("policy")
    decode_errors.policy = policy
    try:
        yield
    finally:
        if before is None:
            vars(decode_errors).pop("policy", None)
        else:
            decode_errors.policy = before


# --- the report

_LINES_LOGGED = 10


@dataclass
class DecodeReport:
    """Files that stock code cannot open or decode. Truthy if there are any; `str()` lists them.

    Attributes:
        skipped: samples dropped under `on_decode_error="skip"`; a file counts each time that it is read.
        replaced: samples replaced under `on_decode_error="replace"`.
        files: {path: stock code's message}, in the order in which they were first read.
    """

    skipped: int = 0
    replaced: int = 0
    files: dict[str, str] = field(default_factory=dict)

    def add(self, other: DecodeReport) -> None:
        """Adds the counts and files of another report, such as that of a batch."""
        self.skipped += other.skipped
        self.replaced += other.replaced
        for path, reason in other.files.items():
            self.files.setdefault(path, reason)

    def __add__(self, other: DecodeReport) -> DecodeReport:
        found = DecodeReport(self.skipped, self.replaced, dict(self.files))
        found.add(other)
        return found

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
        """Logs the counts and the first files, as a warning."""
        lines = str(self).splitlines()
        if len(lines) > 1 + _LINES_LOGGED:
            more = len(lines) - 1 - _LINES_LOGGED
            lines[1 + _LINES_LOGGED :] = [f"  and {more} more: see torch_sink.decode_report()"]
        warn_of_rank("%s", "\n".join(lines))


_total = DecodeReport()
_lock = threading.Lock()


def add_to_report(loss: DecodeReport) -> None:
    """Adds the report of a batch to that of this process."""
    with _lock:
        _total.add(loss)


def decode_report() -> DecodeReport:
    """The broken files of all batches that arrived in this process since the image backend was set.

    Batches of data workers count when they arrive, and those of a `SinkLoader` when the training loop takes them. After
    each pass with broken files, the counts and the first files are also logged as a warning of the logger "torch_sink".

    Examples:
        >>> print(decode_report())
        no broken files
    """
    with _lock:
        return _total + DecodeReport()


def clear_report() -> None:
    """Sets the report of this process to zero."""
    global _total
    with _lock:
        _total = DecodeReport()
