"""What the process knows of the samples and images that it makes: batches so far, and images that may be kept."""

from __future__ import annotations

import weakref
from typing import Any

# How many batches and single images this process has made, planned, or sent to another process. An image that is used
# again after the count has grown belongs to another sample; until then its uses are views of one.
batches = 0

# Whether the program of this process may begin passes over loaders: that of a data worker does not.
begins_passes = True

_MOST_DEAD = 1000
# By id, images and tensors that were made of files which were not decoded.
_of_files: dict[int, weakref.ref[Any]] = {}
_limit = _MOST_DEAD


def note_of_file(image: Any) -> None:
    """Notes an image or a tensor that begins with an undecoded file, for `held`, in a process that begins passes."""
    global _limit
    _of_files[id(image)] = weakref.ref(image)
    if len(_of_files) > _limit:
        for key, ref in [*_of_files.items()]:
            if ref() is None:
                _of_files.pop(key, None)
        _limit = 2 * len(_of_files) + _MOST_DEAD


def forget(image: Any) -> None:
    """Drops the reference to one that has its values now: torch swaps no tensors to which there are weak ones."""
    _of_files.pop(id(image), None)


def held() -> list[Any]:
    """Those that somebody still holds."""
    return [image for ref in [*_of_files.values()] if (image := ref()) is not None]
