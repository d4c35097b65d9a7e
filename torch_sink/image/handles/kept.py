"""Images that a dataset keeps in memory: a list of thumbnails, or a dict that fills up.

In stock code such an image has pixels after its first use; here its file would be decoded for every sample. So it is
decoded once. Without a device, the first call that is recorded on an image decodes it. With one, an image that is used
for a second sample keeps its pixels, if they take less memory than its file. And what the program holds when a pass
over a DataLoader begins is decoded before its workers start, so that they share the pixels.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from typing import Any

from torch_sink.errors import DecodeError
from torch_sink.image.core import settings, uses
from torch_sink.image.core.fallback import executing, ledger
from torch_sink.image.core.ops import VALUE_CALLS, replay
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.decode.source import PixelSource, is_worth_keeping
from torch_sink.image.handles.image import LazyPixels
from torch_sink.image.handles.tensor import HANDLES


def keep_held_images() -> None:
    """Makes the pixels of the images that the program holds when a pass over a DataLoader begins.

    A file that was neither used nor loaded is left alone: its `draft` may still be called.
    """
    kept = ledger.kept
    for image in filter(has_no_pixels, uses.held()):
        if type(image) in HANDLES:
            _keep_tensor(image)
        else:
            image.keep_pixels()
    if ledger.kept > kept:  # glibc holds on to the memory of the files while pixels lie among them
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def has_no_pixels(image: Any) -> bool:
    """Whether it is one of this package's whose pixels, or values, are not made yet."""
    if type(image) in HANDLES:
        return bool(image.is_recording)
    return isinstance(image, LazyPixels) and image.is_recording


def _keep_tensor(handle: Any) -> None:
    """Makes the values; where a device makes them, the image that they are made of."""
    recording = handle.lazy_recording
    source, calls = recording.source, recording.calls
    if not isinstance(source, (EncodedSource, PixelSource)):
        return
    with contextlib.suppress(DecodeError), executing():
        if settings.makes_pixels_here():
            handle.materialize()
            ledger.note_kept()
            return
        of_pixels = tuple(op for op in calls if op.name not in VALUE_CALLS)
        is_alone = handle.lazy_base is None and not handle.lazy_views
        has_its_size = calls[: len(of_pixels)] == of_pixels
        is_done = isinstance(source, PixelSource) and not of_pixels
        if is_alone and has_its_size and not is_done and is_worth_keeping(source, math.prod(recording.shape)):
            kept = PixelSource(replay(source.decode(), of_pixels), source.path)
            handle.__dict__["lazy_recording"] = recording.of_pixels(kept, calls[len(of_pixels) :])
            ledger.note_kept()
