"""Which part of each decoded image a batch reads: where the recorded operations begin with a crop, only that crop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_sink.image.plan.stages import Stage


def regions_read(shapes: Sequence[tuple[int, int]], chains: Sequence[Sequence[Stage]]) -> np.ndarray:
    """The part of each image that its first stage and the branches of that read together.

    Args:
        shapes: (height, width) of each image.
        chains: the stages of each.

    Returns:
        int32 [images, 4]: left, top, width, height, in pixels.
    """
    images, views = [], []
    for image, ((height, width), (first, *_)) in enumerate(zip(shapes, chains, strict=True)):
        for stage in (first, *(branch[0] for branch in first.branches)):
            images.append(image)
            views.append((*stage.view.x, stage.input_size[1], width, *stage.view.y, stage.input_size[0], height))
    begins, ends = _positions(np.array(views, np.int64).reshape(-1, 2, 6))
    regions = np.full((len(shapes), 4), np.iinfo(np.int32).max, np.int32)
    np.minimum.at(regions[:, :2], images, begins)
    regions[:, 2:] = 0
    np.maximum.at(regions[:, 2:], images, ends)
    regions[:, 2:] -= regions[:, :2]
    return regions


def _positions(axes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First position of each axis of an image that is read, and the end of those; at least one.

    Args:
        axes: int64 [views, 2, 6]: step, offset, begin and end of the view, how many positions it shows, how many the
            image has.
    """
    step, offset, begin, end, shown, size = np.moveaxis(axes, 2, 0)
    one = step * np.maximum(begin, 0) + offset
    other = step * (np.minimum(end, shown) - 1) + offset
    first = np.clip(np.minimum(one, other), 0, size - 1)
    return first, np.maximum(np.minimum(np.maximum(one, other) + 1, size), first + 1)
