"""Which part of each decoded image a batch reads: where the recorded operations begin with a crop, only that crop."""

from __future__ import annotations

from collections.abc import Sequence

from torch_sink.image.core.atoms import Program
from torch_sink.image.plan.build import chains_of
from torch_sink.image.plan.jobs import ImageInput
from torch_sink.image.sources.decoded import Box


def boxes_read(
    sizes: Sequence[tuple[int, int]], programs: Sequence[Program], entries: Sequence[int], count: int
) -> list[Box | None]:
    """The part of each source that the programs of its images read together.

    Args:
        sizes: (width, height) of each image.
        programs: what each image goes through.
        entries: position of each image's source.
        count: how many sources there are.

    Returns:
        A box for each source; None where all of it is read, or nobody reads it.
    """
    boxes: list[Box | None] = [None] * count
    chains = chains_of([ImageInput(0, 0, 0, 0, height, width) for width, height in sizes], programs)
    for (width, height), (byte_stages, float_stages), entry in zip(sizes, chains, entries, strict=True):
        first = (byte_stages or float_stages)[0]
        for stage in (first, *(branch[0] for branch in first.branches)):
            left, right = _positions(stage.view.x, stage.input_size[1], width)
            top, bottom = _positions(stage.view.y, stage.input_size[0], height)
            known = boxes[entry]
            if known is not None:
                left, right = min(left, known.left), max(right, known.left + known.width)
                top, bottom = min(top, known.top), max(bottom, known.top + known.height)
            boxes[entry] = Box(left, top, right - left, bottom - top)
    whole = {entry: Box(0, 0, *size) for entry, size in zip(entries, sizes, strict=True)}
    return [None if box == whole.get(entry) else box for entry, box in enumerate(boxes)]


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
