"""The programs of a batch: recorded calls, lowered pass by pass, and which of them run together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torch_sink.image.core.atoms import Atom, Kind, Program
from torch_sink.image.core.fallback import executing
from torch_sink.image.core.ops import WIDE_TYPES, Op
from torch_sink.image.lower.lowering import lower, value_table
from torch_sink.image.plan.passes import passes_of
from torch_sink.image.sources.source import Source


class ImageShape(NamedTuple):
    """What a pass of an image begins with: height and width in pixels, 1 or 3 channels."""

    height: int
    width: int
    channels: int


def shape_of(source: Source) -> ImageShape:
    """The shape of a source that is no finished tensor."""
    width, height = source.size  # type: ignore[union-attr]
    return ImageShape(height, width, 3 if source.mode == "RGB" else 1)  # type: ignore[union-attr]


def programs_of(
    sources: Sequence[Source], calls: Sequence[tuple[Op, ...]], dtype: torch.dtype = torch.float32
) -> list[tuple[Program, ...]]:
    """Lowers the calls of every image.

    Args:
        sources: of the images, none a finished tensor.
        calls: recorded on each.
        dtype: of the batch.

    Returns:
        The programs of each image, one for each of its passes.
    """
    shapes, passes = [shape_of(source) for source in sources], [passes_of(ops) for ops in calls]
    lowered = [_lowered(shape, ops, in_floats=False) for shape, ops in zip(shapes, passes, strict=True)]
    # Tables hold half precision and wide types, but the kernel on floats does not compute in them.
    if dtype in (torch.float32, torch.uint8) and any(programs[-1].float_atoms is not None for programs in lowered):
        # Then the float kernel writes the result, of every image.
        for at, (shape, ops) in enumerate(zip(shapes, passes, strict=True)):
            if lowered[at][-1].float_atoms is None:
                lowered[at] = _lowered(shape, ops, in_floats=True)
    if dtype in WIDE_TYPES:
        for at, (shape, ops) in enumerate(zip(shapes, passes, strict=True)):
            if any(map(_writes_floats, lowered[at][-1].atoms)):
                lowered[at] = _lowered(shape, ops, in_floats=True)
    return lowered


def _writes_floats(atom: Atom) -> bool:
    """True for a box of float32 values that the kernel on bytes writes beside those of its tables."""
    return atom.kind in (Kind.ERASE, Kind.PASTE) and bool(atom.values[5])


def _lowered(shape: ImageShape, passes: Sequence[tuple[Op, ...]], *, in_floats: bool) -> tuple[Program, ...]:
    programs = []
    for number, ops in enumerate(passes, 1):
        program = lower(*shape, ops, in_floats and number == len(passes))
        programs.append(program)
        shape = ImageShape(*program.size, program.out_channels)
    return tuple(programs)


def earlier_passes(programs: Sequence[tuple[Program, ...]]) -> Iterator[list[tuple[int, Program]]]:
    """What runs before the last passes, in order: (position of an image, its program), of those written alike."""
    for number in range(max(map(len, programs)) - 1):
        groups: dict[tuple[Any, ...], list[tuple[int, Program]]] = {}
        for at, passes in enumerate(programs):
            if number < len(passes) - 1:
                program = passes[number]
                key = program.out_channels, program.size, program.float_atoms is None
                groups.setdefault(key, []).append((at, program))
        yield from groups.values()


def last_passes(programs: Sequence[tuple[Program, ...]]) -> list[list[int]]:
    """Positions of the images that one kernel makes the results of; one group where they are float32 or bytes."""
    groups: dict[tuple[bool, bool], list[int]] = {}
    for at, passes in enumerate(programs):
        groups.setdefault((passes[-1].float_atoms is not None, is_wide(passes[-1])), []).append(at)
    return [groups[key] for key in sorted(groups)]


def is_wide(program: Program) -> bool:
    """True where the values of bytes are of a type that the kernels do not write."""
    return program.float_atoms is None and values_of(program.value_channels, program.value_ops).dtype in WIDE_TYPES


def values_of(channels: int, value_ops: tuple[Op, ...]) -> torch.Tensor:
    """[channels, 256]: what stock code makes of each uint8."""
    with executing():
        return value_table(channels, value_ops)
