"""Which part of each decoded image a batch reads: where the recorded operations begin with a crop, only that crop."""

from __future__ import annotations

from collections.abc import Sequence

from torch_sink.image.core.atoms import Kind
from torch_sink.image.plan.stages import Stage
from torch_sink.image.sources.decoded import Box


def region_read(height: int, width: int, stages: Sequence[Stage]) -> Box:
    """The part of an image of that size that its first stage and the branches of that read together."""
    first = stages[0]
    left, top, right, bottom = width, height, 0, 0
    for stage in (first, *(branch[0] for branch in first.branches)):
        begin, end = _positions(stage.view.x, stage.input_size[1], width)
        left, right = min(left, begin), max(right, end)
        begin, end = _positions(stage.view.y, _rows_shown(stage), height)
        top, bottom = min(top, begin), max(bottom, end)
    return Box(left, top, right - left, bottom - top)


def _rows_shown(stage: Stage) -> int:
    """Rows of its input that a stage reads at most: a horizontal filter makes those alone that are needed."""
    if stage.head is not None and stage.head.kind in (Kind.RESAMPLE_X, Kind.FILTER_X):
        return stage.head.size[0]
    return stage.input_size[0]


def _positions(axis: tuple[int, int, int, int], shown: int, size: int) -> tuple[int, int]:
    """First position of an axis of an image that is read, and the end of those; at least one.

    Args:
        axis: of the view.
        shown: how many positions the view shows.
        size: how many the image has.
    """
    step, offset, begin, end = axis
    begin, end = max(begin, 0), min(end, shown)
    first, last = sorted((step * begin + offset, step * (end - 1) + offset))
    first = min(max(first, 0), size - 1)
    return first, max(min(last + 1, size), first + 1)
