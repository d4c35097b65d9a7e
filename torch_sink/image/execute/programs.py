"""The programs of a batch: recorded calls, lowered, and which of them run together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch_sink.image.core.atoms import Program
from torch_sink.image.core.ops import Op
from torch_sink.image.plan.lowering import lower
from torch_sink.image.sources.source import Source


class ImageShape(NamedTuple):
    """What an image begins with: height and width in pixels, 1 or 3 channels."""

    height: int
    width: int
    channels: int


def shape_of(source: Source) -> ImageShape:
    """The shape of a source that is no finished tensor."""
    width, height = source.size  # type: ignore[union-attr]
    return ImageShape(height, width, 3 if source.mode == "RGB" else 1)  # type: ignore[union-attr]


def programs_of(sources: Sequence[Source], calls: Sequence[tuple[Op, ...]]) -> list[Program]:
    """Lowers the calls of every image.

    Args:
        sources: of the images, none a finished tensor.
        calls: recorded on each.
    """
    return [lower(*shape_of(source), ops) for source, ops in zip(sources, calls, strict=True)]


def run_together(programs: Sequence[Program]) -> list[list[int]]:
    """Positions of the images that run together: all, but for those whose bytes are looked up afterwards."""
    groups: dict[bool, list[int]] = {}
    for at, program in enumerate(programs):
        groups.setdefault(bool(program.value_ops), []).append(at)
    return [groups[key] for key in sorted(groups)]
