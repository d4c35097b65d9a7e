"""A count that tells samples apart, and the images of undecoded files that the program still holds."""

from __future__ import annotations

import weakref
from typing import Any

# How many batches and single images this process has made, planned, or sent to another process. An image that is used
# again after the count has grown belongs to another sample; until then its uses are views of one.
batches = 0

# Whether the program of this process may begin passes over loaders: that of a data worker does not.
begins_passes = True

# By id, images and tensors that begin with an undecoded file, in a process that begins passes, while somebody holds
# them. A tensor that has its values leaves: torch swaps none to which there are weak references.
of_files: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def held() -> list[Any]:
    """Those of `of_files`. Other threads may make images meanwhile, so `values()`, which iterates, would raise."""
    return [image for ref in of_files.valuerefs() if (image := ref()) is not None]
