"""Which exceptions mean that a file is broken, and which file that is.

Told by where they were raised: while Pillow or torchvision opened, identified or decoded a file. So nothing has to
stand in for what opens files, and the exception is stock code's own until somebody decides what becomes of the sample.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from torch_sink.errors import DecodeError, SinkError


class BrokenFile(NamedTuple):
    """A file that stock code cannot open or decode.

    Attributes:
        path: its name; of an image that has none, which sample it was.
        reason: what stock code says.
    """

    path: str
    reason: str


# What the operating system says about one file; other numbers (no descriptor left, no memory, a network that is gone)
# are about the machine, and would hit the next file as well.
_ABOUT_THE_FILE = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO,
     errno.ENODEV, errno.EINVAL, errno.EFBIG, errno.EOVERFLOW, errno.EIO)
)  # fmt: skip
# Functions that are handed a file by their caller: what they raise themselves is about the argument.
_OPENERS = {
    "PIL.Image": ("open",),
    "torchvision.datasets.folder": ("pil_loader", "accimage_loader", "default_loader"),
    "torchvision.io.image": None,
    "torch_sink.image.handles.file": None,
    "torch_sink.image.handles.tensor_file": None,
    "torch_sink.image.sources.source": None,
}
_SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .png .webp .gif .bmp .tif .tiff .ppm .pgm .jp2 .avif .heic".split()  # noqa: SIM905
)


def broken_file(error: BaseException, sample: str) -> BrokenFile | None:
    """The file that made stock code raise `error`, or what it was raised from; None where they say something else.

    `sample` stands for the name of an image that has none.
    """
    cause: BaseException | None = error
    while cause is not None:
        found = _broken_file(cause, sample)
        if found is not None:
            return found
        cause = cause.__cause__
    return None


def _broken_file(error: BaseException, sample: str) -> BrokenFile | None:
    if isinstance(error, DecodeError):
        return BrokenFile(error.path, error.reason or str(error))
    if not isinstance(error, Exception) or isinstance(error, (SinkError, MemoryError)):
        return None
    if isinstance(error, OSError) and error.errno is not None and error.errno not in _ABOUT_THE_FILE:
        return None
    frames = list(_frames(error))
    reason = str(error) or type(error).__name__
    decoding = [frame for frame in frames if _opens_files(frame) or _reads_files(frame)]
    if not decoding:
        return _named_file(error, reason)
    if any("save" in frame.f_code.co_name for frame in decoding) or "closed file" in reason:
        return None
    if _opens_files(frames[-1]) and not isinstance(error, (OSError, RuntimeError)):
        return None
    path = _path(decoding) or _text(getattr(error, "filename", None))
    return BrokenFile(path or sample, reason.removesuffix(f" (in {path})"))


def _named_file(error: Exception, reason: str) -> BrokenFile | None:
    """For code that opens an image file itself and hands on what it read."""
    path = _text(error.filename) if isinstance(error, OSError) else ""
    return BrokenFile(path, reason) if os.path.splitext(path)[1].lower() in _SUFFIXES else None


def _frames(error: BaseException) -> Iterator[FrameType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _opens_files(frame: FrameType) -> bool:
    module = _module(frame)
    functions = _OPENERS.get(module, ())
    return functions is None or frame.f_code.co_name in functions


def _reads_files(frame: FrameType) -> bool:
    """True in Pillow's code for one format, and in what all formats share."""
    module = _module(frame)
    return module == "PIL.ImageFile" or module.endswith("ImagePlugin")


def _path(frames: list[FrameType]) -> str:
    """The name of the file that the innermost of these frames has to do with, as far as it is known."""
    for frame in reversed(frames):
        names = frame.f_locals
        image = names.get("self")
        candidates = [names.get("filename"), names.get("path"), names.get("input")]
        candidates += [getattr(image, name, None) for name in ("filename", "sink_name")]
        candidates += [getattr(file, "name", None) for file in (names.get("fp"), getattr(image, "fp", None))]
        for candidate in candidates:
            if found := _text(candidate):
                return found
    return ""


def _text(path: Any) -> str:
    """A path as text; "" for what is none."""
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
